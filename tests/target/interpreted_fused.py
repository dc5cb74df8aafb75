"""Run in a process of its own with TRITON_INTERPRET=1: the fused modules against those of tiny targets that they stand for."""

from __future__ import annotations

import torch

from dflash_core.target import fused
from dflash_core.target.attention import Documents
from dflash_core.target.packed import PackedDecoder, can_pack
from dflash_core.target.structure import LayerTaps, find_structure
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


def check_attention(family: str) -> None:
    """The whole packed pass with every attention, norm and gate fused that can be, against the same pass with none."""
    model = tiny_model(family, head_dim=16)
    structure = find_structure(model)
    assert can_pack(structure)
    generator = torch.Generator().manual_seed(0)
    documents = Documents.of([torch.randint(0, 256, (n,), generator=generator) for n in (21, 3, 40, 1)], torch.device("cpu"))
    taps = LayerTaps(structure.layers)
    features = []
    for fusible in (False, True):
        if fusible and family != "mistral":
            fused.join_projections(structure.layers)
        fused._fusible = lambda module, fusible=fusible: fusible and not module._forward_hooks  # as on CUDA
        decoder = PackedDecoder(structure, 4)
        kinds = [type(layer.self_attn).__name__ for layer in decoder._decoder.layers]
        assert kinds == ["FusedAttention" if fusible and family != "gpt_oss" else type(structure.layers[0].self_attn).__name__] * 4, kinds
        with torch.no_grad(), taps.record((0, 3)) as outputs:
            decoder(documents)
        features.append(torch.cat([outputs[0], outputs[3]], dim=-1))
        joint = [module.joint is not None for module in decoder._decoder.modules() if isinstance(module, fused.FusedAttention)]
        assert all(joint) == (family != "mistral") or not joint
    torch.testing.assert_close(features[1], features[0], rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    for name in ("llama", "gemma2", "gpt_oss"):
        check(name)
    for name in ("mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss"):  # gpt-oss turns its heads in a way of its own
        check_attention(name)
