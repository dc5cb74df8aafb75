from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from dflash_core.errors import ShardError
from dflash_core.shards import ShardDataset, ShardWriter, expected_of, verify_shards
from dflash_core.shards.format import Layout, ShardCard
from dflash_core.stages import stage_lock
from tests.shards.fakes import TAPS, FakeInfo, contents, run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    run(folder)
    return folder


@pytest.fixture
def dataset_folder(whole: Path, tmp_path: Path) -> Path:
    for name, content in contents(whole).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def read_all(folder: Path) -> None:
    dataset = ShardDataset(folder)
    for i in range(len(dataset)):
        dataset.sample(i)


def flip_bit(path: Path, byte: int, bit: int = 3) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def test_every_flipped_bit_of_a_shard_is_found_and_named(dataset_folder: Path) -> None:
    path = dataset_folder / "shard-00001.safetensors"
    for byte in range(0, path.stat().st_size, 61):
        flip_bit(path, byte, byte % 8)
        with pytest.raises(ShardError, match=r"shard-00001\.safetensors.*run the extraction again"):
            read_all(dataset_folder)
        [problem] = verify_shards(dataset_folder)
        assert "shard-00001.safetensors" in problem
        flip_bit(path, byte, byte % 8)
    assert verify_shards(dataset_folder) == []


def test_a_flipped_bit_names_the_sample_and_spares_the_others(dataset_folder: Path) -> None:
    layout = Layout.of(ShardCard.read(dataset_folder).columns, {"tokens": int(ShardDataset(dataset_folder).lengths[4:8].sum())})
    flip_bit(dataset_folder / "shard-00001.safetensors", layout.begins[1] + 5)  # in the features of the shard's first sample
    dataset = ShardDataset(dataset_folder)
    for _ in range(2):  # damage is reported as often as it is read
        with pytest.raises(ShardError, match="sample 'sample-004' is damaged"):
            dataset.sample(4)
    for i in (0, 3, 5, 6, 7, 13):
        dataset.sample(i)


def test_a_shard_found_damaged_is_made_anew_after_deleting_it(dataset_folder: Path, whole: Path) -> None:
    flip_bit(dataset_folder / "shard-00002.safetensors", -1)
    [problem] = verify_shards(dataset_folder)
    assert "shard-00002" in problem
    (dataset_folder / "shard-00002.safetensors").unlink()
    run(dataset_folder)
    assert contents(dataset_folder) == contents(whole)


@pytest.mark.parametrize("size", [0, 7, 100, -1, +1])
def test_a_truncated_or_longer_shard_is_found_and_named_with_both_sizes(dataset_folder: Path, size: int) -> None:
    path = dataset_folder / "shard-00003.safetensors"
    right = path.stat().st_size
    wrong = right + size if size in (-1, 1) else size
    os.truncate(path, wrong)
    with pytest.raises(ShardError, match=rf"shard-00003\.safetensors has {wrong} bytes instead of {right}"):
        read_all(dataset_folder)
    assert len(verify_shards(dataset_folder)) == 1


def test_a_missing_shard_is_named(dataset_folder: Path) -> None:
    (dataset_folder / "shard-00000.safetensors").unlink()
    with pytest.raises(ShardError, match=r"shard-00000\.safetensors is missing"):
        read_all(dataset_folder)
    assert len(verify_shards(dataset_folder)) == 1


@pytest.mark.parametrize("name", ["shard-00001.safetensors", "index.arrow", "index/shard-00001.arrow"])
def test_a_file_that_the_system_does_not_let_read_is_named(dataset_folder: Path, name: str) -> None:
    (dataset_folder / name).unlink()
    (dataset_folder / name).mkdir()
    [problem] = verify_shards(dataset_folder)
    assert f"{name} cannot be read: " in problem
    if "/" not in name:  # the reader needs no indices of single shards
        with pytest.raises(ShardError, match=f"{name} cannot be read"):
            read_all(dataset_folder)


def test_damage_in_several_shards_is_reported_for_each(dataset_folder: Path) -> None:
    flip_bit(dataset_folder / "shard-00000.safetensors", -1)
    (dataset_folder / "shard-00001.safetensors").unlink()
    os.truncate(dataset_folder / "shard-00003.safetensors", 50)
    assert [any(f"shard-0000{n}" in problem for problem in verify_shards(dataset_folder)) for n in range(4)] == [True, True, False, True]


def test_shards_that_changed_places_are_found(dataset_folder: Path) -> None:
    a, b = dataset_folder / "shard-00000.safetensors", dataset_folder / "shard-00001.safetensors"
    content_a, content_b = a.read_bytes(), b.read_bytes()
    a.write_bytes(content_b)
    b.write_bytes(content_a)
    with pytest.raises(ShardError, match="shard-00000"):
        read_all(dataset_folder)


@pytest.mark.parametrize("name", ["index.arrow", "index/shard-00001.arrow", "card.json"])
def test_no_flipped_bit_of_index_or_card_passes_verification_unless_the_content_is_the_same(dataset_folder: Path, whole: Path, name: str) -> None:
    before = ShardDataset(whole)
    for byte in range(0, (dataset_folder / name).stat().st_size, 23):
        flip_bit(dataset_folder / name, byte)
        if not verify_shards(dataset_folder) and name != "card.json":
            dataset = ShardDataset(dataset_folder)
            assert dataset.ids == before.ids
            assert (dataset.lengths == before.lengths).all()
            assert (dataset.supervised == before.supervised).all()
        elif not verify_shards(dataset_folder):
            with pytest.raises(ShardError):  # a card cannot check itself: whoever resumes or trains compares it with what is wanted
                run(dataset_folder, info=FakeInfo())
        flip_bit(dataset_folder / name, byte)


