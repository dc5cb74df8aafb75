"""One copy of the drafter on one device: what its worker thread computes in a step.

    B rows   T row length   N anchor slots   S block size   Q = N * S   H hidden   M slots that predict, of all blocks   P parameters (flat)

    for each step:  begin_step → micro_step × A → close_step → GradientSync.sum_gradients → apply → GradientSync.share_weights

With ``training.cuda_graphs`` the replica's four only launch what ``graphs`` captured of them in warm-up.

Masters and both moments are flat buffers (``optimizer.Moments``), of the replica's shard alone with ``sync: sharded``. The drafter's parameters are
views into the weights it computes with: the masters themselves, or rounded to bf16 (``precision`` bfloat16 and fp8). What becomes of the gradients
is in ``gradients``, and of the update in ``optimizer`` and ``muon``.

Gradients are those of the *sum* of weighted losses. They are divided by the denominator of the whole step, all replicas and micro-steps
together, after they have been summed; nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from dflash_core.config import PipelineConfig
from dflash_core.drafter import DFlashConfig, DFlashDrafter, attention_kind
from dflash_core.feed import Batch, Row, collate
from dflash_core.objective import slot_weights
from dflash_core.shards.fp8 import from_fp8
from dflash_core.training.compiled import Prepared, as_drafter_takes, draft, prepare
from dflash_core.training.flat import FlatLayout
from dflash_core.training.gradients import AddedGradients, HandedGradients
from dflash_core.training.graphs import StepGraphs
from dflash_core.training.guard import own_code
from dflash_core.training.losses import SlotLosses, Vocabulary
from dflash_core.training.muon import Muon
from dflash_core.training.optimizer import FusedAdamW, Moments, Optimizer, TorchAdamW, splits_masters
from dflash_core.training.staging import Staging
from dflash_core.training.sync import GradientSync, StepTotals, Tail


class Replica:
    """Weights, gradients, optimiser and step of one drafter on ``device``."""

    def __init__(self, index: int, device: torch.device, config: PipelineConfig, drafter_config: DFlashConfig, vocabulary: Vocabulary):
        training = config.training
        self.index = index
        self.device = device
        self.name = f"replica {index} ({device})"
        self._on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_cuda else None
        self._attention = attention_kind(training.attention, device, training.precision, drafter_config)
        self._training, self._objective = training, config.objective
        self._drafter_config, self._vocabulary = drafter_config, vocabulary
        parts = len(training.devices) if training.sync == "sharded" else 1
        self.layout = FlatLayout(drafter_config.tensor_shapes(), parts)
        self.sharded = parts > 1
        self.shard = self.layout.shard(index if self.sharded else 0)
        self.tail = Tail(drafter_config.block_size, len(training.devices))
        precision = compute_dtype(training.precision)
        split = splits_masters(training, device.type)
        self.moments = Moments(self.layout, precision, device, shard=self.shard, muon=training.optimizer == "muon", split=split)
        self._graphs: StepGraphs | None = None
        self.staging: Staging | None = None  # on CUDA, from warm-up on
        self._learning_rate = torch.zeros((), device=device)
        self.drafter = DFlashDrafter.around(drafter_config, self.layout.views(self.moments.weights_P), device)
        self.drafter.activation_checkpointing = training.activation_checkpointing
        fp8 = training.precision == "fp8"
        if fp8:
            self.drafter.use_fp8()
        self._losses = SlotLosses(config.objective, drafter_config, vocabulary, fp8=fp8, fixed_shapes=self._on_cuda)
        self._gradients: AddedGradients | HandedGradients
        if self._on_cuda:
            accumulating = training.accumulation_steps > 1
            self._gradients = HandedGradients(
                self.layout, self.drafter, torch.float32 if accumulating else precision, self.tail.size, device,
                packed=accumulating or len(training.devices) > 1, shard=self.shard,
            )  # fmt: skip
        else:
            self._gradients = AddedGradients(self.layout, self.drafter, precision, self.tail.size, device, shard=self.shard)
        self._optimizer = self._make_optimizer()

        self._prepare: Callable[..., Prepared] = own_code(prepare, f"preparation_of_replica_{index}")
        self._draft: Callable[..., Tensor] = own_code(draft, f"draft_of_replica_{index}")
        if training.compiles(device.type):
            self._draft = torch.compile(self._draft, fullgraph=True, dynamic=False)
            if self._on_cuda:  # on the CPU only the drafter is worth compiling
                self._prepare = torch.compile(self._prepare, fullgraph=True, dynamic=False)

    def _make_optimizer(self) -> Optimizer:
        if self._training.optimizer == "muon":
            return Muon(self.layout, self._training, self.moments)
        square_sum = self.totals[Tail.GRAD_NORM] if self.sharded else None
        if isinstance(self._gradients, HandedGradients):
            return FusedAdamW(self.shard, self._training, self.moments, square_sum)
        return TorchAdamW(self.shard, self._training, self.moments, self._gradients.flat_P[self.shard.slice], square_sum)

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
        return int(self._optimizer.counters[0].item())

    @property
    def summed(self) -> list[Tensor]:
        """The tensors that are to be summed over the replicas between ``close_step`` and ``apply``; the last ends in the tail."""
        return self._gradients.summed

    @property
    def gradients(self) -> Tensor:
        """All gradients in one buffer; there is one wherever there are several replicas."""
        assert self._gradients.flat_P is not None
        return self._gradients.flat_P

    @property
    def weights(self) -> Tensor:
        """The weights that the drafter computes with."""
        return self.moments.weights_P

    @property
    def shards(self) -> Sequence[Tensor]:
        """What masters and both moments are made of (``Moments.by_name``): this replica's part of it, or all."""
        return list(self.moments.buffers.values())

    @property
    def graphed(self) -> bool:
        """Whether its step is launched as CUDA graphs."""
        return self._graphs is not None

    @property
    def totals(self) -> Tensor:
        """The tail alone: the numbers of the step that ``self.tail`` says the places of."""
        return self._gradients.tail

    def measure_shard(self) -> None:
        """Once this replica's shard of the gradients has been summed: put the sum of its squares into the tail, which is summed then."""
        self.totals[Tail.GRAD_NORM] = torch.linalg.vector_norm(self.gradients[self.shard.slice], dtype=torch.float32).square()

    def load(
        self,
        weights: Mapping[str, Tensor],
        exp_avg: Mapping[str, Tensor] | None = None,
        exp_avg_sq: Mapping[str, Tensor] | None = None,
        updates: int = 0,
    ) -> None:
        """Take over fp32 weights and, when resuming, the optimiser's moments; without moments it starts afresh."""
        moments, mine = self.moments, {name: (elements, place) for name, elements, place in self.layout.pieces(self.shard)}
        for name, view in self.layout.views(moments.weights_P).items():
            rounded, kept = moments.parted(weights[name].to(self.device, torch.float32))
            view.copy_(rounded)
            if name in mine:
                elements, place = mine[name]
                moments.kept_P[place].copy_(kept.reshape(-1)[elements])
        for buffer, tensors in ((moments.exp_avg_P, exp_avg), (moments.exp_avg_sq_P, exp_avg_sq)):
            if not tensors:
                buffer.zero_()
                continue
            first = self.shard.size - len(buffer)  # where it starts in the shard: Muon's second moment is of the vectors alone
            for name, (elements, place) in mine.items():
                if place.start >= first:
                    buffer[place.start - first : place.stop - first].copy_(tensors[name].reshape(-1)[elements])
        for counter in self._optimizer.counters:
            counter.fill_(updates)

    def checksums(self) -> Tensor:
        """[n] int64: of masters and moments of each tensor, or of the weights alone where masters are sharded; ``describe_checksum`` says of what."""
        if self.sharded:
            return self.layout.checksums(self.moments.weights_P)
        return torch.cat([self.layout.checksums(buffer) for buffer in self.moments.buffers.values()])

    def describe_checksum(self, i: int) -> str:
        """What checksum ``i`` is of."""
        if self.sharded:
            return f"weights of {list(self.layout.shapes)[i]}"
        return [f"{kind} of {name}" for kind, buffer in self.moments.buffers.items() for name in self.layout.views(buffer)][i]

    def begin_step(self) -> None:
        """Forget the gradients and totals of the step before."""
        if self._graphs is None:
            self._gradients.begin()
        else:
            self._graphs.begin()

    def micro_step(self, batch: Batch) -> None:
        """Forward and backward of a batch on any device; adds to the gradients and to the totals of the step."""
        if self._graphs is None:
            self._compute(batch.to(self.device))
        else:
            self._graphs.micro_step(batch)

    def close_step(self, wants_to_stop: bool) -> None:
        """Write this replica's vote and whether its own gradient is finite; ``summed`` is then ready to be summed."""
        self.totals[Tail.STOP].fill_(float(wants_to_stop))  # assigning a number to an element copies it to the device, and waits
        if self._graphs is None:
            self._find_nonfinite()
        else:
            self._graphs.close()

    def apply(self, learning_rate: float) -> None:
        """One optimiser step with the summed gradients: average, clip by the global norm, update. Skipped if the norm is not finite.

        Every replica decides from the same bits, so all apply or all skip. Afterwards the tail holds the norm of the averaged gradient.
        """
        self._learning_rate.fill_(learning_rate)
        if self._graphs is None:
            self._update()
        else:
            self._graphs.apply()

    def _compute(self, batch: Batch) -> None:
        S, first = self._drafter_config.block_size, self._drafter_config.spec.first_predicting_slot
        B, N = batch.anchors.shape
        with torch.no_grad():
            prepared = self._prepare(self.drafter, batch.tokens, batch.loss_mask, batch.document_ids, batch.positions, batch.anchors, self._attention)
            anchors_BNH, mask_H = self._vocabulary.embed(prepared.anchor_ids), self._vocabulary.embed(prepared.mask_id)
        labels_BNS = prepared.labels
        seen = as_drafter_takes(prepared.mask, batch.tokens.shape[1], S)
        rotations = prepared.context_rotation, prepared.block_rotation
        features_BTF = batch.features if batch.feature_scales is None else from_fp8(batch.features, batch.feature_scales)
        losses = self._losses(
            self._draft(self.drafter, features_BTF, anchors_BNH, mask_H, *rotations, seen).flatten(0, 2), labels_BNS[..., first:].flatten(), batch
        )
        loss_BNS, probability_BNS, hit_BNS = (functional.pad(x.view(B, N, -1), (first, 0)) for x in losses)
        weights_BNS, denominator = slot_weights(self._objective, labels_BNS, probability_BNS)
        loss = (weights_BNS * loss_BNS).sum()
        loss.backward()
        self._gradients.collect()
        totals = self.totals
        totals[Tail.LOSS] += loss.detach()
        totals[Tail.DENOMINATOR] += denominator
        totals[self.tail.labelled] += (labels_BNS >= 0).sum((0, 1))
        totals[self.tail.hits] += hit_BNS.sum((0, 1))

    def _find_nonfinite(self) -> None:
        if self._gradients.flat_P is not None:
            largest = torch.linalg.vector_norm(self._gradients.flat_P, float("inf"))  # NaN if any is
            self.totals[self.tail.nonfinite][self.index] = (~torch.isfinite(largest)).float()

    def _update(self) -> None:
        denominator = self.totals[Tail.DENOMINATOR].clamp_min(torch.finfo(torch.float32).tiny)
        norm = self._optimizer.update(self._gradients.parts(), denominator, self._learning_rate)
        self.totals[Tail.GRAD_NORM] = norm
        if self._gradients.flat_P is None:  # the one replica: its norm tells as much as another pass over its gradients would
            self.totals[self.tail.nonfinite][self.index] = (~torch.isfinite(norm)).float()

    def totals_later(self) -> Callable[[], StepTotals]:
        """Start copying the tail to the host; the returned function waits for that copy alone, however much is queued after it."""
        if self.device.type != "cuda":
            host = self.totals.clone()
            return lambda: self.tail.read(host)
        pinned = torch.empty(self.tail.size, pin_memory=True)
        pinned.copy_(self.totals, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.device))

        def read() -> StepTotals:
            copied.synchronize()
            return self.tail.read(pinned)

        return read

    def warm_up(self, rows: Sequence[Row]) -> None:
        """Run everything a step will run, twice over, and leave weights and moments as they were. On CUDA also make room for batches."""
        batch = collate(rows)
        if self._stream is None:
            self._rehearse(batch)
            return
        torch.cuda.synchronize(self.device)  # weights were made and loaded on another stream
        with self.on_device():
            self._rehearse(batch)
            self.staging = Staging(batch, self.device)
            if self._training.graphs(self.device.type):
                self.capture(batch)
        torch.cuda.synchronize(self.device)

    def capture(self, batch: Batch) -> None:
        """Capture the step of batches of these shapes; from now on it is launched as CUDA graphs. Where ``warm_up`` runs, on the replica's stream."""
        assert self._stream is not None, "only a CUDA device has graphs"
        read = batch.map(lambda tensor: tensor.to(self.device, copy=True))
        self._graphs = StepGraphs(
            self._stream, read, first=self._begin_and_compute, further=self._compute,
            close=self._find_nonfinite if self._gradients.flat_P is not None else None, apply=self._update,
            accumulating=self._training.accumulation_steps > 1,
        )  # fmt: skip
        self._rehearse(batch)

    def _begin_and_compute(self, batch: Batch) -> None:
        self._gradients.begin()
        self._compute(batch)

    def _rehearse(self, batch: Batch) -> None:
        for repeat in range(2):
            if repeat == 0 or self._training.accumulation_steps == 1:
                self.begin_step()
            self.micro_step(batch)
        self.close_step(False)
        self._gradients.parts()[0][1].view(-1)[0] = float("nan")  # the update runs, and is skipped by the rule for non-finite gradients
        if self.sharded:
            self.measure_shard()
        self.apply(0.0)
        self.totals_later()()
        self.checksums()
        self.begin_step()


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype of weights and activations under ``training.precision``; products in fp8 begin and end in bfloat16."""
    return torch.float32 if precision == "float32" else torch.bfloat16


def gather(replica: Replica, sync: GradientSync) -> tuple[dict[str, Tensor], ...] | None:
    """Masters and both moments of all replicas together, on the CPU, by parameter name; for replica 0 alone. Waits for the device.

    Call it from the workers of all replicas after the same step. On the CPU these may be what the next step changes.
    """
    wholes = sync.gather_shards(replica)
    return None if wholes is None else replica.moments.by_name(wholes)
