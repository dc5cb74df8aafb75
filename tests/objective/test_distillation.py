"""Cross-entropy mixed with distillation against its plain twin: values, gradients, weights and the corners."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_core.config import ObjectiveConfig
from dflash_core.drafter import IGNORE
from dflash_core.objective import DistilledLosses, TopK, distilled_cross_entropy, linear_cross_entropy, slot_weights
from dflash_core.objective.reference import reference_distilled_cross_entropy
from tests.forks import Forks
from tests.objective.test_cross_entropy import problem

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def teacher_for(hidden_MH: Tensor, seed: int = 1) -> Tensor:
    return torch.randn(hidden_MH.shape, generator=torch.Generator().manual_seed(seed), dtype=hidden_MH.dtype)


def assert_same(actual: DistilledLosses, expected: DistilledLosses, hidden_MH: Tensor, weights_M: Tensor, tolerance: float = 1e-5) -> None:
    for name in ("loss", "nll", "probability", "divergence"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=tolerance, atol=tolerance, msg=lambda text, n=name: n + text)
    assert torch.equal(actual.hit, expected.hit)
    gradients = [torch.autograd.grad((losses.loss * weights_M).sum(), hidden_MH)[0] for losses in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance)


@settings(max_examples=40, deadline=None)
@given(
    slots=st.integers(1, 33),
    hidden=st.integers(1, 9),
    vocabulary=st.integers(1, 40),
    chunk=st.integers(1, 40),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    softcap=st.sampled_from([None, 0.7, 30.0]),
    likeliest=st.sampled_from([None, 1, 5]),
    unlabelled=st.sampled_from([0.0, 0.3, 1.0]),
    bounded=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_values_and_gradients_equal_the_plain_twin(
    slots, hidden, vocabulary, chunk, share, temperature, softcap, likeliest, unlabelled, bounded, seed
):
    hidden_MH, weight_VH, labels_M, weights_M = problem(slots, hidden, vocabulary, seed, unlabelled)
    teacher = teacher_for(hidden_MH, seed)
    if likeliest is not None:
        logprobs, ids = (teacher @ weight_VH.T).log_softmax(1).topk(min(likeliest, vocabulary))
        teacher = TopK(ids.int(), logprobs)
    bound = max(1, int((labels_M >= 0).sum())) + seed % 3 if bounded else None
    mixture = {"share": share, "temperature": temperature, "softcap": softcap}
    actual = distilled_cross_entropy(hidden_MH, weight_VH, labels_M, teacher, chunk_slots=chunk, max_labelled=bound, **mixture)
    expected = reference_distilled_cross_entropy(hidden_MH, weight_VH, labels_M, teacher, **mixture)
    assert_same(actual, expected, hidden_MH, weights_M)


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
def test_gradients_under_the_weights_of_a_block_equal_the_plain_twin(weighting: str) -> None:
    hidden_MH, weight_VH, labels_M, _ = problem(24, 8, 31, unlabelled=0.0)
    labels_M[5:8] = labels_M[::8] = IGNORE
    objective, teacher_MH = ObjectiveConfig(weighting=weighting), teacher_for(hidden_MH)
    results = []
    for losses in (
        distilled_cross_entropy(hidden_MH, weight_VH, labels_M, teacher_MH, share=0.6, temperature=1.5, chunk_slots=7),
        reference_distilled_cross_entropy(hidden_MH, weight_VH, labels_M, teacher_MH, share=0.6, temperature=1.5),
    ):
        weights, denominator = slot_weights(objective, labels_M.view(1, 3, 8), losses.probability.view(1, 3, 8))
        loss = (weights.flatten() * losses.loss).sum() / denominator
        results.append((loss, torch.autograd.grad(loss, hidden_MH)[0]))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_without_a_share_it_is_the_cross_entropy_and_with_all_the_label_does_not_matter() -> None:
    hidden_MH, weight_VH, labels_M, weights_M = problem(16, 8, 31)
    teacher_MH = teacher_for(hidden_MH)
    none = distilled_cross_entropy(hidden_MH, weight_VH, labels_M, teacher_MH, share=0.0, temperature=1.0, chunk_slots=5)
    plain = linear_cross_entropy(hidden_MH, weight_VH, labels_M, chunk_slots=5)
    gradients = [torch.autograd.grad((loss * weights_M).sum(), hidden_MH)[0] for loss in (none.loss, plain.nll)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    others_M = torch.where(labels_M >= 0, (labels_M + 1) % 31, labels_M)
    whole = [
        distilled_cross_entropy(hidden_MH, weight_VH, labels, teacher_MH, share=1.0, temperature=1.0, chunk_slots=5).loss
        for labels in (labels_M, others_M)
    ]
    assert torch.equal(*whole)


def test_a_drafter_that_says_what_the_target_says_has_no_divergence_and_no_gradient() -> None:
    hidden_MH, weight_VH, labels_M, weights_M = problem(16, 8, 31, unlabelled=0.0)
    losses = distilled_cross_entropy(hidden_MH, weight_VH, labels_M, hidden_MH.detach(), share=1.0, temperature=2.0, chunk_slots=5)
    torch.testing.assert_close(losses.divergence, torch.zeros(16), atol=1e-6, rtol=0)
    (gradient_MH,) = torch.autograd.grad((losses.loss * weights_M).sum(), hidden_MH)
    torch.testing.assert_close(gradient_MH, torch.zeros(16, 8), atol=1e-6, rtol=0)


def test_no_more_than_two_chunks_of_logits_and_what_a_softmax_of_them_takes_are_alive() -> None:
    hidden_MH, weight_VH, labels_M, _ = problem(64, 8, 5000, unlabelled=0.0)
    shapes: set[tuple[int, ...]] = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            shapes.update(tuple(value.shape) for value in (out if isinstance(out, tuple) else (out,)) if isinstance(value, Tensor))
            return out

    with Watch():
        losses = distilled_cross_entropy(hidden_MH, weight_VH, labels_M, teacher_for(hidden_MH), share=0.5, temperature=1.0, chunk_slots=4)
        losses.loss.sum().backward()
    assert max(shape[0] for shape in shapes if len(shape) == 2 and shape[1] == 5000 and shape != (8, 5000)) == 4  # that one is the head


def test_the_likeliest_tokens_are_the_whole_teacher_where_they_are_all_tokens() -> None:
    hidden_MH, weight_VH, labels_M, weights_M = problem(16, 8, 31)
    teacher_MH = teacher_for(hidden_MH)
    logprobs, ids = (teacher_MH @ weight_VH.T).log_softmax(1).topk(31)
    whole, listed = (
        distilled_cross_entropy(hidden_MH, weight_VH, labels_M, teacher, share=0.7, temperature=2.0, chunk_slots=5)
        for teacher in (teacher_MH, TopK(ids, logprobs))
    )
    assert_same(listed, whole, hidden_MH, weights_M)


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden_MH, weight_VH, labels_M, _ = problem(6, 4, 9)
    with pytest.raises(ValueError, match=r"and teacher \[M, H\], or two"):
        distilled_cross_entropy(hidden_MH, weight_VH, labels_M, torch.zeros(5, 4), share=0.5, temperature=1.0, chunk_slots=4)
    with pytest.raises(ValueError, match="must be at least 1"):
        distilled_cross_entropy(hidden_MH, weight_VH, labels_M, hidden_MH, share=0.5, temperature=1.0, chunk_slots=0)


def test_interpreted_kernel_equals_its_twin(interpreter: Forks) -> None:
    interpreter.run_module("tests.objective.interpreted_distillation")


@pytest.mark.parametrize(("softcap", "teacher"), [(False, True), (True, True), (False, False)])
def test_kernel_compiles_for_hopper_with_wide_loads(softcap: bool, teacher: bool) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dflash_core.objective import distillation_kernel as kernel

    pointers = {"logits_ptr": "*bf16", "teacher_ptr": "*bf16", "labels_ptr": "*i64", "nll_ptr": "*fp32", "hit_ptr": "*i1", "divergence_ptr": "*fp32"}
    numbers = {"logits_stride": "i32", "teacher_stride": "i32", **dict.fromkeys(("softcap", "hard", "soft", "coldness"), "fp32")}
    constants = {"VOCABULARY": 151_936, "HAS_SOFTCAP": softcap, "HAS_TEACHER": teacher, "WANT_GRADIENT": True, "BLOCK": kernel.BLOCK}
    signature = pointers | numbers | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers) + 2)}  # as the launcher finds for rows of a multiple of 16
    source = ASTSource(fn=kernel._mixture_kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernel.NUM_WARPS})
    assert "ld.global.v4.b32" in compiled.asm["ptx"]  # 16 bytes a thread
    assert compiled.metadata.shared < 100_000


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_on_a_gpu_values_and_gradients_equal_the_plain_twin(precision: str) -> None:
    dtype = getattr(torch, precision)
    hidden_MH, weight_VH, labels_M, weights_M = (value.detach().cuda() for value in problem(300, 64, 5003))
    teacher_MH = torch.randn_like(hidden_MH)
    hidden_MH, weight_VH, teacher_MH = (hidden_MH * 0.3).to(dtype).requires_grad_(), weight_VH.to(dtype), (teacher_MH * 0.3).to(dtype)
    actual = distilled_cross_entropy(hidden_MH, weight_VH, labels_M, teacher_MH, share=0.5, temperature=2.0, chunk_slots=128, max_labelled=300)
    exact_MH = hidden_MH.detach().float().requires_grad_()
    expected = reference_distilled_cross_entropy(exact_MH, weight_VH, labels_M, teacher_MH, share=0.5, temperature=2.0)
    tolerance = 2e-2 if precision == "bfloat16" else 2e-3
    torch.testing.assert_close(actual.loss, expected.loss, rtol=tolerance, atol=tolerance)
    (gradient,), (twin,) = (torch.autograd.grad((losses.loss * weights_M).sum(), x) for losses, x in ((actual, hidden_MH), (expected, exact_MH)))
    assert torch.nn.functional.cosine_similarity(gradient.float().flatten(), twin.flatten(), dim=0) > 0.999
