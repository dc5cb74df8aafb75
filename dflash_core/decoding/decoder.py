"""The draft–verify loop. The autoregressive baseline is the same loop with nothing drafted, so that a speed-up is the drafter's alone.

One round of a batch: the proposer drafts K tokens after the last token of every request, the target reads [last token, draft] of all in one pass,
of each draft the longest prefix that the target agrees with is kept, its own next token is added, and both caches go on behind what was kept. All
of it happens on the device, at shapes that never change: each stage of a round is a CUDA graph where there are any. The host queues stages and
learns one stage late whether it can stop, so that the device does not wait for it.

Two rules on the end of a request:

* The text ends with the first stop token, which it includes, or after ``max_new_tokens``, or where the target's positions end.
* **The end cuts the text, never the record.** Blocks are drafted in full up to the end, and a round's ``accepted`` is what verification found, even
  where the text keeps fewer tokens. A record cut with the text would understate the last round of every request; left out, it would understate
  all, for long rounds are the likelier to reach the end. Counted in full, the sum over rounds is that of a process stopped by its own past, whose
  ratio to the number of rounds estimates the drafter's mean (Wald's identity). z-lab's code counts the same way, so figures compare.
  ``drafted`` is below K only where the positions of the target end; statistics leave those rounds out.

Shapes: R requests, T tokens, S = K + 1 positions of a block, F tapped features, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from dflash_core.decoding.drafting import Proposer
from dflash_core.decoding.rounds import Rounds
from dflash_core.decoding.sampling import GREEDY, Sampling, Verdict, draw, token_probabilities, uniform_table, verify_greedy, verify_sampled
from dflash_core.decoding.stages import LateFlag, StageClock
from dflash_core.decoding.verifying import Verifier
from dflash_core.errors import InputError, Problem
from dflash_core.target.device import on_device

if TYPE_CHECKING:
    from dflash_core.target import TargetInfo


_WIDTHS = 64  # prompts are padded to a multiple of so many tokens where graphs are captured, one for each width


@dataclass(frozen=True)
class Generation:
    """The answer to one prompt, and what it took.

    tokens:        new tokens, the stop token included
    finish_reason: "stop" or "length"
    accepted:      drafted tokens that verification accepted, per round; the acceptance length of a round is one more
    drafted:       drafted tokens per round
    target_passes: passes of the target, prefill included: equal to ``len(tokens)`` when nothing is drafted
    draft_passes:  passes of the drafter
    seconds:       wall time of the request's batch divided by its requests, so that a sum over requests is the time that they took; the three
                   stages below are part of it
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


class _Prefill(NamedTuple):
    """The reading of prompts of up to a width: where they are put, and what then reads them and takes the first token of each."""

    ids: Tensor
    run: Callable[[], None]