def test_an_unfinished_dataset_is_refused_and_reported(dataset_folder: Path) -> None:
    (dataset_folder / "index.arrow").unlink()
    with pytest.raises(ShardError, match=r"is not finished: it has no index\.arrow"):
        ShardDataset(dataset_folder)
    [problem] = verify_shards(dataset_folder)
    assert "not finished" in problem


def test_a_folder_without_a_card_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="is not a dataset of hidden states"):
        ShardDataset(tmp_path)
    assert len(verify_shards(tmp_path)) == 1


def test_a_reader_that_expects_another_target_is_told_both_values(whole: Path) -> None:
    ShardDataset(whole, expected_of(FakeInfo(), TAPS))
    with pytest.raises(ShardError) as caught:
        ShardDataset(whole, expected_of(FakeInfo(digest="e" * 64, name="other"), (0, 4)))
    assert all(text in str(caught.value) for text in ("target_digest", "d" * 64, "e" * 64, "(1, 4)", "(0, 4)"))


def test_the_same_target_under_another_name_is_no_other_target(whole: Path) -> None:
    ShardDataset(whole, expected_of(FakeInfo(name="a/local/copy", revision=None), list(TAPS)))


def test_features_are_views_of_the_file(whole: Path) -> None:
    dataset = ShardDataset(whole)
    first, again = dataset.sample(2), dataset.sample(2)
    assert first.features.data_ptr() == again.features.data_ptr()
    assert first.features.untyped_storage().nbytes() == (whole / "shard-00000.safetensors").stat().st_size


def test_threads_may_read_one_dataset(whole: Path) -> None:
    alone = [ShardDataset(whole).sample(i).features.clone() for i in range(14)]
    shared, results = ShardDataset(whole), []

    def work() -> None:
        results.append(all(torch.equal(shared.sample(i).features, alone[i]) for i in range(14)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


def test_a_shard_with_a_sample_that_was_not_written_does_not_come_to_be(tmp_path: Path, whole: Path) -> None:
    writer = ShardWriter(tmp_path, ShardCard.read(whole))
    with pytest.raises(ShardError, match="sample 0 of 4 was not written"), writer.shard(0, list("abcd"), [1, 2, 3, 4]):
        pass
    assert writer.unfinished() == [0, 1, 2, 3]
    with pytest.raises(ShardError, match="lacks 4 of 4 shards"):
        writer.finalize()


def test_a_column_of_another_dtype_is_refused(tmp_path: Path, whole: Path) -> None:
    writer = ShardWriter(tmp_path, ShardCard.read(whole))
    columns = {"features": torch.zeros(2, 16), "tokens": torch.zeros(2, dtype=torch.int32), "loss_mask": torch.ones(2, dtype=torch.bool)}
    with pytest.raises(ValueError, match="column features must be"), writer.shard(0, list("abcd"), [2, 2, 3, 4]) as out:
        out.write(0, columns)


@pytest.mark.parametrize("column", ["shard", "start", "tokens", "crc32"])
@pytest.mark.parametrize("change", [1, -(2**31 - 1)])
def test_an_index_that_is_damaged_alone_is_named_and_not_the_shards_that_it_misreads(
    dataset_folder: Path, column: str, change: int, whole: Path
) -> None:
    path = dataset_folder / "index.arrow"
    table = pa.ipc.open_file(pa.py_buffer(path.read_bytes())).read_all()
    values = table[column].to_numpy().copy()
    values[5] += np.array(change).astype(values.dtype)
    position = table.schema.get_field_index(column)
    table = table.set_column(position, table.schema.field(position), pa.array(values))
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    words = r"index\.arrow is damaged: .* Delete it and run the extraction again: it is joined anew, and no shard is made"
    with pytest.raises(ShardError, match=words):
        read_all(dataset_folder)
    assert any("index.arrow is damaged" in problem for problem in verify_shards(dataset_folder))
    path.unlink()
    kept = {name: (dataset_folder / name).stat().st_mtime_ns for name in contents(dataset_folder) if name.startswith("shard-")}
    run(dataset_folder)
    assert contents(dataset_folder) == contents(whole)
    assert kept == {name: (dataset_folder / name).stat().st_mtime_ns for name in kept}


@pytest.mark.parametrize("size", [0, 10, -30])
def test_an_index_that_was_cut_is_named(dataset_folder: Path, size: int) -> None:
    path = dataset_folder / "index.arrow"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ShardError, match=r"index\.arrow is damaged"):
        read_all(dataset_folder)
    [problem] = verify_shards(dataset_folder)
    assert "index.arrow is damaged" in problem


def test_of_shards_that_are_being_made_it_is_said_how_many_are_whole_and_that_somebody_is_at_it(dataset_folder: Path) -> None:
    for name in ("index.arrow", "shard-00002.safetensors"):
        (dataset_folder / name).unlink()
    [problem] = verify_shards(dataset_folder)
    assert "is not finished: 3 of 4 shards are whole, and it has no index.arrow. Nobody is at it: run the extraction again" in problem
    with stage_lock(dataset_folder):
        [problem] = verify_shards(dataset_folder)
    assert problem.endswith("It is being made at present: wait for that to end.")
