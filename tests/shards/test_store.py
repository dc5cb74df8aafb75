"""Finished datasets in a store: a real S3 server on the loopback, and addresses that anybody has."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from dflash_core.errors import ShardError
from dflash_core.shards import ShardDataset, store, verify_shards
from dflash_core.shards.store import holds, pull, push
from tests.shards.fakes import contents


def test_what_is_pulled_is_what_was_pushed(whole: Path, address: str, tmp_path: Path) -> None:
    assert not holds(address)
    push(whole, address)
    assert holds(address)
    seen: list[tuple[int, int]] = []
    pull(address, tmp_path / "pulled", lambda done, total, unit: seen.append((done, total)))
    assert contents(tmp_path / "pulled") == contents(whole)
    assert verify_shards(tmp_path / "pulled") == []
    assert seen[-1] == (12, 12)


def test_a_push_that_was_cut_short_is_no_dataset_and_goes_on_where_it_ended(
    whole: Path, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, _ = fsspec.core.url_to_fs(address)  # the one that everybody gets
    original, sent = files.put_file, []

    def cut_short(local: str, remote: str) -> None:
        if len(sent) == 5:
            raise ConnectionError("the cable was pulled")
        sent.append(remote)
        original(local, remote)

    monkeypatch.setattr(store, "_AT_ONCE", 1)
    monkeypatch.setattr(files, "put_file", cut_short)
    with pytest.raises(ShardError, match=r"cannot be used: ConnectionError: the cable was pulled.*start again"):
        push(whole, address)
    assert not holds(address)
    with pytest.raises(ShardError, match="holds no finished dataset"):
        pull(address, tmp_path / "pulled")
    first = set(sent)
    sent.clear()
    monkeypatch.setattr(files, "put_file", lambda local, remote: (sent.append(remote), original(local, remote))[1])
    push(whole, address)
    assert len(first) == 5
    assert not first & set(sent)
    pull(address, tmp_path / "pulled")
    assert contents(tmp_path / "pulled") == contents(whole)


def test_a_pull_leaves_what_is_there_and_fetches_what_is_missing_or_truncated(whole: Path, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/store"
    push(whole, address)
    pull(address, tmp_path / "pulled")
    kept = tmp_path / "pulled" / "shard-00002.safetensors"
    before = kept.stat().st_mtime_ns
    (tmp_path / "pulled" / "shard-00001.safetensors").unlink()
    (tmp_path / "pulled" / "shard-00003.safetensors").write_bytes(b"short")
    pull(address, tmp_path / "pulled")
    assert contents(tmp_path / "pulled") == contents(whole)
    assert kept.stat().st_mtime_ns == before


def test_a_bit_that_flipped_in_the_store_is_found_when_the_sample_is_read(whole: Path, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/store"
    push(whole, address)
    path = tmp_path / "store" / "shard-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    pull(address, tmp_path / "pulled")
    dataset = ShardDataset(tmp_path / "pulled")
    dataset.sample(0)
    with pytest.raises(ShardError, match=r"shard-00001\.safetensors: sample 'sample-007' is damaged"):
        dataset.sample(7)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.unlink(), r"1 files are missing, the first is shard-00001\.safetensors"),
        (lambda path: path.write_bytes(b"short"), r"shard-00001\.safetensors was truncated"),
        (lambda path: path.with_name("card.json").write_text("{"), r"card\.json is missing, damaged or of another format"),
        (lambda path: path.with_name("card.json").unlink(), r"card\.json is missing, damaged or of another format"),
    ],
)
def test_a_dataset_that_was_damaged_in_the_store_is_refused_and_is_whole_once_it_is_pushed_anew(
    whole: Path, tmp_path: Path, harm: Callable[[Path], object], message: str
) -> None:
    address = f"file://{tmp_path}/store"
    push(whole, address)
    harm(tmp_path / "store" / "shard-00001.safetensors")
    with pytest.raises(ShardError, match=rf"store is damaged: {message}.*Delete it there"):
        pull(address, tmp_path / "pulled")
    assert not (tmp_path / "pulled" / "index.arrow").exists()
    shutil.rmtree(tmp_path / "store")
    push(whole, address)
    pull(address, tmp_path / "pulled")
    assert contents(tmp_path / "pulled") == contents(whole)


def test_a_store_that_nobody_knows_is_named() -> None:
    with pytest.raises(ShardError, match=r"nowhere://x cannot be used.*Check address, credentials and network \(extraction\.store\)"):
        holds("nowhere://x")


@pytest.mark.parametrize("name", ["put_file", "get_file"])
def test_a_disk_that_is_full_is_told_as_that_and_leaves_no_part_of_a_file(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    address, to = f"file://{tmp_path}/store", tmp_path / ("store" if name == "put_file" else "pulled")
    files, _ = fsspec.core.url_to_fs(address)
    original = getattr(files, name)

    def full(source: str, destination: str) -> None:
        if "shard-00001.safetensors" in destination:
            Path(destination).write_bytes(b"as much as there was room for")
            raise OSError(errno.ENOSPC, "No space left on device")
        original(source, destination)

    def copy() -> None:
        push(whole, address)
        pull(address, tmp_path / "pulled")

    with monkeypatch.context() as patch:
        patch.setattr(files, name, full)
        with pytest.raises(ShardError, match=rf"The disk of {to} is full.*[0-9,]+ bytes do not fit.*free some space") as caught:
            copy()
    assert "network" not in str(caught.value)
    assert not [path for path in to.rglob("*") if "shard-00001.safetensors" in path.name]
    copy()
    assert contents(tmp_path / "pulled") == contents(whole)
