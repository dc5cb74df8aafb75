"""What lies in the memory of each device while a stage runs, part by part.

What is allocated once (weights, masters, moments, gradients, caches) is counted exactly, the product's own buffers by making them on torch's meta
device. What a backward pass keeps is a formula: on the CPU of what autograd keeps, on CUDA of what the compiled drafter keeps. It gives 20.5 GiB for
the step outside of CUDA graphs of which 20.8 were measured (``benchmarks/results.jsonl``: ``step.bf16.1x2048.ungraphed.peak``).

CUDA's allocator holds more than is in use, and that is what a device must have: ``RESERVED`` times as much, where 1.10 was measured without CUDA
graphs and 1.14 to 1.19 with them. The CUDA context and NCCL, a few hundred MB, and Python itself are not counted.

T row length, Q draft positions of a row, L draft layers, H hidden, V vocabulary, P parameters, M slots that predict.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import torch

from dflash_core.config import PipelineConfig, devices_of
from dflash_core.decoding import Room
from dflash_core.drafter import DFlashConfig, DFlashDrafter
from dflash_core.drafter.attention import SCORE_GRADIENT_BYTES, attention_kind
from dflash_core.drafter.layers import DENSE_GROUP
from dflash_core.evaluation.during import ROWS
from dflash_core.evaluation.ways import further_ways
from dflash_core.shards import TEACHER_COLUMNS
from dflash_core.shards.columns import feature_columns
from dflash_core.shards.fp8 import SCALES
from dflash_core.target import TargetInfo, loaded_bytes, static_cache_bytes
from dflash_core.training.flat import FlatLayout
from dflash_core.training.gradients import AddedGradients, HandedGradients
from dflash_core.training.optimizer import Moments, splits_masters
from dflash_core.training.replica import compute_dtype
from dflash_core.training.staging import SLOTS
from dflash_core.training.sync import Tail

RESERVED = 1.15
_META = torch.device("meta")


class Ledger:
    """Bytes by device and what takes them."""

    def __init__(self) -> None:
        self.parts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, device: str, what: str, size: int) -> Ledger:
        """Further bytes of a part; of a target that is spread over several devices each has as much. Returns self."""
        places = devices_of("cuda:0" if device == "cuda" else device)
        for place in places if size else ():
            self.parts[place][what] += size // len(places)
        return self

    def needed(self) -> dict[str, int]:
        """What each device must have."""
        return {device: round(parts.total() * (1.0 if device == "cpu" else RESERVED)) for device, parts in self.parts.items()}


class Sizes:
    """Of one configuration with its target."""

    def __init__(self, config: PipelineConfig, info: TargetInfo):
        self.config, self.info = config, info
        self.drafter = DFlashConfig.from_target(info, config.drafter)
        self._loaded: dict[str, int] = {}

    def target(self, dtype: str) -> int:
        """The whole target as it is loaded in a precision."""
        if dtype not in self._loaded:
            self._loaded[dtype] = loaded_bytes(Path(self.info.path), _size(dtype))
        return self._loaded[dtype]

    def a_pass(self, tokens: int, dtype: str, taps: int = 0) -> int:
        """What one pass of the target over so many tokens takes: residual and normed states, queries, gate and up, and what is tapped."""
        info = self.info
        return (
            tokens * (2 * info.hidden_size + 3 * info.num_heads * info.head_dim + 3 * info.intermediate_size + taps * info.hidden_size) * _size(dtype)
        )

    def decoding(self, room: Room, dtype: str, *, drafters: int) -> int:
        """Target, drafters and all that decoding has room for, on its device."""
        element = _size(dtype)
        weights = self.target(dtype) + drafters * self.drafter.num_parameters() * element
        logits = 2 * room.rows * room.block_size * self.info.vocab_size * element
        prompts = self.a_pass(room.rows * room.longest_prompt, dtype, len(self.drafter.tap_layers))
        return weights + room.cache_bytes(self.info, self.drafter, element, drafters=drafters) + logits + prompts

    def evaluation(self, longest_prompt: int) -> Ledger:
        """Of the stage 'evaluate', at its largest, with two drafters where the untrained one is measured; the precisions come one after the other."""
        settings, served = self.config.evaluation, self.config.served_dtype
        block, drafters = settings.block_size or self.config.drafter.block_size, 1 if settings.untrained_prompts == 0 else 2
        usual = Room(1, longest_prompt, settings.max_new_tokens, block)
        rooms = [usual, *(Room(way.batch_size, longest_prompt, settings.max_new_tokens, way.block_size) for way in further_ways(settings, block))]
        if served:
            sizes = [self.decoding(usual, settings.dtype, drafters=drafters), *(self.decoding(room, served, drafters=1) for room in rooms)]
        else:
            sizes = [self.decoding(room, settings.dtype, drafters=drafters) for room in rooms]
        return Ledger().add(settings.device, "decoding", max(sizes))

    def responses(self, longest_prompt: int) -> Ledger:
        """Of the stage 'responses': the target, and keys and values of as many rows as generate together."""
        settings, dtype = self.config.data.generation, self.config.target.dtype
        rows = settings.batch_size + 1
        cache = static_cache_bytes(self.info, rows, longest_prompt + settings.max_new_tokens, _size(dtype))
        logits, prompts = rows * self.info.vocab_size * (_size(dtype) + 4), self.a_pass(rows * longest_prompt // 16, dtype)
        return Ledger().add(self.config.target.device, "generation", self.target(dtype) + cache + logits + prompts)

    def shards(self) -> Ledger:
        """Of the stage 'shards': a target on each device, and a pass of each thread."""
        dtype, ledger = self.config.target.dtype, Ledger()
        devices = self.config.extraction.devices or (self.config.target.device,)
        for device in dict.fromkeys(devices):
            ledger.add(device, "target", self.target(dtype))
        a_pass = self.a_pass(self.config.extraction.batch_tokens, dtype, len(self.drafter.tap_layers))
        for device in devices:
            ledger.add(device, "a pass of the target", a_pass * len(devices_of(device)))  # each stage of a spread target has one
        return ledger

    def row(self) -> int:
        """One row of training."""
        return sum(self._of_the_target_in_a_row()) + self._else_in_a_row()

    def _of_the_target_in_a_row(self) -> list[int]:
        """Of each tensor."""
        config = self.config
        columns = feature_columns(config.extraction, len(self.drafter.tap_layers), self.info.hidden_size)
        wanted = {"features", SCALES, *(TEACHER_COLUMNS[config.extraction.teacher] if config.objective.distillation.weight > 0 else ())}
        return [config.training.row_length * column.token_bytes for column in columns if column.name in wanted]

    def _else_in_a_row(self) -> int:
        return 21 * self.config.training.row_length + 8 * self.config.training.num_anchors

    def fed(self, rows: int) -> int:
        """On the host: rows in the queue and those that replicas have taken from it, of the ``rows`` that the run has."""
        training = self.config.training
        queues = len(training.devices) if training.launcher == "torchrun" else 1
        held = min(queues * training.queue_rows + len(training.devices) * training.rows_per_microstep, rows)
        of_the_target = self._of_the_target_in_a_row()
        if training.devices[0] != "cpu":  # live targets keep theirs on a GPU, and torch's pinned memory comes in powers of two
            of_the_target = [1 << (size - 1).bit_length() for size in of_the_target if not self.config.target_devices]
        return held * (sum(of_the_target) + self._else_in_a_row())

    def training(self, longest_prompt: int, rows: int) -> Ledger:
        """Of warm-up and the stage 'train', everything at once, as it is. ``rows``: of the whole run."""
        config, ledger = self.config, Ledger()
        training, first = config.training, config.training.devices[0]
        on_cuda = first != "cpu"
        vocabulary = self._vocabulary(_size(config.target.dtype))
        ledger.add("cpu", "vocabulary on the host", vocabulary)
        for device in dict.fromkeys(training.devices):
            if on_cuda or config.target.dtype != "float32":
                ledger.add(device, "vocabulary", self._vocabulary(_size(training.precision) if on_cuda else 4))
        for index, device in enumerate(training.devices):
            self._add_replica(ledger, index, device)
        ledger.add("cpu", "rows in the feed", self.fed(rows))
        ledger.add("cpu", "checkpoint being written", 16 * self.drafter.num_parameters())
        for device in dict.fromkeys(config.target_devices):
            ledger.add(device, "target", self.target(config.target.dtype))
        for device in config.target_devices:
            ledger.add(device, "a pass of the target", self.a_pass(training.row_length, config.target.dtype, len(self.drafter.tap_layers)))
            if on_cuda:
                buffers = training.queue_rows + len(training.devices) * training.rows_per_microstep
                ledger.add(device, "rows of the target", buffers * training.row_length * self._features_of_a_token())
        if training.evaluation.every_steps:
            self._add_evaluator(ledger, longest_prompt)
        return ledger

    def _add_replica(self, ledger: Ledger, index: int, device: str) -> None:
        training, on_cuda = self.config.training, device != "cpu"
        precision, replicas = compute_dtype(training.precision), len(training.devices)
        sharded = training.sync == "sharded" and replicas > 1
        layout = FlatLayout(self.drafter.tensor_shapes(), replicas if sharded else 1)
        shard, tail = layout.shard(index if sharded else 0), Tail(self.drafter.block_size, replicas).size
        split = splits_masters(training, "cuda" if on_cuda else "cpu")
        moments = Moments(layout, precision, _META, shard=shard, muon=training.optimizer == "muon", split=split)
        ledger.add(device, "weights", moments.weights_P.nbytes)
        ledger.add(device, "masters", moments.kept_P.nbytes if moments.kept_P is not moments.compute_P else 0)
        ledger.add(device, "moments", moments.exp_avg_P.nbytes + moments.exp_avg_sq_P.nbytes)
        model = DFlashDrafter.around(self.drafter, layout.views(moments.weights_P), _META)
        accumulating, handed = training.accumulation_steps > 1, 0
        if on_cuda:
            packed = HandedGradients(
                layout, model, torch.float32 if accumulating else precision, tail, _META, packed=accumulating or replicas > 1, shard=shard
            )
            ledger.add(device, "gradients", 0 if packed.flat_P is None else packed.flat_P.nbytes)
            handed = layout.size * precision.itemsize
        else:
            added = AddedGradients(layout, model, precision, tail, _META, shard=shard)
            ledger.add(device, "gradients", added.buffer.nbytes + (0 if precision == torch.float32 else layout.size * precision.itemsize))
        batch = training.rows_per_microstep * self.row()
        if on_cuda:
            ledger.add(device, "batches", (SLOTS + training.graphs("cuda")) * batch)
            ledger.add("cpu", "rows of the next steps", SLOTS * training.rows_per_microstep * self._else_in_a_row())
        elif training.rows_per_microstep > 1:
            ledger.add(device, "batches", batch)
        # gradients come as what was kept for them goes: at its peak a pass holds the one or the other
        ledger.add(device, "forward and backward pass", max(self.kept(on_cuda) + max(self.loss(on_cuda), self.attention_backward(device)), handed))
        if on_cuda and training.precision == "fp8":
            ledger.add(device, "vocabulary", 2 * self.info.hidden_size * self.info.vocab_size)

    def kept(self, on_cuda: bool) -> int:
        """What the forward pass of the drafter keeps for the backward pass, of all rows of a micro-step."""
        training, drafter = self.config.training, self.drafter
        b, fp8 = compute_dtype(training.precision).itemsize, training.precision == "fp8"
        H, I, L = drafter.hidden_size, drafter.intermediate_size, drafter.num_layers  # noqa: E741
        AD, GD = drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
        T, Q = training.row_length, training.num_anchors * drafter.block_size
        context, weights = 0, 0
        if fp8:  # inputs of the products in one byte, and the transposed weights
            slot = (2 * H + 3 * AD + 3 * GD + 2 * I) * b + 2 * H + AD + I
            weights = drafter.num_parameters() - H * drafter.feature_size
        elif on_cuda:
            slot = (4 * H + 3 * AD + 3 * GD + 3 * I) * b
        else:  # uncompiled, autograd keeps all that SwiGLU makes on its way, and dense attention its mask as numbers and the context for each group
            group = min(max(1, DENSE_GROUP // drafter.block_size) * drafter.block_size, Q)
            slot = (4 * H + 3 * AD + 5 * GD + 4 * I + T + group) * b
            context = 2 * GD * T * -(-Q // group) * b
            # the weights that are joined for one product: of the context's in all layers, and of the blocks' in each layer but the first
            weights = H * (2 * GD * L + (AD + 2 * GD) * (min(1, L - 1) if training.activation_checkpointing else L - 1)) * b
        context += 3 * GD * T * b
        layers = L * Q * H * b + (Q * slot + context) if training.activation_checkpointing else L * (Q * slot + context)
        widened = self.config.extraction.feature_dtype == "fp8" or not on_cuda  # otherwise the drafter reads a batch's own features
        return training.rows_per_microstep * (layers + 2 * T * H * b + widened * T * drafter.feature_size * b) + weights

    def attention_backward(self, device: str) -> int:
        """What the fused kernels write down on their way back, of a layer."""
        training, drafter = self.config.training, self.drafter
        if attention_kind(training.attention, torch.device(device), training.precision, drafter) != "fused":
            return 0
        heads = training.rows_per_microstep * drafter.num_heads
        return min(heads * training.row_length * training.num_anchors * drafter.block_size * 2, SCORE_GRADIENT_BYTES)

    def loss(self, on_cuda: bool) -> int:
        """Logits of a chunk, of drafter and teacher, and the hidden states with their gradients, of all slots of a micro-step."""
        config, H, V = self.config, self.info.hidden_size, self.info.vocab_size
        b = _size(config.training.precision) if on_cuda else 4
        slots = config.training.rows_per_microstep * config.training.num_anchors * config.drafter.block_size
        chunk, distils = min(config.objective.chunk_slots, slots), config.objective.distillation.weight > 0
        logits = chunk * V * b * (2 if distils and config.extraction.teacher == "last_hidden" else 1)
        if not on_cuda and distils:
            logits *= 3  # the reference makes distributions of them beside them
        if on_cuda and config.training.precision == "fp8" and not distils:
            logits += chunk * V
        return logits + 2 * slots * H * b

    def _add_evaluator(self, ledger: Ledger, longest_prompt: int) -> None:
        training, evaluation, during = self.config.training, self.config.evaluation, self.config.training.evaluation
        weights, device = self.drafter.num_parameters(), training.evaluation_device
        ledger.add(training.devices[0], "copy of the weights", weights * _size(training.precision))
        judged_there = device == training.devices[0] and _size(evaluation.dtype) == _size(training.precision)
        room = Room(min(ROWS, during.prompts), longest_prompt, during.max_new_tokens, evaluation.block_size or self.drafter.block_size)
        own = weights * _size(evaluation.dtype) if judged_there else 0
        decoding = self.decoding(room, evaluation.dtype, drafters=1) - own
        feeds = device in self.config.target_devices and evaluation.dtype == self.config.target.dtype
        ledger.add(device, "evaluation", decoding - (self.target(evaluation.dtype) if feeds else 0))

    def _features_of_a_token(self) -> int:
        return len(self.drafter.tap_layers) * self.info.hidden_size * (4 if self.config.extraction.feature_dtype == "float32" else 2)

    def _vocabulary(self, element: int) -> int:
        return self.info.hidden_size * self.info.vocab_size * element * (1 if self.info.tie_word_embeddings else 2)


def _size(precision: str) -> int:
    """Bytes of an element of weights; products in fp8 begin and end in bfloat16."""
    return compute_dtype(precision).itemsize
