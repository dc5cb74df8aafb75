"""The rounds of one target's retraining, on disk: each has its prompts, chosen once, and ends with a decision.

    with rounds.held():                                   # nobody else retrains this target now
        current = rounds.open(config, champion)           # None: nothing to do
        ... train and evaluate pipeline_config(config, current, ...) ...
        rounds.decide(current, decision)
        rounds.close(current)                             # the watermark moves

In ``<workspace>/retrain/<name>``: ``watermark.json``, ``rounds/0001/{round.json, new.jsonl, prompts.jsonl, decision.json}`` and, in the first
round, ``heldout.jsonl``. A round appears whole, by one rename, and is over when the watermark names it, by another. A process
that was killed leaves either no round or one that the next start takes up as it is, whatever has arrived since; so no prompt
is lost and none is trained on twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_core.config import PipelineConfig
from dflash_core.data import Conversation, Message, RejectLog, read_prompts
from dflash_core.data.filters import Filter
from dflash_core.data.prompts import usable_conversation
from dflash_core.data.responses import fingerprint_of
from dflash_core.data.samples import is_heldout
from dflash_core.errors import ConfigError, DataError, DFlashError, Problem
from dflash_core.retrain.config import RetrainConfig
from dflash_core.retrain.decision import Decision
from dflash_core.retrain.watermark import SeenFile, Watermark, read_arrived
from dflash_core.stages import StageBusyError, stage_lock, sync_files, sync_folder, write_json_atomic

State = TypeVar("State", bound=BaseModel)

PROMPTS, NEW, HELDOUT = "prompts.jsonl", "new.jsonl", "heldout.jsonl"


class RetrainBusyError(DFlashError):
    """Another process retrains the same target. Names it."""


class Round(BaseModel):
    """A retraining that was begun: what it takes and what it begins from.

    champion:         version of the registered champion at its beginning; None: there was none, and the drafter begins as the settings say
    heldout_fraction: ``data.heldout_fraction``, by which held-out prompts are told from others in every round
    files:            the watermark's files once it is over
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    number: int
    champion: str | None
    heldout_fraction: float
    new: int
    replayed: int
    heldout: int
    begun: str
    files: tuple[SeenFile, ...]


