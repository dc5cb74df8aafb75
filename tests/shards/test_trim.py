"""What a trimmed dataset leaves out is what no anchor can use, and nothing else of it is another."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from dflash_core.config import ExtractionConfig, TrainingConfig
from dflash_core.drafter import block_labels, dflash_dense_mask, teacher_states, valid_anchors
from dflash_core.errors import ShardError
from dflash_core.feed import ShardRows
from dflash_core.shards import TEACHER_COLUMNS, ShardCard, ShardDataset, verify_shards
from dflash_core.shards.format import Layout
from dflash_core.shards.trim import SEEN, TAUGHT, runs, used_rows
from tests.shards.fakes import CONFIG, HIDDEN, FakeSamples, hidden_states, run

BLOCK, WINDOW = 4, 6
TEXT = ("format", "target_name", "target_revision", "target_digest", "target_dtype", "tokenizer_digest", "template_digest", "tap_layers")
NUMBERS = ("hidden_size", "columns", "samples_digest", "num_samples", "samples_per_shard", "batch_tokens", "code_version")


class Turns(FakeSamples):
    """Prompts and answers by turns, of lengths that differ; one sample has no anchor, and one is an answer from its first token to its last."""

    def loss_mask(self, i: int) -> np.ndarray:
        mask = np.arange(self.lengths[i]) % (14 + i % 3) >= 10
        return np.zeros_like(mask) if i == 3 else mask | (i == 5)


SAMPLES = Turns(14)


class OfOneMask:
    def __init__(self, mask: list[bool]):
        self.mask = np.array(mask)

    def loss_mask(self, index: int) -> np.ndarray:
        return self.mask


@given(mask=st.lists(st.booleans(), min_size=2, max_size=24), window=st.sampled_from([0, 4, 5, 9]))
def test_what_is_kept_is_what_the_blocks_of_all_anchors_see_and_where_the_target_says_their_labels(mask: list[bool], window: int) -> None:
    tokens = len(mask)
    mask_BT, ids_BT = torch.tensor([mask]), torch.zeros(1, tokens, dtype=torch.int32)
    anchors_BN = torch.cat([valid_anchors(mask_BT, ids_BT)[0].nonzero().flatten(), torch.tensor([-1])])[None]  # and an empty slot
    seen = dflash_dense_mask(anchors_BN, ids_BT, BLOCK, window)[0, 0, :, :tokens].any(dim=0)
    places = teacher_states(torch.arange(tokens)[None, :, None], anchors_BN, BLOCK)[..., 0]
    labelled = block_labels(torch.arange(tokens)[None], mask_BT, ids_BT, anchors_BN, BLOCK)[..., 1:] >= 0
    samples: Any = OfOneMask(mask)
    used = used_rows(samples, [0], window)
    assert torch.equal(used[SEEN][0], seen)
    assert used[TAUGHT][0].nonzero().flatten().tolist() == places[labelled].unique().tolist()


def extraction(folder: Path, trim: bool, **changes: Any) -> dict[str, Any]:
    config = CONFIG.model_copy(update={"trim": trim, **changes})

    def target(documents: Any) -> torch.Tensor:
        features_TF = hidden_states(documents)
        return features_TF if config.teacher == "none" else torch.cat([features_TF, features_TF[:, :HIDDEN] + 1], dim=1)

    def likeliest(last_TH: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        top = last_TH.topk(count)
        return top.indices, top.values

    return run(folder, SAMPLES, target, config=config, window=WINDOW, heads=[likeliest] if config.teacher == "topk" else [])


def without_headers(folder: Path) -> int:
    contents = [path.read_bytes() for path in folder.glob("shard-*")]
    return sum(len(content) - 8 - int.from_bytes(content[:8], "little") for content in contents)


@pytest.mark.parametrize("changes", [{}, {"feature_dtype": "fp8", "teacher": "topk", "teacher_tokens": 3}, {"teacher": "last_hidden"}])
def test_rows_of_a_trimmed_dataset_are_those_of_the_whole_one_wherever_they_are_read_and_0_elsewhere(tmp_path: Path, changes: dict) -> None:
    whole, trimmed = extraction(tmp_path / "whole", False, **changes), extraction(tmp_path / "trimmed", True, **changes)
    assert verify_shards(tmp_path / "trimmed") == []
    assert trimmed["trimmed_bytes"] == without_headers(tmp_path / "whole") - without_headers(tmp_path / "trimmed")
    assert trimmed["trimmed_bytes"] > 0.2 * whole["bytes"]
    further = TEACHER_COLUMNS[ExtractionConfig(**changes).teacher]
    settings = TrainingConfig(row_length=96, num_anchors=10)
    sources = [ShardRows(ShardDataset(tmp_path / name), settings, 0, further=further) for name in ("whole", "trimmed")]
    used = {SAMPLES.id(i): {name: masks[0] for name, masks in used_rows(SAMPLES, [i], WINDOW).items()} for i in range(len(SAMPLES))}  # type: ignore[arg-type]
    for ordinal in range(2 * sources[0].rows_per_epoch(0)):
        expected, found = (source.row(ordinal).tensors for source in sources)
        ids = sources[0].row(ordinal).sample_ids
        for name, values in expected.items():
            if name in ("features", "feature_scales", *further):
                rows = torch.cat([used[id][TAUGHT if name in further else SEEN] for id in ids])
                kept = torch.cat([rows, torch.zeros(len(values) - len(rows), dtype=torch.bool)])
                values = values.float() * kept[:, None]
            assert torch.equal(values.float(), found[name].float()), name


def test_a_sample_of_a_trimmed_dataset_has_all_of_its_tokens_and_0_for_the_features_that_are_not_stored(tmp_path: Path) -> None:
    extraction(tmp_path, True)
    dataset = ShardDataset(tmp_path)
    assert not dataset.sample(3).features.any()
    for i in (3, 5, int(np.argmax(SAMPLES.lengths))):
        sample, seen = dataset.sample(i), used_rows(SAMPLES, [i], WINDOW)[SEEN][0]  # type: ignore[arg-type]
        assert sample.features.shape == (len(sample.tokens), 16)
        np.testing.assert_array_equal(sample.tokens.numpy(), SAMPLES.tokens(i))
        assert torch.equal(sample.features.any(dim=1), seen)
        assert sum(len(rows) for _, rows in sample.pieces("features")) == int(seen.sum())


def test_pyarrow_and_safetensors_alone_read_a_trimmed_dataset(tmp_path: Path) -> None:
    extraction(tmp_path, True)
    longest = int(np.argmax(SAMPLES.lengths))
    row = pa.ipc.open_file(str(tmp_path / "index.arrow")).read_all().to_pylist()[longest]
    with safe_open(tmp_path / f"shard-{row['shard']:05d}.safetensors", "pt") as shard:
        seen = shard.get_slice("seen")[row["start"] : row["start"] + row["tokens"]]
        stored = shard.get_slice("features")[row["seen_start"] : row["seen_start"] + row["seen"]]
    features = stored.new_zeros(row["tokens"], stored.shape[1])
    features[seen] = stored
    assert torch.equal(features, ShardDataset(tmp_path).sample(longest).features)
    assert len(runs(seen.numpy())) > 1


def test_a_dataset_that_is_not_trimmed_has_no_word_of_it(tmp_path: Path) -> None:
    extraction(tmp_path, False)
    card = json.loads((tmp_path / "card.json").read_bytes())
    assert (tuple(card), card["format"]) == (TEXT + NUMBERS, 1)
    assert {tuple(column) for column in card["columns"]} == {("name", "dtype", "shape")}
    assert pa.ipc.open_file(str(tmp_path / "index.arrow")).schema.names == ["sample", "id", "shard", "start", "tokens", "supervised", "crc32"]


@pytest.mark.parametrize(("window", "fits"), [(WINDOW, True), (WINDOW - 1, True), (WINDOW + 1, False), (0, False)])
def test_shards_that_are_trimmed_to_less_than_a_drafter_sees_are_refused_with_both_windows(tmp_path: Path, window: int, fits: bool) -> None:
    extraction(tmp_path, True)
    card = ShardCard.read(tmp_path)
    if fits:
        card.require_window(window, tmp_path)
    else:
        sees = "drafter.sliding_window = 7 sees farther" if window else "draft layers with full attention"
        with pytest.raises(ShardError, match=rf"card\.json: trimmed_for_window = 6.*{sees}.*extraction\.trim = false.*to at most 6"):
            card.require_window(window, tmp_path)
    card.model_copy(update={"trimmed_for_window": 0}).require_window(window, tmp_path)


def test_shards_that_are_trimmed_for_another_window_are_not_continued(tmp_path: Path) -> None:
    extraction(tmp_path, True)
    with pytest.raises(ShardError, match=r"trimmed_for_window: the shards have 6, this run needs 8"):
        run(tmp_path, SAMPLES, config=CONFIG.model_copy(update={"trim": True}), window=8)


@pytest.fixture(scope="module")
def trimmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trimmed")
    extraction(folder, True, feature_dtype="fp8", teacher="last_hidden")
    return folder


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"format": 1}, r"format = 1, trimmed_for_window = 6, where = \['seen', 'taught'\] in columns: a trimmed dataset has format 2"),
        ({"format": 3}, "format = 3: Input should be 1 or 2"),
        ({"trimmed_for_window": -1}, "trimmed_for_window = -1: Input should be greater"),
        ({"samples_per_shard": 0}, "samples_per_shard = 0: Input should be greater"),
        ({"hidden_size": 9}, r"features have the shape \(16,\), and not tap_layers × hidden_size"),
        ({"features": {"where": None}}, "feature_scales belong to features in F8_E4M3 alone, .* with the same where"),
        ({"features": {"dtype": "BF16"}}, "feature_scales belong to features in F8_E4M3 alone"),
        ({"features": {"shape": [0]}}, "columns.0.shape.0 = 0"),
        ({"last_hidden": {"where": "loss"}}, "a where is 'loss', which is no column of BOOL"),
        ({"last_hidden": {"where": "tokens"}}, "a where is 'tokens', which is no column of BOOL"),
        ({"last_hidden": {"name": "features"}}, "each name once"),
        ({"loss_mask": {"where": "seen"}}, "tokens and loss_mask have a value for every token"),
    ],
)
def test_a_card_that_was_edited_into_a_contradiction_is_refused_by_field_and_value(
    trimmed: Path, tmp_path: Path, edit: dict[str, Any], said: str
) -> None:
    card = json.loads((trimmed / "card.json").read_bytes())
    columns = {column["name"]: column for column in card["columns"]}
    for name, value in edit.items():
        columns[name].update(value) if name in columns else card.update({name: value})
    (tmp_path / "card.json").write_text(json.dumps(card))
    with pytest.raises(ShardError, match=rf"card\.json cannot be read: .*{said}.*: put it back, or extract into a new folder"):
        ShardDataset(tmp_path)
    assert len(verify_shards(tmp_path)) == 1


def test_rows_of_other_number_than_the_mask_of_a_trimmed_sample_says_are_refused_by_name(trimmed: Path, tmp_path: Path) -> None:
    shutil.copytree(trimmed, tmp_path / "copy")
    layout = Layout.of(ShardCard.read(trimmed).columns, {name: pc.sum(index_of(trimmed, 0)[name]).as_py() for name in ("tokens", SEEN, TAUGHT)})
    path = tmp_path / "copy" / "shard-00000.safetensors"
    content, place = bytearray(path.read_bytes()), layout.begins[[column.name for column in layout.columns].index(SEEN)]
    content[place] ^= 1
    path.write_bytes(content)
    part, whole = tmp_path / "copy" / "index" / "shard-00000.arrow", tmp_path / "copy" / "index.arrow"
    damaged = str(next(iter(verify_shards(tmp_path / "copy"))))
    for index in (part, whole):  # as if whoever wrote it had miscounted
        table = pa.ipc.open_file(index).read_all()
        sums = table["crc32"].to_pylist()
        sums[0] = int(damaged.partition("CRC-32 is ")[2][:8], 16)
        with pa.ipc.new_file(index, table.schema) as writer:
            writer.write_table(table.set_column(table.schema.get_field_index("crc32"), table.schema.field("crc32"), pa.array(sums, pa.uint32())))
    [problem] = verify_shards(tmp_path / "copy")
    assert re.search(r"shard-00000\.safetensors: sample 'sample-000' has \d+ tokens that are seen, and index\.arrow says \d+\. Delete", problem)


def index_of(folder: Path, shard: int) -> pa.Table:
    return pa.ipc.open_file(folder / "index" / f"shard-{shard:05d}.arrow").read_all()
