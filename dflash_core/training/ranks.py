"""One process for each replica, started by torchrun: who they are, what they agree on, and how they notice that one has gone.

    torchrun --nproc-per-node 2 -m dflash_core train CONFIG          # with training.launcher: torchrun

What they say to each other outside of steps goes through the store that torchrun keeps. Each process has a thread that counts up its own pulse
there and looks at the others': collectives whose peer has died may wait for very long (NCCL's kernels until the timeout, where Gloo notices at
once), and torchrun ends the processes of one host alone. Those of the same host are also looked for by their process ids, which tells after a
second. Silence is counted in beats of one's own, so that processes that were all stopped for a while do not take each other for dead. Whoever
fails leaves its message in the store first, so that the others can say what has happened.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from dflash_core.config import PipelineConfig
from dflash_core.errors import ConfigError, Problem, TrainingError
from dflash_core.training.meeting import Meeting
from dflash_core.training.sync import GradientSync, end_of, join_group

_MARK = "TORCHELASTIC_RUN_ID"  # torchrun sets it, and nobody else
_BEAT_S = 1.0
_SILENCE = 20  # beats without a pulse of a process, after which it counts as gone
_ABSENCE = 300  # before its first one: importing from a cold disk takes its time
_LOOK_EVERY_S = 0.2
AGAIN = "Start again to go on from the last checkpoint."


class Ranks:
    """This process among those of a run: the one number ``rank`` of ``size``."""

    def __init__(self, store: Any, rank: int, size: int, local_rank: int, local_size: int):
        """Begin to beat and to watch the others."""
        self.rank, self.size = rank, size
        self.local = range(rank - local_rank, rank - local_rank + local_size)  # ranks of this host
        self.on_loss: Callable[[TrainingError], None] | None = None
        self._store = store
        self._lost: TrainingError | None = None
        self._times: Counter[str] = Counter()
        self._left = threading.Event()
        self._name = f"rank {rank} (process {os.getpid()} on {socket.gethostname()})"
        store.set(f"name/{rank}", self._name)
        store.set(f"process/{rank}", f"{os.getpid()} {_pid_namespace()}")
        threading.Thread(target=self._watch, name="pulse", daemon=True).start()

    def announce(self, what: str, value: str) -> None:
        """Let the others know something, once."""
        self._store.set(f"{what}/{self.rank}", value)

    def wait_for(self, what: str, rank: int = 0) -> str:
        """What a rank has announced or will announce, however long that takes. Raises ``TrainingError`` if a process goes meanwhile."""
        while True:
            left = self._has_left(rank)  # asked first: whoever leaves has said before what it has to say
            if (said := self._said(f"{what}/{rank}")) is not None:
                return said
            if left:
                raise TrainingError(f"{self._name_of(rank)} was told to end before this training had begun. {AGAIN}")
            self.check()
            time.sleep(_LOOK_EVERY_S)

    def agree(self, what: str, value: str) -> None:
        """Wait for all to say the same. Raises ``TrainingError`` naming who says something else, with both values."""
        self._times[what] += 1  # a process may train more than once
        key = f"{what} {self._times[what]}"
        self.announce(key, value)
        for rank in range(self.size):
            if (other := self.wait_for(key, rank)) != value:
                raise TrainingError(
                    f"{what}: rank {self.rank} has {value} and rank {rank} has {other}. All processes need the same configuration, code and data: "
                    "the same files in run.workspace, on storage that all hosts share."
                )

    def connect(self, device: torch.device, timeout_s: float, kind: str) -> GradientSync:
        """This rank's end of the collectives of all processes, by the name of ``training.sync``.

        Waits for the others; in a thread, since nothing else can end that waiting.
        """
        host = "127.0.0.1" if len(self.local) == self.size else None
        group: Future[GradientSync] = Future()
        self._times["group"] += 1
        # a store serves one caller at a time, and joining waits in it for others: the pulse must not wait along
        store = dist.PrefixStore(f"group-{self._times['group']}", self._store.clone())  # type: ignore[attr-defined]
        end = functools.partial(end_of(kind), between_processes=True)

        def join() -> None:
            try:
                timeout = timedelta(seconds=timeout_s)
                group.set_result(join_group(store, self.rank, self.size, device, Meeting(1), timeout, host, end))
            except BaseException as error:
                group.set_exception(error)

        threading.Thread(target=join, name="connect", daemon=True).start()
        while not group.done():
            self.check()
            time.sleep(_LOOK_EVERY_S / 4)
        return group.result()

    def check(self) -> None:
        """Raises ``TrainingError`` once a process has gone."""
        if self._lost is not None:
            raise self._lost

    def leave(self, failure: str | None = None) -> None:
        """This process ends; ``failure`` says why it had to."""
        self._left.set()
        try:
            if failure is None:
                self._store.add(f"left/{self.rank}", 1)
            elif self._store.add("failures", 1) == 1:
                self._store.set("failure", f"{self._name} has failed: {failure}")
        except RuntimeError:  # the store has gone before
            pass

    def _watch(self) -> None:
        heard = dict.fromkeys(set(range(self.size)) - {self.rank}, (0, 0))
        while not self._left.wait(_BEAT_S):
            try:
                self._beat(heard)
            except TrainingError as error:
                self._lost = error
                if self.on_loss is not None:
                    self.on_loss(error)
                return

    def _beat(self, heard: dict[int, tuple[int, int]]) -> None:
        """``heard``: of each other rank its pulse, and in how many of these beats it has not gone on."""
        self._ask(lambda: self._store.add(f"pulse/{self.rank}", 1))
        gone = [rank for rank in heard if rank in self.local and self._is_gone(rank)]  # looked for first: who has failed said so before it ended
        if self._ask(lambda: self._store.check(["failure"])):
            raise TrainingError(f"{self._ask(lambda: self._store.get('failure')).decode()} {AGAIN}")
        for rank, (count, silent) in heard.items():
            found = self._ask(functools.partial(self._store.add, f"pulse/{rank}", 0))
            silent = silent + 1 if found == count else 0
            heard[rank] = found, silent
            if rank in gone:
                fate = "has ended without a word: it was killed, or it has crashed"
            elif silent > (_SILENCE if found else _ABSENCE):
                fate = f"has not been heard of for {silent * _BEAT_S:.0f} seconds: it was killed, or its host is gone"
            else:
                continue
            if not self._has_left(rank):
                raise TrainingError(f"{self._name_of(rank)} {fate}. {AGAIN}")

    def _is_gone(self, rank: int) -> bool:
        process = self._said(f"process/{rank}")
        if process is None:  # not begun yet
            return False
        number, _, namespace = process.partition(" ")
        if namespace != _pid_namespace():  # a container of its own, where numbers mean others
            return False
        try:
            os.kill(int(number), 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # somebody else's by now, or in a sandbox: its pulse tells
            pass
        return False

    def _has_left(self, rank: int) -> bool:
        return bool(self._ask(lambda: self._store.add(f"left/{rank}", 0)))

    def _name_of(self, rank: int) -> str:
        return self._said(f"name/{rank}") or f"rank {rank}"

    def _said(self, key: str) -> str | None:
        return self._ask(lambda: self._store.get(key)).decode() if self._ask(lambda: self._store.check([key])) else None

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError as error:  # what torch raises has no type of its own in all versions
            raise TrainingError(f"The process that keeps the store of this run has gone ({error}). {AGAIN}") from error


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # another system than Linux has one for all
        return ""


def under_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return _MARK in os.environ


@functools.cache
def this_rank() -> Ranks | None:
    """Who this process is among those that torchrun has started; None where it was started in another way. The same at every call."""
    if not under_torchrun():
        return None
    store, rank, size = next(iter(rendezvous("env://", timeout=timedelta(minutes=5))))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store may outlive processes that torchrun starts again
    store = dist.PrefixStore(f"dflash-run-{attempt}", store)  # type: ignore[attr-defined]
    return Ranks(store, rank, size, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))


def check_launcher(config: PipelineConfig, source: str = "config") -> None:
    """This process was started as ``training.launcher`` says, with as many others as there are replicas. Raises ``ConfigError``."""
    training, size = config.training, int(os.environ.get("WORLD_SIZE", "1")) if under_torchrun() else None
    problem = None
    if training.launcher == "threads" and size is not None:
        remedy = "Set training.launcher to torchrun, or start one process without torchrun"
        problem = Problem("training.launcher", "threads", "torchrun has started this process", remedy)
    elif training.launcher == "torchrun" and size is None:
        remedy = f"Start `torchrun --nproc-per-node {len(training.devices)} -m dflash_core train CONFIG`, or set training.launcher to threads"
        problem = Problem("training.launcher", "torchrun", "torchrun has not started this process", remedy)
    elif size is not None and size != len(training.devices):
        message, remedy = f"torchrun has started {size} processes", "Name one device for each process, those of the first host first"
        problem = Problem("training.devices", list(training.devices), message, remedy)
    elif size is not None:
        first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
        here = [device for device in training.devices[first : first + int(os.environ["LOCAL_WORLD_SIZE"])] if device != "cpu"]
        if len(set(here)) < len(here):
            message, remedy = f"processes of one host would share a GPU ({', '.join(here)})", "Name each GPU of a host once"
            problem = Problem("training.devices", list(training.devices), message, remedy)
    if problem is not None:
        raise ConfigError(source, [problem])
