"""The draft–verify loop. The autoregressive baseline is the same loop with nothing drafted, so that a speed-up is the drafter's alone.

One round: the proposer drafts K tokens after the last token, the target reads [last token, draft] in one pass, the longest
prefix that it agrees with is kept, its own next token is added, and its cache is cropped to what was kept.

Two rules on the end of a request:

* The text ends with the first stop token, which it includes, or after ``max_new_tokens``, or where the target's positions end.
* **The end cuts the text, never the record.** Blocks are drafted in full up to the end, and a round's ``accepted`` is what verification found, even
  where the text keeps fewer tokens. A record cut with the text would understate the last round of every request; left out, it would understate
  all, for long rounds are the likelier to reach the end. Counted in full, the sum over rounds is that of a process stopped by its own past, whose
  ratio to the number of rounds estimates the drafter's mean (Wald's identity). z-lab's code counts the same way, so figures compare.
  ``drafted`` is below K only where the positions of the target end; statistics leave those rounds out.

Shapes: B = 1 request, T tokens, S = K + 1 positions of a block, F tapped features, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from dflash_core.decoding.drafting import BlockDrafter
from dflash_core.decoding.sampling import Sampling, Verdict, draw, token_probabilities, verify_greedy, verify_sampled
from dflash_core.errors import InputError, Problem

if TYPE_CHECKING:
    from dflash_core.drafter import DFlashDrafter
    from dflash_core.target import TargetModel


@dataclass(frozen=True)
class Generation:
    """The answer to one prompt, and what it took.

    tokens:        new tokens, the stop token included
    finish_reason: "stop" or "length"
    accepted:      drafted tokens that verification accepted, per round; the acceptance length of a round is one more
    drafted:       drafted tokens per round
    target_passes: passes of the target, prefill included: equal to ``len(tokens)`` when nothing is drafted
    draft_passes:  passes of the drafter
    seconds:       wall time of the whole request; the three stages below are part of it
    """

    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    accepted: tuple[int, ...]
    drafted: tuple[int, ...]
    target_passes: int
    draft_passes: int
    seconds: float
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float


class Proposer(Protocol):
    """Whatever drafts. One instance serves one request and keeps its own cache."""

    tap_layers: tuple[int, ...]

    def propose(self, features_BTF: Tensor, last_B: Tensor, anchor: int, count: int) -> Tensor:
        """Logits [B, count, V] for the ``count`` tokens after ``last_B``, which stands at position ``anchor``.

        ``features_BTF`` are the target's features of the positions committed since the last call, the last of which is ``anchor`` - 1.
        """
        ...


@torch.inference_mode()
def speculative_generate(
    target: TargetModel,
    drafter: DFlashDrafter,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    block_size: int,
    stop_ids: Collection[int],
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
) -> Generation:
    """Continue ``prompt_ids`` with blocks of ``block_size`` tokens, of which ``block_size`` - 1 are drafted.

    Greedy output is that of the target, token for token in float32; sampled output has the target's distribution exactly.

    Args:
        block_size: 2 up to the size the drafter was trained with.
        stop_ids: tokens that end the answer; normally ``target.info.eos_token_ids``.
        temperature: 0 is greedy. Otherwise ``generator`` (on the target's device) is needed and makes every draw.

    Raises:
        InputError: an empty or too long prompt, a block size beyond the trained one, sampling without a generator.
    """
    trained = drafter.config.block_size
    if not 2 <= block_size <= trained:
        problem = Problem("block_size", block_size, f"must be from 2 to the trained block size {trained}", "Decode with a smaller block")
        raise InputError("speculative_generate", [problem])
    proposer = BlockDrafter(drafter, target.vocabulary)
    sampling = Sampling(temperature, top_p, top_k)
    return decode(target, proposer, prompt_ids, max_new_tokens, block_size, stop_ids, sampling, generator)


@torch.inference_mode()
def autoregressive_generate(
    target: TargetModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
) -> Generation:
    """Continue ``prompt_ids`` one token a pass: ``speculative_generate`` with nothing drafted. Same arguments, same errors."""
    return decode(target, None, prompt_ids, max_new_tokens, 1, stop_ids, Sampling(temperature, top_p, top_k), generator)


def decode(
    target: TargetModel,
    proposer: Proposer | None,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    block_size: int,
    stop_ids: Collection[int],
    sampling: Sampling,
    generator: torch.Generator | None,
) -> Generation:
    """The loop itself, for any ``Proposer``; with None nothing is drafted."""
    _check(target, prompt_ids, max_new_tokens, sampling, generator)
    clock = _StageClock(target.device)
    started = time.perf_counter()
    positions = target.info.max_position_embeddings
    longest = min(max_new_tokens, positions - len(prompt_ids))
    stops = frozenset(stop_ids)
    taps = proposer.tap_layers if proposer else None
    tokens: list[int] = []
    accepted: list[int] = []
    drafted: list[int] = []

    with clock.stage("prefill"):
        cache = target.new_cache()
        output = target.forward(torch.tensor([list(prompt_ids)], device=target.device), cache, tap_layers=taps, logits_to_keep=1)
        nothing_B0 = torch.empty(1, 0, dtype=torch.long, device=target.device)
        verdict = _verify(output.logits, None, nothing_B0, sampling, generator)
        fresh = verdict.following.tolist()
    features_BTF = output.features
    tokens += fresh

    while len(tokens) < longest and stops.isdisjoint(fresh):
        anchor = len(prompt_ids) + len(tokens) - 1  # position of the last token, which the target has not read yet
        count = min(block_size - 1, positions - 1 - anchor) if proposer else 0
        drafted_BK, draft_BKV = nothing_B0, None
        if proposer and features_BTF is not None and count:
            with clock.stage("draft"):
                draft_BKV = proposer.propose(features_BTF, verdict.following, anchor, count)
                drafted_BK, draft_BKV = _draft(draft_BKV, sampling, generator)
        with clock.stage("verify"):
            block_BS = torch.cat([verdict.following[:, None], drafted_BK], dim=1)
            output = target.forward(block_BS, cache, tap_layers=taps)
            verdict = _verify(output.logits, draft_BKV, drafted_BK, sampling, generator)
            kept, following, *draft = torch.cat([verdict.accepted, verdict.following, drafted_BK[0]]).tolist()  # the round's one wait
            target.crop_cache(cache, anchor + 1 + kept)
        features_BTF = output.features[:, : kept + 1] if output.features is not None else None
        fresh = [*draft[:kept], following]
        tokens += fresh
        accepted.append(kept)
        drafted.append(count)

    text, stopped = _cut(tokens[:longest], stops)
    seconds = clock.read()
    return Generation(
        tokens=tuple(text),
        finish_reason="stop" if stopped else "length",
        accepted=tuple(accepted),
        drafted=tuple(drafted),
        target_passes=1 + len(accepted),
        draft_passes=sum(count > 0 for count in drafted),
        seconds=time.perf_counter() - started,
        prefill_seconds=seconds["prefill"],
        draft_seconds=seconds["draft"],
        verify_seconds=seconds["verify"],
    )


def _draft(logits_BKV: Tensor, sampling: Sampling, generator: torch.Generator | None) -> tuple[Tensor, Tensor | None]:
    """The drafted tokens [B, K] and, when sampling, the probabilities they were drawn from."""
    if generator is None or sampling.greedy:
        return logits_BKV.argmax(dim=-1), None
    draft_BKV = token_probabilities(logits_BKV, sampling)
    return draw(draft_BKV, generator), draft_BKV


def _verify(logits_BSV: Tensor, draft_BKV: Tensor | None, drafted_BK: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Verdict:
    if generator is None or sampling.greedy:
        return verify_greedy(logits_BSV, drafted_BK)
    target_BSV = token_probabilities(logits_BSV, sampling)
    return verify_sampled(target_BSV, target_BSV[:, :0] if draft_BKV is None else draft_BKV, drafted_BK, generator)


def _cut(tokens: list[int], stops: frozenset[int]) -> tuple[list[int], bool]:
    """The tokens up to the first stop token, included, and whether there was one."""
    for index, token in enumerate(tokens):
        if token in stops:
            return tokens[: index + 1], True
    return tokens, False


def _check(target: TargetModel, prompt_ids: Sequence[int], max_new_tokens: int, sampling: Sampling, generator: torch.Generator | None) -> None:
    positions = target.info.max_position_embeddings
    problems = []
    if not prompt_ids:
        problems.append(Problem("prompt_ids", [], "is empty", "Give at least one token"))
    if len(prompt_ids) >= positions:
        message = f"{len(prompt_ids)} tokens leave no room below the target's max_position_embeddings = {positions}"
        problems.append(Problem("prompt_ids", list(prompt_ids), message, "Shorten the prompt"))
    if max_new_tokens < 1:
        problems.append(Problem("max_new_tokens", max_new_tokens, "must be at least 1", "Ask for at least one token"))
    if not sampling.greedy and generator is None:
        remedy = "Pass torch.Generator(device).manual_seed(seed), so that the draws can be repeated"
        problems.append(Problem("generator", None, f"temperature {sampling.temperature} draws at random", remedy))
    if problems:
        raise InputError("generate", problems)


class _StageClock:
    """Time per stage: on CUDA with events, read once at the end, so that timing itself never makes the host wait."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if self._cuda else None
        self._seconds = {"prefill": 0.0, "draft": 0.0, "verify": 0.0}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        if self._stream is None:
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started
            return
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(self._stream)
        yield
        after.record(self._stream)
        self._events.append((name, before, after))

    def read(self) -> dict[str, float]:
        """Seconds per stage; waits until the device has finished."""
        if self._stream is not None:
            self._stream.synchronize()
        for name, before, after in self._events:
            self._seconds[name] += before.elapsed_time(after) / 1e3
        self._events.clear()
        return self._seconds
