"""Extractors on several machines, which share nothing but a store: none makes what another makes, and one that dies loses what it had open."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileOpener

from dflash_core.errors import ShardError
from dflash_core.shards import ShardDataset, verify_shards
from dflash_core.shards.format import CARD, INDEX, ShardCard, index_part, shard_name
from dflash_core.shards.leases import SharedShards
from tests.shards.fakes import FakeSamples, contents, hidden_states, run
from tests.waiting import PATIENCE_S

LEASE_S = 60.0


class Clock:
    """Stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_of_those_who_claim_a_shard_at_once_one_gets_it_and_it_is_free_once_given_back(address: str, whole: Path) -> None:
    card = ShardCard.read(whole)
    with SharedShards(address, card, clock=Clock()) as one, SharedShards(address, card, clock=Clock()) as two, ThreadPoolExecutor(8) as threads:
        for shard in range(3):
            claims = list(threads.map(lambda number, shard=shard: (one, two)[number % 2].take(shard), range(8)))
            assert claims.count(True) == 1
        assert [two.take(shard) or one.take(shard) for shard in (3, 3)] == [True, False]
        for shared in (one, two):
            shared.give_back(3)
            shared._looked_at = -1e9
        assert one.take(3)


def test_what_is_published_is_there_for_others_and_is_not_claimed_again(address: str, whole: Path) -> None:
    card = ShardCard.read(whole)
    with SharedShards(address, card, clock=Clock()) as one, SharedShards(address, card) as two:
        assert one.take(2)
        one.publish(2, whole)
        one.give_back(2)
        assert not one.take(2)
        assert one.has(2)
        assert not two.take(2)
        assert two.has(2)


def test_what_a_killed_process_left_of_a_shard_in_a_folder_goes_when_the_shard_comes(whole: Path, tmp_path: Path) -> None:
    with SharedShards(f"file://{tmp_path}/store", ShardCard.read(whole)) as shared:
        left = tmp_path / "store" / f".{shard_name(2)}.17-0a1b2c3d.tmp"
        of_another = left.with_name(f".{shard_name(1)}.17-0a1b2c3d.tmp")
        for path in (left, of_another):
            path.write_bytes(b"half of it")
        assert shared.take(2)
        shared.publish(2, whole)
        assert (left.exists(), of_another.exists()) == (False, True)
        assert (tmp_path / "store" / shard_name(2)).read_bytes() == (whole / shard_name(2)).read_bytes()


def test_a_shard_whose_index_rows_are_still_on_their_way_is_not_there_yet(whole: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with SharedShards(f"file://{store}", ShardCard.read(whole)) as shared:
        part = index_part(store, 2)
        part.touch()
        assert not shared.has(2)
        part.write_bytes(index_part(whole, 2).read_bytes())
        shared._looked_at = -1e9
        assert shared.has(2)


def test_claims_of_one_without_a_pulse_are_taken_over_after_a_lease_and_not_before_and_it_notices(address: str, whole: Path) -> None:
    card, clock = ShardCard.read(whole), Clock()
    with SharedShards(address, card, lease_s=LEASE_S, clock=clock) as living, SharedShards(address, card, lease_s=LEASE_S) as silent:
        silent._end.set()  # its thread beats no more
        silent._thread.join()
        assert silent.take(1)
        assert not living.take(1)
        clock.now = LEASE_S - 1
        silent.beat()
        assert not living.take(1)  # sees another pulse than before, and counts anew
        clock.now += LEASE_S - 1
        assert not living.take(1)
        clock.now += 20
        assert living.take(1)
        with pytest.raises(ShardError, match=r"shard-00001\.safetensors was taken over by another extractor.*Start again"):
            silent.publish(1, whole)
        living.publish(1, whole)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a\0b", b"../../elsewhere", b"a" * 100_000], ids=range(5))
def test_a_claim_that_names_nobody_is_taken_over_after_a_lease(content: bytes, whole: Path, tmp_path: Path) -> None:
    clock = Clock()
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "00001.0").write_bytes(content)
    with SharedShards(f"file://{tmp_path}", ShardCard.read(whole), lease_s=LEASE_S, clock=clock) as living:
        assert not living.take(1)
        clock.now = LEASE_S + 1
        assert living.take(1)
        living.publish(1, whole)


