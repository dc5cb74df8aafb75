"""Checkpoints that are stored quantised: loaded as their config.json says, on one device or spread over two, or refused before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core.checks import check_target
from dflash_core.config import load_config
from dflash_core.errors import ConfigError, TargetError
from dflash_core.plan import Plan
from dflash_core.target import TargetModel, TargetVocabulary
from dflash_core.target.info import read_target_info
from tests.target.tiny import save_tiny_target
from tests.tiny_run import write_tiny_run

TAPS = (0, 2)
BLOCK = 16


def quantise(folder: Path, settings: dict[str, Any], store: Callable[[torch.Tensor], dict[str, torch.Tensor]], skip: str = "lm_head") -> None:
    """Store the linear layers of a model as ``store`` says (suffix → tensor), and ``settings`` in its configuration."""
    path = folder / "model.safetensors"
    stored = {}
    for name, tensor in load_file(path).items():
        linear = name.endswith("proj.weight") or name == "lm_head.weight" != f"{skip}.weight"
        stored |= {name.removesuffix("weight") + suffix: part for suffix, part in store(tensor).items()} if linear else {name: tensor}
    save_file(stored, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def fp8_blocks(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """As DeepSeek and Qwen publish: float8 with a scale for each block."""
    blocks = weight.unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK)
    scale = blocks.abs().amax((-1, -2)) / 448
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return {"weight": (weight / wide).to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def fp8_rows(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """As llm-compressor publishes: float8 with a scale for each row."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": ["lm_head"]}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}}
    },
}


def documents() -> list[torch.Tensor]:
    return [torch.arange(40, 61, dtype=torch.int32), torch.arange(90, 95, dtype=torch.int32)]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return save_tiny_target("llama", tmp_path / "plain")


def features(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    target = TargetModel.from_pretrained(folder, dtype=dtype, device=device)
    return target.packed_hidden_states(documents(), TAPS, last_hidden=True).float().cpu()


def assert_near(found: torch.Tensor, wanted: torch.Tensor, share: float) -> None:
    assert float((found - wanted).norm() / wanted.norm()) < share
    assert not torch.equal(found, wanted)


@pytest.mark.parametrize(("settings", "store", "package"), [(FP8, fp8_blocks, None), (COMPRESSED, fp8_rows, "compressed_tensors")])
def test_weights_in_fp8_give_nearly_what_the_unquantised_ones_do_also_spread(
    plain: Path, tmp_path: Path, settings: dict[str, Any], store: Callable[[torch.Tensor], dict[str, torch.Tensor]], package: str | None
) -> None:
    if package is not None:
        pytest.importorskip(package, reason=f"{package} is not installed")
    folder = save_tiny_target("llama", tmp_path / "quantised")
    quantise(folder, settings, store)
    found = features(folder)
    assert_near(found, features(plain), 0.2)
    assert torch.equal(features(folder, "cpu+cpu"), found)


def test_weights_of_four_bits_are_loaded_where_bitsandbytes_is(plain: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder = save_tiny_target("llama", tmp_path / "quantised")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, quantization_config=settings, device_map={"": "cpu"}).save_pretrained(folder)
    found = features(folder)
    assert_near(found, features(plain), 0.6)
    target = TargetModel.from_pretrained(folder, dtype=torch.float32)
    assert target._structure.layers[0].self_attn.q_proj.weight.dtype == torch.uint8  # packed it stays


def test_a_package_that_is_missing_is_named_before_anything_is_loaded_and_so_is_a_start_from_quantised_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_run(tmp_path)
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    (tmp_path / "target" / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    monkeypatch.setattr("dflash_core.target.quantised.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"target is stored quantised \(gptq\), which needs optimum and gptqmodel.*pip install optimum gptqmodel"):
        Plan(load_config(path))
    monkeypatch.undo()
    (tmp_path / "target" / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    with pytest.raises(ConfigError, match=r"drafter\.initial_weights = 'target': the target's layers are stored quantised \(fp8\)"):
        Plan(load_config(path, ["drafter.initial_weights=target"]))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("extraction.devices.1", "extraction.devices=[cpu, cuda:0]"),
        ("training.target_devices.0", "training={feed: online, devices: [cuda:0], target_devices: [cuda:1], row_length: 64, num_anchors: 8}"),
        ("training.evaluation.device", "training.evaluation={every_steps: 5, device: cuda:0}"),
    ],
)
def test_a_package_that_is_missing_on_whichever_device_the_target_is_put_is_named_with_the_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, change: str
) -> None:
    path = write_tiny_run(tmp_path)
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    (tmp_path / "target" / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    info = read_target_info(tmp_path / "target")
    check_target(load_config(path), info)  # on a CPU it needs none
    monkeypatch.setattr("dflash_core.target.quantised.find_spec", lambda name: None)
    monkeypatch.setattr("dflash_core.checks.total_memory", lambda device: 2**34)
    with pytest.raises(ConfigError, match=rf"{field} = 'cuda:[01]': target is stored quantised \(fp8\), which needs kernels") as caught:
        check_target(load_config(path, [change]), info)
    assert len(caught.value.problems) == 1


def test_a_head_that_is_quantised_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_target("llama", tmp_path / "quantised", vocab_size=304)
    quantise(folder, FP8 | {"modules_to_not_convert": []}, fp8_blocks, skip="")
    with pytest.raises(TargetError, match=r"expected one tensor of shape \[304, 32\] and of 16 bits or more as the output head"):
        TargetVocabulary.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("method", ["fp8", "compressed-tensors", "bitsandbytes"])
def test_quantised_weights_run_on_a_gpu(plain: Path, tmp_path: Path, method: str) -> None:
    from dflash_core.target.quantised import missing_packages

    if missing := missing_packages(method, "cuda"):
        pytest.skip(f"{' and '.join(missing)} are not installed")
    folder = save_tiny_target("llama", tmp_path / "quantised")
    if method == "bitsandbytes":
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
        AutoModelForCausalLM.from_pretrained(plain, quantization_config=settings, device_map={"": "cuda:0"}).save_pretrained(folder)
    else:
        quantise(folder, *((FP8, fp8_blocks) if method == "fp8" else (COMPRESSED, fp8_rows)))
    assert_near(features(folder, "cuda:0", torch.bfloat16), features(plain, "cuda:0", torch.bfloat16), 0.6)
