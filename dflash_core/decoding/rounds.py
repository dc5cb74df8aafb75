"""What a batch of requests has decoded so far, in tensors that never move: the device alone keeps the account of a round.

The host learns one thing while the batch runs, and late: whether all requests are done. The rest is read when they are. A request that is done
stands still: whatever further rounds compute for it changes nothing.

Shapes: R requests, S = K + 1 positions of a block, L most new tokens, N most rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from dflash_core.decoding.sampling import Verdict


class Rounds:
    """The account of a batch, and where its next block begins.

    last_R:   the last token of each request, which the target has not read yet
    anchor_R: its position: so many tokens the target has read
    begun_R:  the position of the block that was verified last
    turn_R:   rounds of each request so far
    finished: whether all requests have their text, bool []
    """

    def __init__(self, rows: int, block_size: int, max_new_tokens: int, positions: int, stop_ids: Collection[int], device: torch.device):
        self._positions = positions
        self.last_R, self.anchor_R, self.begun_R, self.turn_R = torch.zeros(4, rows, dtype=torch.int64, device=device)
        self._length_R, self._limit_R = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._done_R = torch.ones(rows, dtype=torch.bool, device=device)
        self.finished = torch.ones((), dtype=torch.bool, device=device)
        self._stops_E = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)
        self._rows_R = torch.arange(rows, device=device)
        self._slots_S = torch.arange(block_size, device=device)
        # Text may run over the end by a block less one token, and what is not to be kept goes into one column more.
        self._tokens_RL = torch.zeros(rows, max_new_tokens + block_size, dtype=torch.int64, device=device)
        self._accepted_RN, self._drafted_RN = torch.zeros(2, rows, max_new_tokens, dtype=torch.int64, device=device)

    def begin(self, prompt_lengths: Sequence[int], limits: Sequence[int]) -> None:
        """A new batch: of every row the length of its prompt and the most tokens of its answer. With 0 of them a row is done from the start."""
        self.anchor_R.copy_(torch.tensor(prompt_lengths))
        self._limit_R.copy_(torch.tensor(limits))
        self._done_R.copy_(self._limit_R == 0)
        for counter in (self.last_R, self.begun_R, self._length_R, self.turn_R):
            counter.zero_()

    def first(self, token_R: Tensor) -> None:
        """The token that follows each prompt: no round, and nothing was drafted for it."""
        self.last_R.copy_(token_R)
        self._tokens_RL[:, 0] = token_R
        self._length_R.copy_((~self._done_R).long())
        self._end((token_R[:, None] == self._stops_E).any(-1) | (self._limit_R <= 1))

    def count(self) -> Tensor:
        """Drafted tokens that count in the next round, int64 [R]: K, or fewer where the positions of the target end."""
        return (self._positions - 1 - self.anchor_R).clamp(0, len(self._slots_S) - 1)

    def commit(self, verdict: Verdict, drafted_RK: Tensor, count_R: Tensor) -> None:
        """Book a round: keep the accepted tokens and the one that follows them, and move on behind them."""
        open_R = ~self._done_R
        kept_R1, following_R1 = verdict.accepted[:, None], verdict.following[:, None]
        fresh_RS = torch.cat([drafted_RK, following_R1], dim=1).scatter(1, kept_R1, following_R1)
        places_RS = self._length_R[:, None] + self._slots_S
        real_RS = (self._slots_S <= kept_R1) & open_R[:, None]
        nowhere = self._tokens_RL.shape[1] - 1
        self._tokens_RL.scatter_(1, places_RS.masked_fill(~real_RS, nowhere), fresh_RS)
        stopped_R = ((fresh_RS[..., None] == self._stops_E).any(-1) & real_RS & (places_RS < self._limit_R[:, None])).any(-1)
        for record_RN, value_R in ((self._accepted_RN, verdict.accepted), (self._drafted_RN, count_R)):
            old_R = record_RN[self._rows_R, self.turn_R]
            record_RN[self._rows_R, self.turn_R] = torch.where(open_R, value_R, old_R)
        advance_R = (verdict.accepted + 1) * open_R
        self.begun_R.copy_(self.anchor_R)
        self.last_R.copy_(torch.where(open_R, verdict.following, self.last_R))
        self.anchor_R += advance_R
        self._length_R += advance_R
        self.turn_R += open_R
        self._end(stopped_R | (self._length_R >= self._limit_R))

    def _end(self, ended_R: Tensor) -> None:
        self._done_R |= ended_R
        self.finished.copy_(self._done_R.all())

    def read(self) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        """Per request: new tokens, uncut; accepted tokens of every round; drafted tokens that counted, of every round. Waits for the device."""
        lengths, rounds = self._length_R.tolist(), self.turn_R.tolist()
        tokens = [row[:length] for row, length in zip(self._tokens_RL.tolist(), lengths, strict=True)]
        accepted, drafted = (
            [row[:count] for row, count in zip(record.tolist(), rounds, strict=True)] for record in (self._accepted_RN, self._drafted_RN)
        )
        return tokens, accepted, drafted