def test_one_that_shows_itself_while_it_is_taken_over_keeps_its_claim(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, card, clock = f"file://{tmp_path}/store", ShardCard.read(whole), Clock()
    with SharedShards(address, card, lease_s=LEASE_S, clock=clock) as hasty, SharedShards(address, card, lease_s=LEASE_S) as slow:
        assert slow.take(1)
        assert not hasty.take(1)
        clock.now = LEASE_S + 1
        create = hasty._create

        def create_and_be_seen(path: str, content: bytes) -> bool:
            created = create(path, content)
            slow.beat()
            return created

        monkeypatch.setattr(hasty, "_create", create_and_be_seen)
        monkeypatch.setattr(hasty, "_look", lambda: None)  # or it would have seen the pulse before
        assert not hasty.take(1)
        slow.publish(1, whole)


def test_what_is_being_claimed_is_not_taken_over_because_another_claim_was_long_ago(whole: Path, tmp_path: Path) -> None:
    address, card, clock = f"file://{tmp_path}/store", ShardCard.read(whole), Clock()
    with SharedShards(address, card, lease_s=LEASE_S, clock=clock) as one:
        for shard in (1, 2):  # created, and not yet written
            (tmp_path / "store" / "claims" / f"{shard:05d}.0").touch()
            assert not one.take(shard)
            clock.now += LEASE_S + 1
        assert one.take(1)


def test_a_card_that_is_being_written_is_waited_for(whole: Path, tmp_path: Path) -> None:
    address, card, path = f"file://{tmp_path}/store", ShardCard.read(whole), tmp_path / "store" / CARD
    path.parent.mkdir()
    path.touch()
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(SharedShards, address, card)
        path.write_text(card.model_dump_json())
        joining.result().close()


def test_a_card_that_was_begun_by_one_that_was_killed_is_taken_for_none(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_core.shards.leases._CARD_S", 0.1)
    card, path = ShardCard.read(whole), tmp_path / "store" / CARD
    path.parent.mkdir()
    path.touch()
    SharedShards(f"file://{tmp_path}/store", card).close()
    assert ShardCard.read(path.parent) == card


def test_two_machines_divide_the_shards_and_each_ends_with_all_of_them(address: str, whole: Path, tmp_path: Path) -> None:
    """Each waits with its first shard until the other has one, too."""
    both = threading.Barrier(2, timeout=PATIENCE_S)
    made: dict[str, list[int]] = {"one": [], "two": []}

    def machine(name: str) -> None:
        def target(documents: Sequence[torch.Tensor]) -> torch.Tensor:
            if not made[name]:
                both.wait()
            made[name].append(sum(map(len, documents)))
            return hidden_states(documents)

        run(tmp_path / name, FakeSamples(22), target, shared=address, lease_s=3600.0)  # nobody dies here, however slow the machine

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(machine, name) for name in made]:
            done.result()
    assert made["one"]
    assert made["two"]
    assert sum(made["one"] + made["two"]) == sum(FakeSamples(22).lengths)  # no token twice
    for name in made:
        assert contents(tmp_path / name) == contents(whole)
        assert verify_shards(tmp_path / name) == []


def test_a_helper_keeps_no_shard_and_who_finishes_needs_no_target(whole: Path, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/store"
    counts = run(tmp_path / "helper", FakeSamples(22), shared=address, finish=False)
    assert counts["extracted_tokens"] == sum(FakeSamples(22).lengths)
    assert not list((tmp_path / "helper").glob("shard-*"))
    run(tmp_path / "driver", FakeSamples(22), devices=0, shared=address)
    assert contents(tmp_path / "driver") == contents(whole)
    assert len(ShardDataset(tmp_path / "driver")) == 22


def test_a_shard_that_was_whole_and_not_sent_yet_is_sent_and_not_made_again(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    run(folder, FakeSamples(22))
    (folder / INDEX).unlink()
    (folder / shard_name(3)).unlink()
    counts = run(folder, FakeSamples(22), shared=f"file://{tmp_path}/store")
    assert counts["extracted_tokens"] == sum(FakeSamples(22).lengths[12:16])
    assert contents(folder) == contents(whole)


def test_a_store_without_conditional_writes_is_refused(whole: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files, _ = fsspec.core.url_to_fs("memory://nowhere")
    original = files.open
    monkeypatch.setattr(files, "open", lambda path, mode="rb", **named: original(path, mode.replace("x", "w"), **named))
    with pytest.raises(ShardError, match="extractors cannot share this store, as it overwrites"):
        SharedShards(f"memory://{tmp_path.name}", ShardCard.read(whole))


def test_another_dataset_at_the_same_address_is_refused(whole: Path, tmp_path: Path) -> None:
    address, card = f"file://{tmp_path}/store", ShardCard.read(whole)
    SharedShards(address, card).close()
    with pytest.raises(ShardError, match="target_digest: the shards have"):
        SharedShards(address, card.model_copy(update={"target_digest": "other"}))


def test_a_disk_that_is_full_leaves_no_empty_card_in_whose_place_none_can_be_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, original, refused = f"file://{tmp_path}/store", LocalFileOpener.write, []

    def full(self: LocalFileOpener, content: bytes) -> int:
        if self.path.endswith("card.json") and not refused:
            refused.append(self.path)
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(original(self, content))

    monkeypatch.setattr(LocalFileOpener, "write", full)
    with pytest.raises(ShardError, match=r"disk of file:.*store is full \(No space left on device\).*free some space and run the extraction again"):
        run(tmp_path / "a", shared=address)
    assert refused
    run(tmp_path / "a", shared=address)