class Rounds:
    """The rounds of one target."""

    def __init__(self, folder: Path):
        """``folder`` is made when it is needed."""
        self.folder = folder
        self.rejected = ""
        """How many of the rows that ``open`` or ``choose`` has found new cannot be used, and why the first cannot, in a sentence."""

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the target's retraining for this process; the kernel lets go when the process dies, however it dies.

        Raises:
            RetrainBusyError: another process holds it.
        """
        holder = self.folder / "holder.json"
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(stage_lock(self.folder))
            except StageBusyError as error:
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    found = json.loads(holder.read_text(encoding="utf-8"))
                    who = f"process {found['process']} on {found['host']}, since {found['since']}"
                    raise RetrainBusyError(f"{self.folder.name} is being retrained by {who}. Wait for it to end, or stop it.") from error
                raise
            write_json_atomic(holder, {"process": os.getpid(), "host": socket.gethostname(), "since": _now()})
            yield
            holder.unlink(missing_ok=True)

    @property
    def watermark(self) -> Watermark:
        """The last round that is over."""
        return _read(Watermark, self.folder / "watermark.json") or Watermark()

    def place(self, number: int) -> Path:
        """Folder of a round."""
        return self.folder / "rounds" / f"{number:04}"

    def begun(self) -> Round | None:
        """The round that a process began and did not end."""
        return _read(Round, self.place(self.watermark.round + 1) / "round.json")

    def open(self, config: RetrainConfig, champion: str | None) -> Round | None:
        """Choose the prompts of the next round. None if fewer than ``retrain.min_new_prompts`` have arrived, unless a first drafter is wanted.

        Without a champion everything there is is trained on. With one: what is new, and a share of the old. Held-out prompts are
        chosen in the first round and stay; others that the same hash would hold out are never trained on either.

        Raises:
            DataError: prompts cannot be read, too many are unusable, or none is left to train on or to hold out.
            ConfigError: ``data.heldout_fraction`` is not that of the first round.
        """
        place = self.place(self.watermark.round + 1)
        draft = place.with_name(f".{place.name}.tmp")
        shutil.rmtree(draft, ignore_errors=True)
        current = self.choose(config, champion, draft)
        if current is None:
            shutil.rmtree(draft)
            return None
        sync_files(draft)
        draft.replace(place)
        sync_folder(place.parent)
        return current

    def choose(self, config: RetrainConfig, champion: str | None, draft: Path) -> Round | None:
        """What ``open`` would begin now, written into the folder ``draft`` and nowhere else. Returns and raises what ``open`` does."""
        self.check(config)
        watermark = self.watermark
        number, fraction = watermark.round + 1, config.data.heldout_fraction
        with RejectLog(draft / "rejected.jsonl") as rejected:
            base = list(read_prompts(config.data.model_copy(update={"system_prompt": None}), rejected))
            rejected.begin_part()
            rows, files = read_arrived(config.retrain.prompts, watermark.files)
            chosen = Filter(config.data.filters)
            arrived = [item for where, row in rows if (item := usable_conversation(row, where, chosen, rejected)) is not None]
            rejected.check(config.data.max_rejected_fraction)
            self.rejected = rejected.of_part()
        pool = _Pool(with_responses=config.data.regenerate == "never")
        old = pool.add([*base, *(item for earlier in range(1, number) for item in read_conversations(self.place(earlier) / NEW))])
        new = pool.add(arrived)
        trainable = [item for item in new if not is_heldout(item, fraction)]
        if (champion is not None or number > 1) and len(trainable) < config.retrain.min_new_prompts:
            return None
        heldout = self._heldout(number, [*old, *new], fraction)
        rest = [item for item in old if not is_heldout(item, fraction)]
        replayed = (
            rest if champion is None else pool.sample(rest, _replayed(len(trainable), config.retrain.replay_fraction), f"{config.run.seed} {number}")
        )
        if not trainable and not replayed:
            raise DataError("retrain", [Problem("retrain.prompts", list(config.retrain.prompts), "hold no prompt to train on", "Give more prompts")])
        write_conversations(draft / NEW, new)
        write_conversations(draft / PROMPTS, [*heldout[: config.evaluation.num_prompts], *trainable, *replayed])
        if number == 1:
            write_conversations(draft / HELDOUT, heldout)
        current = Round(
            number=number, champion=champion, heldout_fraction=fraction, new=len(trainable), replayed=len(replayed), heldout=len(heldout),
            begun=_now(), files=files,
        )  # fmt: skip
        write_json_atomic(draft / "round.json", current.model_dump(mode="json"))
        return current

    def check(self, config: RetrainConfig) -> None:
        """Held-out prompts are told from others as in the first round. Raises ``ConfigError``."""
        first, fraction = _read(Round, self.place(1) / "round.json"), config.data.heldout_fraction
        if first is not None and first.heldout_fraction != fraction:
            message = f"the held-out prompts of {self.folder} were chosen with {first.heldout_fraction}, and stay the same over retrainings"
            remedy = f"Set it to {first.heldout_fraction}, or begin anew by moving {self.folder} away"
            raise ConfigError("retrain", [Problem("data.heldout_fraction", fraction, message, remedy)])

    def decision(self, current: Round) -> Decision | None:
        """What was decided in a round, if that was done before its process ended."""
        return _read(Decision, self.place(current.number) / "decision.json")

    def decide(self, current: Round, decision: Decision) -> None:
        """Keep a decision, so that a process that takes up the round comes to no other."""
        write_json_atomic(self.place(current.number) / "decision.json", decision.model_dump(mode="json"))

    def close(self, current: Round) -> None:
        """Move the watermark: the round is over, and what it has read is not read again."""
        write_json_atomic(self.folder / "watermark.json", Watermark(round=current.number, files=current.files).model_dump(mode="json"))

    def give_up(self, current: Round) -> None:
        """Forget a round whose prompts or settings turned out to be unusable: they are read afresh, corrected, by the next."""
        place = self.place(current.number)
        draft = place.with_name(f".{place.name}.tmp")
        place.replace(draft)
        shutil.rmtree(draft)

    def _heldout(self, number: int, available: Sequence[Conversation], fraction: float) -> list[Conversation]:
        if number == 1:
            chosen = [item for item in available if is_heldout(item, fraction)]
            if not chosen:
                message = f"held out none of {len(available)} prompts"
                raise DataError("retrain", [Problem("data.heldout_fraction", fraction, message, "Raise it or give more prompts")])
            return chosen
        return read_conversations(self.place(1) / HELDOUT)


def pipeline_config(config: RetrainConfig, place: Path, current: Round, champion: Path | None) -> PipelineConfig:
    """The training of a round that lies in ``place``, from the champion's folder on. The drafter before training decodes every prompt, too."""
    tree = config.model_dump(exclude={"retrain"})
    tree["run"]["name"] = f"{config.run.name}-{current.number:04}"
    tree["data"]["sources"] = [{"source": str(place / PROMPTS)}]
    tree["evaluation"]["untrained_prompts"] = None
    if champion is not None:
        tree["drafter"]["initial_checkpoint"] = champion
    return PipelineConfig.model_validate(tree)


