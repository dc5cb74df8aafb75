"""The target with a static cache: rows of fixed room that stand at positions of their own, and steps that CUDA graphs replay.

    static = StaticTarget(target, rows=64, capacity=1024)
    first = static.prefill(prompts, rows)                      # logits [P, 1, V] after each prompt
    output = static.step(ids_RS, start_R, tap_layers=(1, 14))  # token s of row r stands at start_R[r] + s

Where a row stands is the caller's to say, at every call. So a row is cropped by a smaller start, emptied by a start of 0, and refilled by another
prompt; what its later slots hold is never looked at, and is overwritten as the row grows. A row that nobody uses may be given any tokens at start 0.
Tokens at or beyond ``capacity`` come to no harm and to no use: their logits mean nothing.

Batched decoding is built on this: the verification of drafted blocks is ``step`` with S = the block size and the tapped layers; keeping the first k
tokens of a block is ``start_R + k``. What is to be captured as a whole (drafting, verification and acceptance in one graph) calls ``forward`` within
``capture``.

The attention of the model's layers is replaced in a copy of the decoder that shares all weights: other users of the same ``TargetModel``, in this
thread or another, are not disturbed. One ``StaticTarget`` serves one thread at a time.

Shapes: R rows, S new tokens of a row, P prompts, T width of the longest, K taps, H hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_core.errors import TargetError
from dflash_core.target.fused import fused
from dflash_core.target.model import TargetModel, TargetOutput
from dflash_core.target.quick import quick
from dflash_core.target.static_attention import attend, attend_plain, store

ATTENTION = "dflash_static"
_DECODABLE = {"full_attention", "sliding_attention"}
_WARM_UPS = 3
_running = threading.local()  # the cache of this thread's pass: a layer hands its attention function nothing of ours


class StaticCache(Cache):
    """Keys and values [rows, G, capacity + 1, D] of each layer, made when the layer first speaks. The last slot takes what has no room.

    Between passes ``start_R`` and ``rows`` are None. ``rows``: the rows that prompts are for; None: the first rows in order, which go on.
    """

    def __init__(self, rows: int, capacity: int):
        super().__init__(layers=[])
        self.room, self.capacity = rows, capacity
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self.attended: set[int] = set()
        self.start_R: Tensor | None = None
        self.rows: Tensor | None = None
        self._starts: dict[torch.device, Tensor] = {}

    def begin(self, start_R: Tensor | None, rows: Tensor | None) -> None:
        """A pass begins, or with None and None ends."""
        self.start_R, self.rows = start_R, rows
        self._starts = {} if start_R is None else {start_R.device: start_R}

    def start_on(self, device: torch.device) -> Tensor:
        """``start_R`` where a layer is."""
        assert self.start_R is not None, "only StaticTarget runs a pass with this cache"
        if device not in self._starts:
            self._starts[device] = self.start_R.to(device)
        return self._starts[device]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take the keys and values [R, G, S, D] of a layer; returns what its attention is to see: the buffers, or those of a prompt themselves."""
        if layer_idx not in self.buffers:
            # Zeros, for what was never written must not be NaN: hidden slots weigh nothing, and nothing times NaN is NaN.
            shapes = ((self.room, x.shape[1], self.capacity + 1, x.shape[3]) for x in (key_states, value_states))
            with torch.inference_mode(False):
                keys, values = (torch.zeros(shape, dtype=key_states.dtype, device=key_states.device) for shape in shapes)
            self.buffers[layer_idx] = keys, values
        keys, values = self.buffers[layer_idx]
        if self.rows is not None:
            rows = self.rows.to(keys.device)
            keys[rows, :, : key_states.shape[2]], values[rows, :, : key_states.shape[2]] = key_states, value_states
            return key_states, value_states
        count = key_states.shape[0]
        keys, values = keys[:count], values[:count]
        store(key_states, value_states, keys, values, self.start_on(keys.device))
        return keys, values


