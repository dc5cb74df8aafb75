"""The Triton kernel, in the interpreter on any machine and for real on a GPU."""

from __future__ import annotations

import pytest
import torch

from dflash_core.drafter import IGNORE
from dflash_core.objective import cross_entropy, linear_cross_entropy
from dflash_core.objective.reference import reference_linear_cross_entropy
from tests.forks import Forks

pytest.importorskip("triton")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_interpreted_kernel_equals_its_twin_in_values_gradients_and_hits(interpreter: Forks) -> None:
    interpreter.run_module("tests.objective.interpreted_kernel")


@pytest.mark.parametrize("softcap", [False, True])
def test_kernel_compiles_for_hopper_with_wide_loads_and_no_spills(softcap):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dflash_core.objective import softmax_kernel

    pointers = {"logits_ptr": "*bf16", "exponentials_ptr": "*bf16", "labels_ptr": "*i64", "nll_ptr": "*fp32", "hit_ptr": "*i1"}
    pointers |= {"scale_ptr": "*fp32", "at_label_ptr": "*fp32"}
    numbers = {"logits_stride": "i32", "exponentials_stride": "i32", "softcap": "fp32"}
    constants = {
        "VOCABULARY": 151_936,
        "HAS_SOFTCAP": softcap,
        "WANT_GRADIENT": True,
        "BLOCK": softmax_kernel.BLOCK,
    }
    signature = pointers | numbers | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers) + 2)}  # as the launcher finds for rows of a multiple of 16
    source = ASTSource(fn=softmax_kernel._exponentials_kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": softmax_kernel.NUM_WARPS})
    assert "ld.global.v4.b32" in compiled.asm["ptx"]  # 16 bytes a thread
    assert compiled.metadata.shared < 100_000


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize(("slots", "vocabulary"), [(300, 151_936), (65, 32_003)])
def test_kernel_on_the_gpu_equals_its_twin(softcap, slots, vocabulary):
    from dflash_core.objective.softmax import Softmax
    from dflash_core.objective.softmax_kernel import softmax_triton_

    generator = torch.Generator("cuda").manual_seed(slots)
    logits = (4 * torch.randn(slots, vocabulary, device="cuda", generator=generator)).bfloat16()
    logits[3] += torch.arange(vocabulary, device="cuda") // 4096 * 20  # rises by far more than the headroom
    labels = torch.randint(0, vocabulary, (slots,), device="cuda", generator=generator)
    labels[::2] = logits[::2].max(dim=1).indices
    labels[1] = IGNORE
    twin = logits.float()
    expected, found = Softmax.empty(labels), Softmax.empty(labels)
    cross_entropy._softmax_torch_(twin, labels, expected, softcap, True)
    softmax_triton_(logits, labels, found, softcap, True)
    torch.testing.assert_close(found.nll, expected.nll, rtol=1e-4, atol=1e-4)
    assert (found.hit != expected.hit).sum() <= slots // 20  # equal bfloat16 logits: which of them max() names is open on CUDA
    labelled = labels >= 0
    torch.testing.assert_close(found.at_label[labelled], expected.at_label[labelled], rtol=1e-3, atol=1e-6)
    exact = (twin * expected.scale[:, None])[labelled]
    assert ((logits.float() * found.scale[:, None])[labelled] - exact).norm() < 4e-3 * exact.norm()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("bounded", [True, False])
def test_cross_entropy_on_the_gpu_equals_the_float64_reference(bounded):
    generator = torch.Generator("cuda").manual_seed(3)
    hidden = torch.randn(700, 512, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = (0.05 * torch.randn(32_000, 512, device="cuda", generator=generator)).bfloat16()
    labels = torch.randint(0, 32_000, (700,), device="cuda", generator=generator)
    labels[::5] = IGNORE
    weights = torch.rand(700, device="cuda", generator=generator)
    losses = linear_cross_entropy(hidden, weight, labels, chunk_slots=256, max_labelled=600 if bounded else None)
    (gradient,) = torch.autograd.grad((losses.nll * weights).sum(), hidden)
    twin_hidden = hidden.detach().double().requires_grad_()
    twin = reference_linear_cross_entropy(twin_hidden, weight.double(), labels)
    (twin_gradient,) = torch.autograd.grad((twin.nll * weights).sum(), twin_hidden)
    torch.testing.assert_close(losses.nll.double(), twin.nll, rtol=1e-3, atol=2e-2)  # logits are rounded to bfloat16
    assert (losses.nll.double() - twin.nll).norm() < 1e-3 * twin.nll.norm()
    assert (gradient.double() - twin_gradient).norm() < 1e-2 * twin_gradient.norm()
    assert not gradient[labels < 0].any()


@pytest.mark.gpu
@needs_cuda
def test_with_a_bound_nothing_waits_for_the_device():
    hidden = torch.randn(64, 128, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(1000, 128, device="cuda").bfloat16()
    labels = torch.randint(0, 1000, (64,), device="cuda")
    linear_cross_entropy(hidden, weight, labels, chunk_slots=32, max_labelled=60).nll.sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy(hidden, weight, labels, chunk_slots=32, max_labelled=60).nll.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
