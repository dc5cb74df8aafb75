from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_core.config import TrainingConfig
from dflash_core.drafter import valid_anchors
from dflash_core.errors import DataError, ShardError
from dflash_core.feed import Row, ShardRows, collate, steps_available
from dflash_core.shards import ShardDataset
from tests.shards.fakes import FakeSamples, run

T, N = 96, 10
SAMPLES = FakeSamples(40)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ShardDataset:
    folder = tmp_path_factory.mktemp("dataset")
    run(folder, SAMPLES)
    return ShardDataset(folder)


def source(dataset: ShardDataset, seed: int = 0, row_length: int = T, num_anchors: int = N) -> ShardRows:
    return ShardRows(dataset, TrainingConfig(row_length=row_length, num_anchors=num_anchors), seed)


def same(a: Row, b: Row) -> bool:
    tensors = all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in ("features", "tokens", "document_ids", "positions", "loss_mask", "anchors")
    )
    return tensors and (a.ordinal, a.epoch, a.sample_ids) == (b.ordinal, b.epoch, b.sample_ids)


def test_a_row_holds_its_samples_whole_and_padding_after_them(dataset: ShardDataset) -> None:
    rows = source(dataset)
    for ordinal in range(rows.rows_per_epoch(0)):
        row = rows.row(ordinal)
        end = 0
        for document, name in enumerate(row.sample_ids):
            sample = dataset.sample(dataset.ids.index(name))
            here = slice(end, end + len(sample.tokens))
            end = here.stop
            assert torch.equal(row.features[here], sample.features)
            assert torch.equal(row.tokens[here], sample.tokens.long())
            assert torch.equal(row.loss_mask[here], sample.loss_mask)
            assert torch.equal(row.positions[here], torch.arange(len(sample.tokens)))
            assert (row.document_ids[here] == document).all()
        assert (row.document_ids[end:] == -1).all()
        assert not row.features[end:].any()
        assert not row.tokens[end:].any()
        assert not row.loss_mask[end:].any()


def test_every_row_has_the_same_shapes_and_dtypes(dataset: ShardDataset) -> None:
    rows = source(dataset)
    for ordinal in range(2 * rows.rows_per_epoch(0)):
        row = rows.row(ordinal)
        assert row.features.shape == (T, 16)
        assert row.features.dtype == torch.bfloat16
        assert row.anchors.shape == (N,)
        found = [getattr(row, name).dtype for name in ("tokens", "document_ids", "positions", "loss_mask", "anchors")]
        assert found == [torch.int64, torch.int32, torch.int64, torch.bool, torch.int64]
        assert {len(getattr(row, name)) for name in ("tokens", "document_ids", "positions", "loss_mask")} == {T}


@pytest.mark.parametrize("slots", [1, 10, 95])
def test_a_row_has_min_k_n_anchors_ascending_and_the_empty_slots_last(dataset: ShardDataset, slots: int) -> None:
    rows = source(dataset, num_anchors=slots)
    for ordinal in range(rows.rows_per_epoch(0)):
        row = rows.row(ordinal)
        valid = valid_anchors(row.loss_mask, row.document_ids).nonzero().flatten()
        filled = min(slots, len(valid))
        chosen = row.anchors[:filled]
        assert (chosen.diff() > 0).all()
        assert torch.isin(chosen, valid).all()
        assert (row.anchors[filled:] == -1).all()


def test_an_epoch_holds_every_sample_once_and_ordinals_run_on(dataset: ShardDataset) -> None:
    rows = source(dataset)
    count = rows.rows_per_epoch(0)
    for epoch in range(3):
        made = [rows.row(ordinal) for ordinal in range(epoch * count, (epoch + 1) * count)]
        assert {row.epoch for row in made} == {epoch}
        assert [row.ordinal for row in made] == list(range(epoch * count, (epoch + 1) * count))
        assert sorted(name for row in made for name in row.sample_ids) == dataset.ids


def test_a_row_is_a_function_of_its_ordinal_whatever_was_made_before(dataset: ShardDataset) -> None:
    rows = source(dataset)
    forward = [rows.row(ordinal) for ordinal in range(3 * rows.rows_per_epoch(0))]
    fresh = source(dataset)
    for ordinal in reversed(range(len(forward))):
        assert same(fresh.row(ordinal), forward[ordinal])


def test_anchors_are_drawn_anew_in_every_epoch_and_with_every_seed(dataset: ShardDataset) -> None:
    def anchors_by_sample(rows: ShardRows, epoch: int) -> dict[str, tuple[int, ...]]:
        count, found = rows.rows_per_epoch(0), {}
        for ordinal in range(epoch * count, (epoch + 1) * count):
            row = rows.row(ordinal)
            for anchor in row.anchors[row.anchors >= 0].tolist():
                found.setdefault(row.sample_ids[row.document_ids[anchor]], []).append(int(row.positions[anchor]))
        return {name: tuple(positions) for name, positions in found.items()}

    first = anchors_by_sample(source(dataset), 0)
    assert anchors_by_sample(source(dataset), 0) == first
    assert anchors_by_sample(source(dataset), 1) != first
    assert anchors_by_sample(source(dataset, seed=1), 0) != first


def test_a_sample_longer_than_a_row_is_refused_at_once(dataset: ShardDataset) -> None:
    with pytest.raises(DataError, match=r"row length 20.*Raise training\.row_length"):
        source(dataset, row_length=20, num_anchors=4)


def test_a_damaged_shard_is_named_by_the_row_that_needs_it(tmp_path: Path) -> None:
    run(tmp_path, FakeSamples(5))
    path = tmp_path / "shard-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    rows = source(ShardDataset(tmp_path))
    with pytest.raises(ShardError, match=r"shard-00001\.safetensors: sample 'sample-004' is damaged"):
        list(map(rows.row, range(rows.rows_per_epoch(0))))


def test_what_rows_are_made_of_cannot_be_written_to(dataset: ShardDataset) -> None:
    for name in ("features", "tokens"):
        [(_, stored)] = dataset.sample(0).pieces(name)
        with pytest.raises(ValueError, match="read-only"):
            stored[0] = 1


def test_steps_run_on_over_epochs(dataset: ShardDataset) -> None:
    rows = source(dataset)
    count = rows.rows_per_epoch(0)
    assert steps_available(rows, 1, count + 1) == 0
    assert steps_available(rows, 3, 2) == 3 * count // 2
    assert steps_available(rows, 2, count + 1) == 1


def test_a_batch_stacks_rows_and_one_row_is_not_copied(dataset: ShardDataset) -> None:
    rows = source(dataset)
    three = [rows.row(ordinal) for ordinal in range(3)]
    batch = collate(three)
    assert batch.features.shape == (3, T, 16)
    assert all(torch.equal(batch.anchors[i], row.anchors) for i, row in enumerate(three))
    alone = collate(three[:1])
    assert alone.features.shape == (1, T, 16)
    assert alone.features.data_ptr() == three[0].features.data_ptr()
    assert alone.to("meta").tokens.device.type == "meta"


def test_the_steps_of_any_number_of_epochs_are_known_at_once() -> None:
    class Rows:
        def rows_per_epoch(self, epoch: int) -> int:
            return 5

        def row(self, ordinal: int) -> Row:
            raise NotImplementedError

    assert steps_available(Rows(), 3, 4) == 3
    assert steps_available(Rows(), 10**30, 5) == 10**30