class Decoder:
    """Decodes batches of up to ``rows`` requests in the same buffers, with the same graphs. For one thread at a time."""

    def __init__(
        self, info: TargetInfo, verifier: Verifier, proposer: Proposer | None, *,
        rows: int, capacity: int, max_new_tokens: int, block_size: int, stop_ids: Collection[int], sampling: Sampling = GREEDY,
    ):  # fmt: skip
        """
        Args:
            verifier: the target, with room for ``rows`` requests of ``capacity`` positions each
            proposer: what drafts, with the same room; with None nothing is drafted, and ``block_size`` is 1
            capacity: positions of a request: prompt, ``max_new_tokens`` and a block
            stop_ids: tokens that end an answer

        Raises:
            InputError: not a single token is asked for.
        """
        if max_new_tokens < 1:
            raise InputError("generate", [Problem("max_new_tokens", max_new_tokens, "must be at least 1", "Ask for at least one token")])
        max_new_tokens = min(max_new_tokens, info.max_position_embeddings)  # no text goes on where the positions have ended
        self._info, self._verifier, self._proposer = info, verifier, proposer
        self._device = device = verifier.device
        self._rows, self._capacity, self._max_new_tokens, self._block_size = rows, capacity, max_new_tokens, block_size
        self._stops, self._sampling = frozenset(stop_ids), sampling
        self._taps = proposer.tap_layers if proposer else None
        with torch.inference_mode(), on_device(device):
            self._rounds = Rounds(rows, block_size, max_new_tokens, info.max_position_embeddings, stop_ids, device)
            self._finished = LateFlag(self._rounds.finished)
            # Greedy decoding draws nothing. Otherwise: one number for the first token, then 2 K + 1 for each round.
            self._uniform_RU = torch.zeros(rows, 0 if sampling.greedy else 1 + max_new_tokens * (2 * block_size - 1), device=device)
            self._turns_U = torch.arange(1, 2 * block_size, device=device)
            self._drafted_RK = torch.zeros(rows, 0, dtype=torch.int64, device=device)
            self._draft_RKV: Tensor | None = None  # when sampling: what was drafted from
            self._features_RSF: Tensor | None = None
            self._prefills: dict[int, _Prefill] = {}
            self._first, *self._others = self._captured_stages()

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None = None, *, most: int | None = None) -> list[Generation]:
        """Answer up to ``rows`` prompts (token ids of any lengths) together.

        Args:
            seeds: one per prompt, which alone makes its draws. Default: 0, 1, 2, ...
            most: tokens of the longest answer this time; at most, and by default, ``max_new_tokens``.

        Raises:
            InputError: a prompt is empty, too long, or not of the target's vocabulary.
        """
        self._check(prompts)
        with on_device(self._device):
            return self._generate(prompts, seeds, most)

    def _generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None, most: int | None) -> list[Generation]:
        limits = [min(most or self._max_new_tokens, self._limit(len(prompt))) for prompt in prompts]
        prefill = self._prefill(max(map(len, prompts)))  # captured before the clock runs, if it is the first of its width
        clock = StageClock(self._device)
        started = time.perf_counter()
        with clock.stage("prefill"):
            self._begin(prefill.ids, prompts, limits, range(len(prompts)) if seeds is None else seeds)
            prefill.run()
        ahead = self._device.type == "cuda"
        self._finished.send()
        while ahead or not self._finished.read():
            self._run(clock, self._first)
            if ahead and self._finished.read():  # of the round before: the device is busy meanwhile
                break
            for stage in self._others:
                self._run(clock, stage)
            self._finished.send()
        records = zip(*self._rounds.read(), strict=True)
        stages = clock.read()
        times = {f"{name}_seconds": seconds / len(prompts) for name, seconds in stages.items()}
        times["seconds"] = (time.perf_counter() - started) / len(prompts)
        return [self._generation(limit, *record, times) for limit, record in zip(limits, records, strict=False)]

    def _captured_stages(self) -> list[tuple[str, Callable[[], None]]]:
        """What a round consists of, in order. Every stage works on the state in ``self`` and ``Rounds``, none takes or returns anything."""
        stages = [("verify", self._verify)]
        if self._proposer is not None:
            stages = [("draft", self._propose), *stages, ("draft", self._read)]
        captured = []
        for name, stage in stages:
            replay = self._verifier.capture(stage)
            if self._verifier.graphs:
                replay()  # a captured stage has not run, and the next one warms up on what it leaves
            captured.append((name, replay))
        return captured

    def _run(self, clock: StageClock, stage: tuple[str, Callable[[], None]]) -> None:
        with clock.stage(stage[0]):
            stage[1]()

    def _prefill(self, longest: int) -> _Prefill:
        """Made when there are prompts of such a width for the first time, and with graphs kept."""
        graphs = self._verifier.graphs
        width = min(-(-longest // _WIDTHS) * _WIDTHS, self._capacity) if graphs else longest
        if width in self._prefills:
            return self._prefills[width]
        ids_RT = torch.full((self._rows, width), self._info.pad_token_id or 0, dtype=torch.int64, device=self._device)
        self._rounds.begin([1] * self._rows, [0] * self._rows)  # what a capture warms up on: rows that are done
        prefill = _Prefill(ids_RT, self._verifier.capture(lambda: self._read_prompts(ids_RT)))
        if graphs:
            self._prefills[width] = prefill
        return prefill

    def _begin(self, ids_RT: Tensor, prompts: Sequence[Sequence[int]], limits: Sequence[int], seeds: Sequence[int]) -> None:
        """Put everything about a batch to where the stages find it. Rows without a prompt are done from the start."""
        idle = self._rows - len(prompts)
        width, pad = ids_RT.shape[1], self._info.pad_token_id or 0
        ids_RT.copy_(torch.tensor([[*prompt, *[pad] * (width - len(prompt))] for prompt in prompts] + [[pad] * width] * idle))
        self._rounds.begin([*map(len, prompts), *[1] * idle], [*limits, *[0] * idle])
        if not self._sampling.greedy:
            self._uniform_RU.copy_(uniform_table([*seeds, *[0] * idle], self._uniform_RU.shape[1]))

    def _read_prompts(self, ids_RT: Tensor) -> None:
        """Let the target read the prompts, and take the first token of each."""
        lengths_R, rows_R = self._rounds.anchor_R, torch.arange(self._rows, device=self._device)
        output = self._verifier.prefill(ids_RT, lengths_R, rows_R, self._taps)
        if self._proposer is not None and output.features is not None:
            self._proposer.read(output.features, torch.zeros_like(lengths_R))
        logits_RV = output.logits[:, 0]
        if self._sampling.greedy:
            self._rounds.first(logits_RV.argmax(-1))
        else:
            self._rounds.first(draw(token_probabilities(logits_RV, self._sampling), self._uniform_RU[:, 0]))

    def _propose(self) -> None:
        """Draft a block of each request."""
        assert self._proposer is not None
        logits_RKV = self._proposer.propose(self._rounds.last_R, self._rounds.anchor_R)
        if self._sampling.greedy:
            self._drafted_RK = logits_RKV.argmax(dim=-1)
            return
        self._draft_RKV = token_probabilities(logits_RKV, self._sampling)
        self._drafted_RK = draw(self._draft_RKV, self._uniforms()[:, : self._block_size - 1])

    def _verify(self) -> None:
        """Let the target read the blocks, and keep what it agrees with."""
        rounds = self._rounds
        block_RS = torch.cat([rounds.last_R[:, None], self._drafted_RK], dim=1)
        output = self._verifier.forward(block_RS, rounds.anchor_R, self._taps)
        count_R = rounds.count()
        rounds.commit(self._verdict(output.logits, count_R), self._drafted_RK, count_R)
        self._features_RSF = output.features

    def _verdict(self, logits_RSV: Tensor, count_R: Tensor) -> Verdict:
        if self._sampling.greedy:
            return verify_greedy(logits_RSV, self._drafted_RK, count_R)
        target_RSV = token_probabilities(logits_RSV, self._sampling)
        draft_RKV = target_RSV[:, :0] if self._draft_RKV is None else self._draft_RKV
        return verify_sampled(target_RSV, draft_RKV, self._drafted_RK, count_R, self._uniforms()[:, self._block_size - 1 :])

    def _read(self) -> None:
        """Let the proposer take in what the target made of the blocks."""
        assert self._proposer is not None
        assert self._features_RSF is not None
        self._proposer.read(self._features_RSF, self._rounds.begun_R)

    def _uniforms(self) -> Tensor:
        """The numbers of this round, [R, 2 K + 1]."""
        return self._uniform_RU.gather(1, self._rounds.turn_R[:, None] * len(self._turns_U) + self._turns_U)

    def _limit(self, prompt_length: int) -> int:
        return min(self._max_new_tokens, self._info.max_position_embeddings - prompt_length)

    def _generation(self, limit: int, tokens: list[int], accepted: list[int], drafted: list[int], times: dict[str, float]) -> Generation:
        text = tokens[:limit]
        end = next((index for index, token in enumerate(text) if token in self._stops), None)
        return Generation(
            tokens=tuple(text if end is None else text[: end + 1]),
            finish_reason="length" if end is None else "stop",
            accepted=tuple(accepted),
            drafted=tuple(drafted),
            target_passes=1 + len(accepted),
            draft_passes=sum(count > 0 for count in drafted),
            **times,
        )

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        positions = self._info.max_position_embeddings
        problems = []
        for prompt_ids in prompts:
            if not prompt_ids:
                problems.append(Problem("prompt_ids", [], "is empty", "Give at least one token"))
            elif not 0 <= min(prompt_ids) <= max(prompt_ids) < self._info.vocab_size:
                message = f"has tokens outside the vocabulary of {self._info.name}, 0 to {self._info.vocab_size - 1}"
                problems.append(Problem("prompt_ids", list(prompt_ids), message, "Encode prompts with the target's own tokenizer"))
            elif len(prompt_ids) >= positions:
                message = f"{len(prompt_ids)} tokens leave no room below the target's max_position_embeddings = {positions}"
                problems.append(Problem("prompt_ids", list(prompt_ids), message, "Shorten the prompt"))
            elif len(prompt_ids) + self._limit(len(prompt_ids)) + self._block_size > self._capacity:
                message = f"{len(prompt_ids)} tokens, an answer of up to {self._limit(len(prompt_ids))} and a block of {self._block_size} are more"
                problems.append(Problem("capacity", self._capacity, message, "Make a decoder with more room, or shorten the prompt"))
        if not 1 <= len(prompts) <= self._rows:
            problems.append(Problem("prompts", len(prompts), f"must be 1 to {self._rows} for a decoder of that many rows", "Give so many at a time"))
        if problems:
            raise InputError("generate", problems)
