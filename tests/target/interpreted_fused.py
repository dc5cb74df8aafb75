"""Run in a process of its own with TRITON_INTERPRET=1: the fused modules against those of tiny targets that they stand for."""

from __future__ import annotations

import torch

from dflash_core.target import fused
from tests.target.tiny import tiny_model


def check(family: str) -> None:
    model = tiny_model(family)
    layer = model.get_decoder().layers[0]
    norm = fused.fused_norm(layer.input_layernorm)
    assert isinstance(norm, fused.FusedRMSNorm), family
    assert norm.offset == (1.0 if family == "gemma2" else 0.0), family
    x = torch.randn(2, 5, 32)
    torch.testing.assert_close(norm(x), layer.input_layernorm(x), rtol=1e-6, atol=1e-6)
    heads = torch.randn(1, 7, 4, 32)  # several rows of one program
    torch.testing.assert_close(norm(heads), layer.input_layernorm(heads), rtol=1e-6, atol=1e-6)
    mlp = fused.fused_mlp(layer.mlp)
    assert (mlp is not None) == (family == "llama"), family  # Gemma's gate is a GELU; experts are no MLP of this kind
    if mlp is not None:
        torch.testing.assert_close(mlp(x), layer.mlp(x), rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    for name in ("llama", "gemma2", "gpt_oss"):
        check(name)
    print("equal")
