"""One copy of the drafter on one device: what its worker thread computes in a step.

    B rows   T row length   N anchor slots   S block size   Q = N * S   H hidden   M = B * Q slots   P parameters (flat)

    for each step:  begin_step → micro_step × A → close_step → GradientSync.all_reduce(buffer) → apply

Masters, gradients and AdamW's moments are one flat fp32 buffer each. With ``precision: bfloat16`` the drafter's parameters are views into a
bf16 copy of the masters and its gradients into a bf16 buffer that is added to the fp32 one after each micro-step. All buffers live as long as
the replica, so a step allocates nothing that outlives it, and ``.grad`` is always there: accumulating and not accumulating are one graph.

Gradients are those of the *sum* of weighted losses. They are divided by the denominator of the whole step, all replicas and micro-steps
together, after they have been summed; nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from dflash_core.config import PipelineConfig
from dflash_core.drafter import DFlashConfig, DFlashDrafter, block_labels, block_positions, block_tokens, dflash_block_mask, dflash_dense_mask
from dflash_core.feed import Row, collate
from dflash_core.objective import linear_cross_entropy, slot_weights
from dflash_core.training.flat import FlatLayout
from dflash_core.training.guard import own_code
from dflash_core.training.sync import StepTotals, Tail


class Vocabulary(Protocol):
    """The target's frozen embedding and head on one device; replicas of the device share it."""

    @property
    def head_weight(self) -> Tensor: ...

    @property
    def logit_softcap(self) -> float | None: ...

    @property
    def logit_scale(self) -> float: ...

    def embed(self, ids: Tensor) -> Tensor: ...


