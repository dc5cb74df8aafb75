"""The errors a user can cause, each with where it happened, what was found and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_core.words import counted


class DFlashError(Exception):
    """Base of every error of this project."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a user's input.

    path:    where, as a dotted field path (``training.max_steps``) or a row of a file (``prompts.jsonl:17``)
    value:   what was found there
    message: what is wrong with it
    remedy:  what to do
    """

    path: str
    value: object
    message: str
    remedy: str

    def __str__(self) -> str:
        shown = repr(self.value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        return f"{self.path} = {shown}: {self.message}. {self.remedy}"


def os_reason(error: OSError) -> str:
    """Why the system refuses, in words and with the file: ``No such file or directory: a.yaml``."""
    named = f": {error.filename}" if error.filename is not None else ""
    return f"{error.strerror or error}{named}"


class InputError(DFlashError):
    """Bad input. Names the file, the field, the value and the remedy."""

    def __init__(self, source: str, problems: Sequence[Problem]):
        self.source = source
        self.problems = tuple(problems)
        super().__init__("\n".join([f"{source}: {counted(len(self.problems), 'problem')}", *(f"  {problem}" for problem in self.problems)]))


class ConfigError(InputError):
    """A configuration that cannot be run."""


class DataError(InputError):
    """Prompts, responses or samples that cannot be used."""


class TargetError(DFlashError):
    """A target model that is missing, damaged or of a kind that is not supported."""


class EndpointError(DFlashError):
    """Servers that do not answer, refuse everybody, or serve something else than the target."""


class ShardError(DFlashError):
    """A hidden-state dataset that is damaged, incomplete, or made for another target."""


class CheckpointError(DFlashError):
    """A checkpoint or an exported drafter that is damaged or belongs to another run."""


class WarmUpError(DFlashError):
    """Warm-up or training called where the rules of warm-up forbid it."""


class LateCompilationError(WarmUpError):
    """Something tried to compile after warm-up. Names the function, the reason and the shape."""


class TrainingError(DFlashError):
    """Training cannot go on: a worker died, stalled, diverged from the others or met non-finite gradients."""


class StoppedError(TrainingError):
    """Another process of the training was told to stop, and all have stopped with it, after a checkpoint."""
