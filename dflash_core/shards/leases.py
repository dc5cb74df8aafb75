"""Who makes which shard, where extractors on several machines share nothing but a store.

    with SharedShards("s3://bucket/shards/one", card) as shared:
        if shared.take(7):                       # nobody else makes it, and nobody has made it
            shared.publish(7, folder)            # from now on it is there for everybody

A claim is an object that is only ever created: whoever creates ``claims/00007.0`` makes shard 7. Each extractor rewrites one further object now and
then, its pulse. Others compare what they read there with what they read before, by their own clocks alone; of one whose pulse has not changed for as
long as a lease they take the claims over, by creating ``claims/00007.1``. So what dies loses the shards that it had open, and nothing else.

One that was only out of touch finds, before it publishes, that its claim is no longer the latest. It renews its pulse first and looks at the claims
then, while one that takes over creates its claim first and looks at the pulse then: at least one of the two sees the other, and gives way.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from dflash_core.disk import FULL
from dflash_core.errors import ShardError
from dflash_core.shards.format import CARD, INDEX_PARTS, ShardCard, index_part, shard_name
from dflash_core.shards.store import clear_errors, open_store, put, sweep

LEASE_S = 60.0
_LOOK_S = 2.0
_CARD_S = 5.0  # how long a card may be empty before its writer is taken for dead
_CLAIM = re.compile(r"([0-9]+)\.([0-9]+)")
_OWNER = re.compile(rb"[A-Za-z0-9.-]{1,200}")


class SharedShards:
    """The shards of one dataset in a store, and this process's claims on some of them. Threads may share it."""

    def __init__(self, address: str, card: ShardCard, *, lease_s: float = LEASE_S, clock: Callable[[], float] = time.monotonic):
        """Join those who extract to ``address``.

        Args:
            lease_s: seconds without a pulse after which an extractor is taken for dead.
            clock: seconds, of this process alone.

        Raises:
            ShardError: the store cannot be reached, knows no conditional writes, or holds another dataset at this address.
        """
        self.address, self.card, self.lease_s = address, card, lease_s
        self._clock = clock
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:100]
        self._owner = f"{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._lock = threading.RLock()
        self._finished: set[int] = set()
        self._claims: dict[int, list[int]] = {}  # shard → generations that there are
        self._owners: dict[tuple[int, int], str] = {}
        self._mine: dict[int, int] = {}  # shard → generation of this process's claim
        self._pulses: dict[str, tuple[bytes | None, float]] = {}  # of others: what was read last, and since when it has been that
        self._beats = itertools.count()
        self._looked_at = -float("inf")
        self._end = threading.Event()
        with clear_errors(address):
            self._files, self._path = open_store(address)
            for folder in (f"{self._path}/claims", f"{self._path}/{INDEX_PARTS}"):
                self._files.makedirs(folder, exist_ok=True)
            self._check_store()
            self._check_card()
        self._thread = threading.Thread(target=self._beat_on, name="lease", daemon=True)
        self._thread.start()

    def has(self, shard: int) -> bool:
        """Whether a shard is in the store, as of some seconds ago at most."""
        self._look()
        with self._lock:
            return shard in self._finished

    def take(self, shard: int) -> bool:
        """Claim a shard that is to be made. False if it has been made, or another extractor is at it."""
        self._look()
        with self._lock, clear_errors(self.address):
            if shard in self._finished or shard in self._mine:
                return False
            generations = self._claims.get(shard, [])
            last = max(generations, default=-1)
            owner = self._owner_of(shard, last) if generations else None
            if owner is not None and not self._is_dead(owner):
                return False
            if not self._create(self._claim(shard, last + 1), self._owner.encode()):
                self._looked_at = -float("inf")  # things have moved on
                return False
            if owner is not None:
                self._feel_pulse(owner)
                if not self._is_dead(owner):  # it was only slow, and has shown itself meanwhile
                    self._remove(self._claim(shard, last + 1))
                    return False
            self._mine[shard] = last + 1
            self._files.invalidate_cache()
            if self._files.exists(self._part(shard)):  # finished, and its claim given back, since the last look
                self._finished.add(shard)
                self.give_back(shard)
                return False
            return True

    def give_back(self, shard: int) -> None:
        """The shard that was claimed has been published, or is not going to be."""
        with self._lock:
            generation = self._mine.pop(shard, None)
        if generation is not None:
            self._remove(self._claim(shard, generation))

    def publish(self, shard: int, folder: Path) -> None:
        """Put a shard that this process has claimed into the store; its index rows go last.

        Raises:
            ShardError: the claim has been taken over, as others saw no sign of life for too long; or the store cannot be used.
        """
        part = index_part(Path(), shard).as_posix()
        with clear_errors(self.address):
            for name in (shard_name(shard), part):
                self._require_claim(shard)
                sweep(self._files, f"{self._path}/{name}")
                put(self._files, folder / name, f"{self._path}/{name}")
        with self._lock:
            self._finished.add(shard)

    def close(self) -> None:
        """Give back all claims; what this process leaves in the store are finished shards."""
        self._end.set()
        self._thread.join()
        for shard in list(self._mine):
            self.give_back(shard)
        self._remove(self._pulse(self._owner))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def beat(self) -> None:
        """Show that this process lives. A thread does so four times in a lease."""
        self._files.pipe_file(self._pulse(self._owner), str(next(self._beats)).encode())

    def _beat_on(self) -> None:
        while not self._end.wait(self.lease_s / 4):
            with contextlib.suppress(Exception):  # a store that is away for longer is found by whoever publishes
                self.beat()

    def _look(self) -> None:
        """Read anew what there is, unless that was done a moment ago."""
        with self._lock, clear_errors(self.address):
            now = self._clock()
            if now - self._looked_at < min(_LOOK_S, self.lease_s / 8):
                return
            self._looked_at = now
            self._files.invalidate_cache()
            claims: dict[int, list[int]] = {}
            for name in self._sizes("claims"):
                if found := _CLAIM.fullmatch(name):
                    claims.setdefault(int(found[1]), []).append(int(found[2]))
            self._claims = claims
            parts = self._sizes(INDEX_PARTS)  # after the claims: of a shard whose claim was given back before, the rows are there now
            # In a folder a file is empty before its content is there.
            self._finished = {shard for shard in range(self.card.num_shards) if parts.get(index_part(Path(), shard).name)}
            for owner in {self._owner_of(shard, max(claims[shard])) for shard in claims.keys() - self._finished - self._mine.keys()}:
                self._feel_pulse(owner)

    def _feel_pulse(self, owner: str) -> None:
        pulse = self._read(self._pulse(owner))
        if owner not in self._pulses or self._pulses[owner][0] != pulse:
            self._pulses[owner] = pulse, self._clock()

    def _is_dead(self, owner: str) -> bool:
        """Whether the pulse of another extractor has been the same for a whole lease, as far as this process has seen."""
        return owner in self._pulses and self._clock() - self._pulses[owner][1] >= self.lease_s

    def _owner_of(self, shard: int, generation: int) -> str:
        if (shard, generation) not in self._owners:
            owner = self._read(self._claim(shard, generation)) or b""
            if not _OWNER.fullmatch(owner):  # being written, given back this moment, or damaged: of one that shows no pulse
                return f"nobody-{shard}.{generation}"
            self._owners[shard, generation] = str(owner, "ascii")
        return self._owners[shard, generation]

    def _require_claim(self, shard: int) -> None:
        self.beat()
        self._files.invalidate_cache()
        with self._lock:
            generation = self._mine.get(shard, -1)
        if self._files.exists(self._claim(shard, generation + 1)) or not self._files.exists(self._claim(shard, generation)):
            raise ShardError(
                f"{self.address}: {shard_name(shard)} was taken over by another extractor, as this one gave no sign of life for {self.lease_s:g} s. "
                "Start again: what is finished is found."
            )

    def _check_store(self) -> None:
        self.beat()
        if self._create(self._pulse(self._owner), b"again"):
            raise ShardError(
                f"{self.address}: extractors cannot share this store, as it overwrites what is there when it is told to create only "
                "(If-None-Match). Extract on one machine, or use another store (extraction.store)."
            )

    def _check_card(self) -> None:
        path, content = f"{self._path}/{CARD}", (self.card.model_dump_json(indent=2) + "\n").encode()
        if self._create(path, content):
            return
        of_others = self._card_of_others()
        if not of_others:  # who began it was killed before it had written it
            self._remove(path)
            if self._create(path, content):
                return
            of_others = self._card_of_others()
        try:
            found = ShardCard.model_validate_json(of_others)
        except ValidationError as error:
            raise ShardError(f"{self.address}: {CARD} is damaged or of another format. Delete what is there, and start again.") from error
        found.require(self.card.identity, self.address)

    def _card_of_others(self) -> bytes:
        for _ in range(int(_CARD_S / 0.1)):  # in a folder, creating and writing are two steps, and who begins at the same time may look between them
            if content := self._read(f"{self._path}/{CARD}"):
                return content
            time.sleep(0.1)
        return b""

    def _create(self, path: str, content: bytes) -> bool:
        """Write an object, unless there is one. In a folder it is there before its content: if the disk is full, it is taken away."""
        try:
            with self._files.open(path, "xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in FULL:
                self._remove(path)
            raise
        return True

    def _read(self, path: str) -> bytes | None:
        try:
            return bytes(self._files.cat_file(path))
        except FileNotFoundError:
            return None

    def _remove(self, path: str) -> None:
        with contextlib.suppress(Exception):  # what is left behind is taken for the claim of one that died
            self._files.rm_file(path)

    def _sizes(self, folder: str) -> dict[str, int]:
        """Bytes of each object, by its name."""
        found = self._files.find(f"{self._path}/{folder}", detail=True) if self._files.exists(f"{self._path}/{folder}") else {}
        return {str(name).rpartition("/")[2]: int(item["size"]) for name, item in found.items()}

    def _claim(self, shard: int, generation: int) -> str:
        return f"{self._path}/claims/{shard:05d}.{generation}"

    def _pulse(self, owner: str) -> str:
        return f"{self._path}/claims/pulse-{owner}"

    def _part(self, shard: int) -> str:
        return f"{self._path}/{index_part(Path(), shard).as_posix()}"