def write_conversations(path: Path, conversations: Iterable[Conversation]) -> None:
    """One conversation a line, as ``data.prompts`` reads it back."""
    with path.open("w", encoding="utf-8") as file:
        for item in conversations:
            group = {} if item.group is None else {"group": item.group}
            messages = [{"role": message.role, "content": message.content} for message in item.messages]
            file.write(json.dumps({"id": item.id, **group, "messages": messages}, ensure_ascii=False) + "\n")


def read_conversations(path: Path) -> list[Conversation]:
    """What ``write_conversations`` wrote."""
    with path.open(encoding="utf-8") as file:
        return [_conversation(json.loads(line)) for line in file]


class _Pool:
    """Conversations without repetitions, each with a fingerprint."""

    def __init__(self, *, with_responses: bool):
        self._with_responses = with_responses
        self._seen: set[bytes] = set()

    def add(self, conversations: Iterable[Conversation]) -> list[Conversation]:
        """Those that repeat none before."""
        fresh = []
        for item in conversations:
            fingerprint = fingerprint_of(item, with_responses=self._with_responses)
            if fingerprint not in self._seen:
                self._seen.add(fingerprint)
                fresh.append(item)
        return fresh

    def sample(self, conversations: Sequence[Conversation], count: int, seed: str) -> list[Conversation]:
        """``count`` of them, the same for the same seed, in their order."""

        def rank(index: int) -> bytes:
            return hashlib.sha256(seed.encode() + fingerprint_of(conversations[index], with_responses=self._with_responses)).digest()

        return [conversations[index] for index in sorted(sorted(range(len(conversations)), key=rank)[:count])]


def _read(model: type[State], path: Path) -> State | None:
    try:
        return model.model_validate_json(path.read_bytes()) if path.is_file() else None
    except ValidationError as error:
        raise DFlashError(f"{path} is damaged, or of another version of this code: {error}. Restore it, or begin anew by moving it away") from error


def _conversation(record: dict[str, object]) -> Conversation:
    messages = record["messages"]
    assert isinstance(messages, list)
    group = record.get("group")
    return Conversation(str(record["id"]), tuple(Message(item["role"], item["content"]) for item in messages), None if group is None else str(group))


def _replayed(new: int, fraction: float) -> int:
    return round(new * fraction / (1.0 - fraction))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