class Replica:
    """Weights, gradients, optimiser and step of one drafter on ``device``."""

    def __init__(self, index: int, device: torch.device, config: PipelineConfig, drafter_config: DFlashConfig, vocabulary: Vocabulary):
        training = config.training
        self.index = index
        self.device = device
        self.name = f"replica {index} ({device})"
        self.compiled = training.compile == "on" or (training.compile == "auto" and device.type == "cuda")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._training, self._objective = training, config.objective
        self._drafter_config, self._vocabulary = drafter_config, vocabulary
        self.layout = FlatLayout(drafter_config.tensor_shapes())
        self.tail = Tail(drafter_config.block_size, len(training.devices))
        P = self.layout.size
        self.masters_P = torch.zeros(P, device=device)
        self.buffer = torch.zeros(P + self.tail.size, device=device)  # gradients, and behind them the tail
        self.exp_avg_P, self.exp_avg_sq_P = torch.zeros_like(self.masters_P), torch.zeros_like(self.masters_P)
        self._gradients_P, self._tail = self.buffer[:P], self.buffer[P:]

        precision: torch.dtype = getattr(torch, training.precision)
        self._compute_P = self.masters_P if precision == torch.float32 else torch.zeros(P, dtype=precision, device=device)
        self._compute_gradients_P = self._gradients_P if precision == torch.float32 else torch.zeros(P, dtype=precision, device=device)
        self.drafter = DFlashDrafter(drafter_config).to(device=device, dtype=precision)
        weights, gradients = self.layout.views(self._compute_P), self.layout.views(self._compute_gradients_P)
        for name, parameter in self.drafter.named_parameters():
            parameter.data, parameter.grad = weights[name], gradients[name]

        self._learning_rate = torch.zeros((), device=device)
        self._optimizer = self._make_optimizer()
        draft = own_code(_draft, f"draft_of_replica_{index}")
        self._draft: Callable[..., Tensor] = torch.compile(draft, fullgraph=True, dynamic=False) if self.compiled else draft

    def _make_optimizer(self) -> torch.optim.AdamW:
        """AdamW over two flat parts, with decay and without. Fused: it takes its learning rate and whether to skip from the device."""
        cut, training = self.layout.num_decayed, self._training
        parts = [(slice(0, cut), training.weight_decay), (slice(cut, self.layout.size), 0.0)]
        groups = []
        for part, weight_decay in parts:
            parameter = nn.Parameter(self.masters_P[part])
            parameter.grad = self._gradients_P[part]
            groups.append({"params": [parameter], "weight_decay": weight_decay})
        optimizer = torch.optim.AdamW(groups, lr=self._learning_rate, betas=training.betas, fused=True)
        for group, (part, _) in zip(optimizer.param_groups, parts, strict=True):
            optimizer.state[group["params"][0]] = {
                "step": torch.zeros((), device=self.device),
                "exp_avg": self.exp_avg_P[part],
                "exp_avg_sq": self.exp_avg_sq_P[part],
            }
        return optimizer

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Work on the replica's device and stream: in warm-up too, since the allocator keeps memory by stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    @property
    def updates(self) -> int:
        """Steps that changed the weights. Waits for the device."""
        return int(next(iter(self._optimizer.state.values()))["step"].item())

    def load(
        self,
        weights: Mapping[str, Tensor],
        exp_avg: Mapping[str, Tensor] | None = None,
        exp_avg_sq: Mapping[str, Tensor] | None = None,
        updates: int = 0,
    ) -> None:
        """Take over fp32 weights and, when resuming, AdamW's moments; without moments AdamW starts afresh."""
        for buffer, tensors in ((self.masters_P, weights), (self.exp_avg_P, exp_avg), (self.exp_avg_sq_P, exp_avg_sq)):
            buffer.zero_()
            for name, tensor in (tensors or {}).items():
                self.layout.views(buffer)[name].copy_(tensor)
        for state in self._optimizer.state.values():
            state["step"].fill_(updates)
        self._refresh_compute_copy()

    def tensors(self, buffer_P: Tensor) -> dict[str, Tensor]:
        """A copy of ``masters_P``, ``exp_avg_P`` or ``exp_avg_sq_P`` on the CPU, by parameter name. Waits for the device."""
        return {name: view.detach().cpu().clone() for name, view in self.layout.views(buffer_P).items()}

    def checksums(self) -> Tensor:
        """[3 * number of tensors] int64: of the weights and both moments; ``describe_checksum`` says of what."""
        return torch.cat([self.layout.checksums(buffer) for buffer in (self.masters_P, self.exp_avg_P, self.exp_avg_sq_P)])

    def describe_checksum(self, i: int) -> str:
        """What checksum ``i`` is of."""
        kind, tensor = divmod(i, len(self.layout.shapes))
        return f"{('weights', 'first moment', 'second moment')[kind]} of {list(self.layout.shapes)[tensor]}"

    def begin_step(self) -> None:
        """Forget the gradients and totals of the step before."""
        self.buffer.zero_()

    def micro_step(self, rows: Sequence[Row]) -> None:
        """Forward and backward of ``rows``; adds to the gradients and to the totals of the step."""
        batch = collate(rows).to(self.device)
        config, S = self._drafter_config, self._drafter_config.block_size
        B, N = batch.anchors.shape
        on_cuda = self.device.type == "cuda"
        labels_BNS = block_labels(batch.tokens, batch.loss_mask, batch.document_ids, batch.anchors, S, config.spec)
        with torch.no_grad():
            embeddings_BQH = self._vocabulary.embed(block_tokens(batch.tokens, batch.anchors, config)).flatten(1, 2)
            positions_BQ = block_positions(batch.positions, batch.anchors, S).flatten(1)
            make_mask = dflash_block_mask if on_cuda else dflash_dense_mask  # flex_attention has no backward on the CPU
            mask = make_mask(batch.anchors, batch.document_ids, S)
        hidden_BQH = self._draft(self.drafter, batch.features, embeddings_BQH, batch.positions, positions_BQ, mask)
        losses = linear_cross_entropy(
            hidden_BQH.flatten(0, 1) * self._vocabulary.logit_scale,
            self._vocabulary.head_weight,
            labels_BNS.flatten(),
            chunk_slots=self._objective.chunk_slots,
            softcap=self._vocabulary.logit_softcap,
            max_labelled=B * N * (S - config.spec.first_predicting_slot) if on_cuda else None,  # fixed shapes there, least work here
        )
        weights_BNS, denominator = slot_weights(self._objective, labels_BNS, losses.probability.view(B, N, S))
        loss = (weights_BNS.flatten() * losses.nll).sum()
        loss.backward()
        if self._compute_gradients_P is not self._gradients_P:
            self._gradients_P.add_(self._compute_gradients_P)
            self._compute_gradients_P.zero_()
        tail = self._tail
        tail[Tail.LOSS] += loss.detach()
        tail[Tail.DENOMINATOR] += denominator
        tail[self.tail.labelled] += (labels_BNS >= 0).sum((0, 1))
        tail[self.tail.hits] += losses.hit.view(B, N, S).sum((0, 1))

    def close_step(self, wants_to_stop: bool) -> None:
        """Write this replica's vote and whether its own gradient is finite; the buffer is then ready to be summed."""
        self._tail[Tail.STOP] = float(wants_to_stop)
        largest = torch.linalg.vector_norm(self._gradients_P, float("inf"))  # NaN if any is
        self._tail[self.tail.nonfinite][self.index] = (~torch.isfinite(largest)).float()

    def apply(self, learning_rate: float) -> None:
        """One optimiser step with the summed buffer: average, clip by the global norm, AdamW. Skipped if the norm is not finite.

        Every replica decides from the same bits, so all apply or all skip. Afterwards the tail holds the norm of the averaged gradient.
        """
        denominator = self._tail[Tail.DENOMINATOR].clamp_min(torch.finfo(torch.float32).tiny)
        norm = torch.linalg.vector_norm(self._gradients_P) / denominator
        self._tail[Tail.GRAD_NORM] = norm
        self._gradients_P.mul_((self._training.max_grad_norm / (norm + 1e-6)).clamp_max(1.0) / denominator)
        self._learning_rate.fill_(learning_rate)
        self._optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        self._optimizer.step()
        self._refresh_compute_copy()

    def totals_later(self) -> Callable[[], StepTotals]:
        """Start copying the tail to the host; the returned function waits for that copy alone, however much is queued after it."""
        if self.device.type != "cuda":
            host = self._tail.clone()
            return lambda: self.tail.read(host)
        pinned = torch.empty(self.tail.size, pin_memory=True)
        pinned.copy_(self._tail, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.device))

        def read() -> StepTotals:
            copied.synchronize()
            return self.tail.read(pinned)

        return read

    def warm_up(self, rows: Sequence[Row]) -> None:
        """Run everything a step will run, twice over, and leave weights and moments as they were."""
        if self._stream is not None:
            torch.cuda.synchronize(self.device)  # weights were made and loaded on another stream
        with self.on_device():
            self.begin_step()
            self.micro_step(rows)
            self.micro_step(rows)
            self.close_step(False)
            self._gradients_P[0] = float("nan")  # the update runs, and is skipped by the rule for non-finite gradients
            self.apply(0.0)
            self.totals_later()()
            self.checksums()
            self.begin_step()
        if self._stream is not None:
            torch.cuda.synchronize(self.device)

    def _refresh_compute_copy(self) -> None:
        if self._compute_P is not self.masters_P:
            self._compute_P.copy_(self.masters_P)


def _draft(drafter: DFlashDrafter, features_BTF: Tensor, embeddings_BQH: Tensor, positions_BT: Tensor, positions_BQ: Tensor, mask: Tensor) -> Tensor:
    """What is compiled: the drafter, from features to hidden states. The loss stays outside; it brings kernels of its own."""
    return drafter(features_BTF, embeddings_BQH, positions_BT, positions_BQ, mask)