def _static_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, *,
    scaling: float | None = None, softcap: float | None = None, sliding_window: int | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention of a layer in a pass of ``StaticTarget``, as Transformers calls it: query [R, A, S, D] in, [R, S, A, D] out."""
    cache: StaticCache = _running.cache
    cache.attended.add(module.layer_idx)
    settings: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "window": sliding_window or None,
        "softcap": softcap,
        "sinks_A": s_aux,
    }
    start_R = cache.start_on(query.device)
    if cache.rows is None:
        return attend(query, key, value, start_R, **settings), None
    width = query.shape[2]
    if softcap is None and s_aux is None and (settings["window"] is None or settings["window"] >= width):
        return sdpa_attention_forward(module, query, key, value, None, scaling=settings["scale"], is_causal=True)
    return attend_plain(query, key, value, start_R, live=width, **settings), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _static_attention)  # without a mask function of that name, Transformers makes no masks


class _Graph(NamedTuple):
    ids: Tensor
    start: Tensor
    output: TargetOutput
    replay: Callable[[], None]


class StaticTarget:
    """A target and the caches of ``rows`` sequences of up to ``capacity`` tokens each."""

    def __init__(self, target: TargetModel, rows: int, capacity: int, *, graphs: bool = True):
        """
        Args:
            graphs: on CUDA, capture ``step`` for each shape when it is first asked for. Without effect elsewhere, and on targets that ask the
                device while they run (mixtures of experts, rotary frequencies that depend on the length) or are spread over several.

        Raises:
            TargetError: the target has recurrent or chunked layers, layers that share keys, or attention that cannot be replaced.
        """
        self.target, self.rows, self.capacity = target, rows, capacity
        self._decoder = _own_decoder(target)
        self._cache = StaticCache(rows, capacity)
        self.graphs = graphs and target.device.type == "cuda" and len(target.devices) == 1 and not _asks_device(target)
        self._pool: Any = None
        self._stream = torch.cuda.Stream(target.device) if self.graphs else None
        self._captured: dict[tuple[int, int, tuple[int, ...]], _Graph] = {}
        self._check()

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self.target.device

    def step(self, ids_RS: Tensor, start_R: Tensor, tap_layers: Sequence[int] | None = None) -> TargetOutput:
        """Run S more tokens of each of the first R rows.

        Args:
            ids_RS: int64 token ids on the target's device; R at most ``rows``.
            start_R: int64 positions of the first of them, on the target's device.
            tap_layers: layers whose outputs are wanted too.

        Returns:
            logits [R, S, V] and features [R, S, K*H] or None. Of a replayed graph they are the same tensors each time: use or copy them before
            the next step of this shape.
        """
        if not self.graphs:
            return self.forward(ids_RS, start_R, tap_layers)
        key = (*ids_RS.shape, tuple(tap_layers or ()))
        graph = self._captured.get(key)
        if graph is None:
            graph = self._captured[key] = self._graph(ids_RS, start_R, tap_layers)
        graph.ids.copy_(ids_RS)
        graph.start.copy_(start_R)
        graph.replay()
        return graph.output

    @torch.no_grad()
    def forward(self, ids_RS: Tensor, start_R: Tensor, tap_layers: Sequence[int] | None = None) -> TargetOutput:
        """``step`` without a graph: new tensors each time, and fit to be part of what ``capture`` captures."""
        positions_RS = start_R[:, None] + torch.arange(ids_RS.shape[1], device=start_R.device)
        with self._pass(start_R, None):
            hidden, features = self._decode(ids_RS, positions_RS, tap_layers)
        return TargetOutput(self.target.vocabulary.logits(hidden), features)

    @torch.no_grad()
    def prefill(self, ids_PT: Tensor, lengths_P: Tensor, rows_P: Tensor, tap_layers: Sequence[int] | None = None) -> TargetOutput:
        """Fill rows with prompts, from position 0. The next token of row ``rows_P[p]`` then stands at ``lengths_P[p]``.

        Args:
            ids_PT: token ids, shorter prompts padded on the right with any ids; T at most ``capacity``.
            lengths_P: tokens of each prompt.
            rows_P: the rows they are for, all different. (A row given twice holds either prompt, or a mixture: fit only for rows that nobody uses.)

        Returns:
            logits [P, 1, V] after the last token of each prompt, and features [P, T, K*H] or None, of no meaning at the padding.
        """
        prompts, width = ids_PT.shape
        if width > self.capacity:
            raise ValueError(f"prompts of {width} tokens do not fit into rows of {self.capacity}")
        positions_1T = torch.arange(width, device=ids_PT.device)[None]
        with self._pass(torch.zeros_like(lengths_P), rows_P):
            hidden, features = self._decode(ids_PT, positions_1T.expand(prompts, -1), tap_layers)
        last = hidden[torch.arange(prompts, device=hidden.device), lengths_P - 1]
        return TargetOutput(self.target.vocabulary.logits(last)[:, None], features)

    def move(self, rows: Tensor) -> None:
        """Row ``rows[i]`` (int64 [N], all different) becomes row i; what the first N rows held is gone."""
        for buffer in itertools.chain.from_iterable(self._cache.buffers.values()):
            buffer[: len(rows)] = buffer[rows.to(buffer.device)]

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """What runs ``function`` again: a replayed graph where ``graphs`` hold, else ``function`` itself.

        It may call ``forward`` and whatever else does not wait for the device; it reads its inputs from, and leaves its results in, tensors that
        stay. It is run some times to warm up, on whatever those tensors hold then.
        """
        if self._stream is None:
            return function
        device = self.target.device
        with torch.cuda.device(device):
            self._stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    function()
            torch.cuda.current_stream(device).wait_stream(self._stream)
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            # "thread_local": only calls of this thread can break the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                function()
        return graph.replay

    def _graph(self, ids_RS: Tensor, start_R: Tensor, tap_layers: Sequence[int] | None) -> _Graph:
        outputs: list[TargetOutput] = []
        with torch.inference_mode(False), torch.no_grad():
            ids, start = ids_RS.clone(), start_R.clone()
            replay = self.capture(lambda: outputs.append(self.forward(ids, start, tap_layers)))
        return _Graph(ids, start, outputs[-1], replay)

    def _decode(self, ids: Tensor, positions: Tensor, tap_layers: Sequence[int] | None) -> tuple[Tensor, Tensor | None]:
        """Hidden states after the final norm, and features."""
        arguments = {self.target.cache_keyword: self._cache, "position_ids": positions, "use_cache": True}
        with self.target.pass_through(tap_layers or ()) as taps:
            hidden = self._decoder(input_ids=ids, **arguments).last_hidden_state.to(self.device)
        return hidden, torch.cat([taps[layer] for layer in tap_layers], dim=-1).to(self.device) if tap_layers else None

    @contextlib.contextmanager
    def _pass(self, start_R: Tensor, rows: Tensor | None) -> Iterator[None]:
        self._cache.begin(start_R, rows)
        outer, _running.cache = getattr(_running, "cache", None), self._cache
        try:
            yield
        finally:
            self._cache.begin(None, None)
            _running.cache = outer

    def _check(self) -> None:
        """Run two tokens: makes the buffers, and shows whether every layer keeps its keys here and attends as it is told to."""
        ids_R2 = torch.ones((1, 2), dtype=torch.int64, device=self.target.device)
        self.forward(ids_R2, torch.zeros_like(ids_R2[:, 0]))
        wanted = set(range(self.target.info.num_layers))
        if set(self._cache.buffers) != wanted or self._cache.attended != wanted:
            raise _refused(
                self.target,
                f"layers {sorted(wanted - set(self._cache.buffers))} keep no keys of their own, or the attention of layers "
                f"{sorted(wanted - self._cache.attended)} is not called through Transformers' AttentionInterface",
            )
        if any(keys.shape != values.shape for keys, values in self._cache.buffers.values()):
            raise _refused(self.target, "its keys and values differ in size")


def _own_decoder(target: TargetModel) -> Any:
    """A copy of the decoder with the same weights and a configuration of its own, which names our attention.

    Norms and gates are fused on CUDA, products are quick on a CPU.
    """
    decoder: Any = target.decoder
    kinds = set(getattr(decoder.config, "layer_types", None) or ())
    if kinds - _DECODABLE:
        raise _refused(target, f"it has layers of the kind {', '.join(sorted(kinds - _DECODABLE))}")
    if getattr(decoder.config, "num_kv_shared_layers", 0):
        raise _refused(target, "some of its layers use the keys of others")
    tensors = itertools.chain(decoder.parameters(), decoder.buffers())
    own = copy.deepcopy(decoder, {id(tensor): tensor for tensor in tensors})
    own.config._attn_implementation = ATTENTION
    for module in list(own.modules()):
        for name, child in module.named_children():
            if (fast := fused(child) or quick(child)) is not None:
                module._modules[name] = fast
    return own


def _asks_device(target: TargetModel) -> bool:
    """Whether a pass reads values from the device, which no graph can hold."""
    config: Any = target.decoder.config
    experts = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return bool(experts) or str(target.info.rope_parameters.get("rope_type", "default")) in ("dynamic", "longrope")


def _refused(target: TargetModel, reason: str) -> TargetError:
    return TargetError(
        f"{target.info.name} ({target.info.model_type}) cannot be decoded with a static cache: {reason}. "
        "Supported are targets all of whose layers are full or sliding attention."
    )
