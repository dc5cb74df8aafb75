"""Products of a few rows with a large weight on a CPU, which is what decoding consists of: with the weight packed by oneDNN where that is faster.

    linear = QuickLinear(weight)     # functional.linear(x, weight) but for the last bits

``functional.linear`` brings a weight into the order its kernel wants at every call, which for a few rows is most of the work: of two rows and
more, the head of SmolLM2-135M takes half the time packed, in float32 on an AVX2 processor. Its smaller weights gain little there and lose at
one row, and other processors and precisions are different again. So both are timed once for a shape and a power of two of rows, on weights that
no cache holds, as those of a model are read. The choice holds for the process: for the target alone as for the target that verifies.

Shapes: S rows, K inputs, N outputs.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash_core.target.device import free_memory, total_memory

_LEAST_BYTES = 1 << 17  # of a weight: below that, calls cost more than products
_MOST_ROWS = 16
_CACHE_BYTES = 48 << 20  # more than a core's share of the last cache
_CALLS = 12
_WORTH_PACKING = 0.9  # of the time of a plain product: a packed weight takes memory beside the plain one

_packing: dict[tuple[object, ...], bool] = {}
_lock = threading.Lock()


class QuickLinear(nn.Module):
    """Stands for a linear layer on a CPU whose weight [N, K] and bias are not written into any more."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._packable = _can_pack(weight)
        self._packed: Tensor | None = None
        self._pays: dict[int, bool] = {}  # by rows

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        rows = x.numel() // self.in_features
        if not self._packable or not 0 < rows <= _MOST_ROWS or torch.is_grad_enabled():
            return functional.linear(x, self.weight, self.bias)
        if rows not in self._pays:
            self._pays[rows] = packing_pays(self.out_features, self.in_features, 1 << (rows - 1).bit_length(), self.weight.dtype)
        if not self._pays[rows]:
            return functional.linear(x, self.weight, self.bias)
        if self._packed is None:
            if not _has_room_for(self.weight):
                self._packable = False
                return functional.linear(x, self.weight, self.bias)
            self._packed = pack(self.weight)
        return packed_product(x, self._packed, self.bias)


def quick(module: nn.Module) -> nn.Module | None:
    """A ``QuickLinear`` for a plain linear layer on a CPU that can be packed; None for anything else, and where others have hooks on it."""
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks or not _can_pack(module.weight):
        return None
    return QuickLinear(module.weight, module.bias)


def pack(weight_NK: Tensor) -> Tensor:
    """The weight in the order in which oneDNN reads it, for any number of rows."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK, None)
    return packed


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """``functional.linear`` with a packed weight."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


def packing_pays(N: int, K: int, rows: int, dtype: torch.dtype) -> bool:
    """Whether a product of so many rows with a packed weight [N, K] is so much faster that the memory is worth it, on this machine."""
    key = (N, K, rows, dtype, torch.get_num_threads())
    with _lock:
        if key not in _packing:
            times = time_products(N, K, rows, dtype)
            _packing[key] = times["packed"] < _WORTH_PACKING * times["plain"]
        return _packing[key]


@torch.inference_mode()
def time_products(N: int, K: int, rows: int, dtype: torch.dtype) -> dict[str, float]:
    """Median seconds of the two products with weights [N, K] that lie in memory and in no cache."""
    copies = min(64, -(-_CACHE_BYTES // (N * K * dtype.itemsize)))
    weights = [torch.ones(N, K, dtype=dtype) for _ in range(copies)]
    x_SK = torch.ones(rows, K, dtype=dtype)
    products: dict[str, list[Callable[[], Tensor]]] = {
        "plain": [lambda weight=weight: functional.linear(x_SK, weight) for weight in weights],  # type: ignore[misc]
        "packed": [lambda packed=packed: packed_product(x_SK, packed) for packed in map(pack, weights)],  # type: ignore[misc]
    }
    return {name: _median_seconds(calls) for name, calls in products.items()}


def _median_seconds(calls: list[Callable[[], Tensor]]) -> float:
    """Of the time that this thread ran, so that whatever else the machine does counts less."""
    calls[0]()
    seconds = []
    for call in itertools.islice(itertools.cycle(calls[::-1]), _CALLS if len(calls) > 1 else _CALLS // 4):
        began = time.thread_time()
        call()
        seconds.append(time.thread_time() - began)
    return statistics.median(seconds)


def _has_room_for(weight: Tensor) -> bool:
    """Whether a packed weight beside the plain one leaves an eighth of the memory free."""
    return free_memory("cpu") - weight.numel() * weight.dtype.itemsize > total_memory("cpu") // 8


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.numel() * weight.dtype.itemsize < _LEAST_BYTES or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
