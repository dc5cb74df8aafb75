"""What vLLM and SGLang count of their drafting, in the text format of Prometheus, and whether it can be believed.

    before, after = read_counters(text), read_counters(later)
    acceptance, doubts = acceptance_between(before, after, requests=32, tokens=4096)

A server that was started anew meanwhile counts from zero again; behind one address several may answer by turns. What contradicts itself is no
figure: it is left out, and a sentence says why.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from pydantic import BaseModel, ConfigDict

from dflash_core.errors import EndpointError

_SAMPLE = re.compile(r"^((?:vllm|sglang):\w+)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_READ = {
    "vllm:generation_tokens_total", "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total", _PER_POSITION, "sglang:generation_tokens_total", "sglang:spec_verify_calls_total",
}  # fmt: skip


class ServerAcceptance(BaseModel):
    """What the server's counters say of the whole measurement.

    rounds:            verified drafts
    acceptance_length: mean over all rounds of accepted tokens and the target's own (our ``pooled``)
    drafted, accepted: tokens; None where the server does not count them (SGLang)
    per_position:      share of rounds in which slot k = 1.. was accepted; empty where it is not counted
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    rounds: int
    acceptance_length: float
    drafted: int | None
    accepted: int | None
    per_position: tuple[float, ...]


@dataclass(frozen=True)
class Counters:
    """Sums over all labels since the server was started. ``drafted`` and ``accepted`` are None for SGLang; ``positions`` has slot 1, 2, …"""

    engine: str
    tokens: float
    rounds: float
    drafted: float | None
    accepted: float | None
    positions: tuple[float, ...]


def read_counters(text: str) -> Counters | None:
    """The counters in what ``/metrics`` answers; None if it is neither vLLM's nor SGLang's.

    Raises:
        EndpointError: one of them is no count; names it.
    """
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    engines = set()
    for name, labels, written in _SAMPLE.findall(text):
        engines.add(name.partition(":")[0])
        if name not in _READ:
            continue
        value = _count(name, written)
        sums[name] = sums.get(name, 0.0) + value
        if name == _PER_POSITION and (position := _POSITION.search(labels)):
            positions[int(position[1])] = positions.get(int(position[1]), 0.0) + value
    if "vllm:generation_tokens_total" in sums:
        rounds, drafted, accepted = (sums.get(f"vllm:spec_decode_num_{what}_total", 0.0) for what in ("drafts", "draft_tokens", "accepted_tokens"))
        return Counters("vllm", sums["vllm:generation_tokens_total"], rounds, drafted, accepted, tuple(positions[k] for k in sorted(positions)))
    if "sglang" in engines:
        rounds = sums.get("sglang:spec_verify_calls_total", 0.0)
        return Counters("sglang", sums.get("sglang:generation_tokens_total", 0.0), rounds, None, None, ())
    return None


def _count(name: str, written: str) -> float:
    try:
        value = float(written)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise EndpointError(f"/metrics: {name} = {written}, expected a count. Restart the server, or turn its metrics off to measure without them.")
    return value


def acceptance_between(before: Counters, after: Counters, *, requests: int, tokens: int) -> tuple[ServerAcceptance | None, list[str]]:
    """What was accepted between two readings, None where that cannot be told; and what makes it doubtful, in sentences.

    Args:
        requests, tokens: what the server has answered in between, by its own answers
    """
    if before.engine != after.engine or any(late < early for early, late in _pairs(before, after)):
        remedy = "it was started anew, or several answer at this address by turns. Measure again, at the address of one"
        return None, [f"the server's counters went back during the measurement, so acceptance is unknown: {remedy}"]
    counted, rounds = after.tokens - before.tokens, after.rounds - before.rounds
    doubts = []
    if counted > tokens * 1.02 + 2:
        doubts.append(f"the server generated {counted - tokens:.0f} tokens more than were asked for here: somebody else used it as well")
    if counted < tokens * 0.98 - 2:
        why = "it was started anew, its counters lag behind, or are those of one server of several at this address"
        return None, [f"the server has counted {counted:.0f} of the {tokens} tokens that it answered, so acceptance is unknown: {why}"]
    if rounds == 0:
        return None, doubts
    drafted = accepted = None
    length = (counted - requests) / rounds  # SGLang: a request's first token comes of its prompt, all others of rounds
    if after.accepted is not None and before.accepted is not None and after.drafted is not None and before.drafted is not None:
        drafted, accepted = int(after.drafted - before.drafted), int(after.accepted - before.accepted)
        length = 1.0 + accepted / rounds
    shares = tuple((late - early) / rounds for early, late in zip_longest(before.positions, after.positions, fillvalue=0.0))
    if any(share > 1.0 for share in shares) or (drafted is not None and accepted is not None and accepted > drafted):
        found = f"{accepted} of {drafted} drafts accepted in {rounds:.0f} rounds, by slot {', '.join(f'{share:.3g}' for share in shares)} of them"
        return None, [*doubts, f"the server's counters contradict each other, so acceptance is unknown: {found}"]
    return ServerAcceptance(rounds=int(rounds), acceptance_length=length, drafted=drafted, accepted=accepted, per_position=shares), doubts


def _pairs(before: Counters, after: Counters) -> Iterator[tuple[float, float]]:
    """Each counter before and after; one that is gone has become zero."""
    yield from ((before.tokens, after.tokens), (before.rounds, after.rounds))
    yield from ((before.drafted or 0.0, after.drafted or 0.0), (before.accepted or 0.0, after.accepted or 0.0))
    yield from zip_longest(before.positions, after.positions, fillvalue=0.0)
