"""Fused norms and gates: in Triton's interpreter on any machine, compiled for a GPU that is not there, and for real on one that is."""

from __future__ import annotations

import pytest
import torch

from dflash_core.target.fused import FusedGatedMLP, FusedRMSNorm, fused
from tests.forks import Forks
from tests.target.tiny import tiny_model

pytest.importorskip("triton")


def test_interpreted_kernels_give_what_the_modules_of_the_target_give(interpreter: Forks) -> None:
    interpreter.run_module("tests.target.interpreted_fused")


@pytest.mark.parametrize("size", [4096, 128])
def test_norms_and_turns_compile_for_hopper_with_wide_loads(size: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dflash_core.target.fused_kernel import ELEMENTS, _norm_rope_kernel, _rms_norm_kernel

    numbers = {"rows": "i32", "width": "i32", "heads": "i32", "stride": "i32", "eps": "fp32", "offset": "fp32"}
    shared = {"ROWS": max(1, ELEMENTS // size), "ROUND_FIRST": True}
    kernel, own = (_rms_norm_kernel, {"WIDTH": size}) if size == 4096 else (_norm_rope_kernel, {"HALF": size // 2, "NORM": True})
    constants = shared | own
    signature = {name: "constexpr" if name in constants else numbers.get(name, "*bf16") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind == "*bf16"}
    aligned[(4 if size == 4096 else 6,)] = [["tt.divisibility", 16]]  # the width of a row, the way from token to token
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8 if size == 4096 else 4})
    assert "ld.global.v4.b32" in compiled.asm["ptx"]


def test_nothing_is_fused_on_a_processor() -> None:
    layer = tiny_model("llama").get_decoder().layers[0]
    assert fused(layer.input_layernorm) is None
    assert fused(layer.mlp) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("family", "offset", "round_first"), [("llama", 0.0, True), ("gpt_oss", 0.0, False), ("gemma2", 1.0, False)])
def test_on_the_gpu_the_rounding_of_each_family_is_found(family: str, offset: float, round_first: bool) -> None:
    layer = tiny_model(family).to("cuda", torch.bfloat16).get_decoder().layers[0]
    norm = fused(layer.input_layernorm)
    assert isinstance(norm, FusedRMSNorm)
    assert (norm.offset, norm.round_first) == (offset, round_first)
    x = torch.randn(999, 32, device="cuda", dtype=torch.bfloat16)
    assert (norm(x) != layer.input_layernorm(x)).float().mean() < 0.01
    if family == "llama":
        mlp = fused(layer.mlp)
        assert isinstance(mlp, FusedGatedMLP)
        torch.testing.assert_close(mlp(x), layer.mlp(x), rtol=2e-2, atol=2e-2)
