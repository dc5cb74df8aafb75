"""Products with packed weights on a CPU: the same numbers, and only where they may be and pay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash_core.target import quick as module
from dflash_core.target.quick import QuickLinear, packing_pays, quick

N, K = 384, 256


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the products that were made with a packed weight, which here pays for any number but one."""
    rows: list[int] = []
    product = module.packed_product

    def counted(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        rows.append(x.shape[:-1].numel())
        return product(x, packed, bias)

    monkeypatch.setattr(module, "packed_product", counted)
    monkeypatch.setattr(module, "packing_pays", lambda _N, _K, rows, _dtype: rows > 1)
    return rows


def linear(bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(K, N, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2,), (1, 5), (2, 8)])
def test_a_packed_product_is_the_linear_layer_up_to_the_last_bits(bias: bool, shape: tuple[int, ...], packs: list[int]) -> None:
    layer, x = linear(bias), torch.randn(*shape, K)
    with torch.inference_mode():
        fast = quick(layer)
        assert fast is not None
        torch.testing.assert_close(fast(x), layer(x), rtol=1e-5, atol=1e-5)
    assert packs == [torch.Size(shape).numel()]


def test_where_packing_does_not_pay_or_a_gradient_may_be_wanted_the_product_is_the_plain_one(packs: list[int]) -> None:
    layer = linear()
    fast = QuickLinear(layer.weight)
    with torch.inference_mode():
        for rows in (1, 17):
            x = torch.randn(rows, K)
            assert torch.equal(fast(x), layer(x))
    x = torch.randn(4, K, requires_grad=True)
    (found,) = torch.autograd.grad(fast(x).square().sum(), x)
    (wanted,) = torch.autograd.grad(layer(x).square().sum(), x)
    assert torch.equal(found, wanted)
    assert packs == []


def test_nothing_is_packed_where_memory_is_short(packs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = linear(), torch.randn(4, K)
    monkeypatch.setattr(module, "total_memory", lambda _: 8000 * N * K)
    monkeypatch.setattr(module, "free_memory", lambda _: 1004 * N * K)
    with torch.inference_mode():
        full = QuickLinear(layer.weight)
        assert torch.equal(full(x), layer(x))
        monkeypatch.setattr(module, "free_memory", lambda _: 1005 * N * K)
        assert torch.equal(full(x), layer(x)), "what was found wanting once stays as it is"
        QuickLinear(layer.weight)(x)
    assert packs == [4]


def test_only_plain_linear_layers_with_a_large_weight_are_replaced() -> None:
    class Quantised(nn.Linear):
        pass

    hooked = linear()
    hooked.register_forward_hook(lambda *_: None)
    assert all(quick(part) is None for part in (hooked, Quantised(K, N), nn.Linear(16, 16), nn.LayerNorm(K), nn.Linear(K, N).half()))


def test_both_products_are_timed_once_for_a_shape_and_the_faster_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def timed(_N: int, _K: int, rows: int, _dtype: torch.dtype) -> dict[str, float]:
        asked.append(rows)
        return {"plain": 1.0, "packed": 0.5 if rows == 4 else 0.95}

    monkeypatch.setattr(module, "_packing", {})
    monkeypatch.setattr(module, "time_products", timed)
    assert [packing_pays(N, K, rows, torch.float32) for rows in (4, 8, 4, 8)] == [True, False, True, False]
    assert asked == [4, 8]


def test_the_real_timing_has_a_figure_for_each_product() -> None:
    times = module.time_products(64, 512, 2, torch.float32)
    assert set(times) == {"plain", "packed"}
    x, weight = torch.randn(2, K), torch.randn(N, K)
    torch.testing.assert_close(module.packed_product(x, module.pack(weight)), functional.linear(x, weight), rtol=1e-4, atol=1e-4)
