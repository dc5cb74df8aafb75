"""Checkpoints: what is written is read back, and nothing half-written or foreign is believed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dflash_core.drafter.checkpoint as checkpoint
from dflash_core.drafter import load_checkpoint, save_checkpoint
from dflash_core.errors import CheckpointError
from tests.drafter.small import drafter_config, small_drafter


def test_weights_and_configuration_come_back_bit_for_bit(tmp_path: Path) -> None:
    drafter = small_drafter()
    save_checkpoint(drafter, tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert loaded.config == drafter.config
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), drafter.state_dict().values(), strict=True))
    assert load_checkpoint(tmp_path, dtype=torch.bfloat16).fc.weight.dtype == torch.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


def test_weights_alone_suffice_where_the_configuration_is_known(tmp_path: Path) -> None:
    save_checkpoint(small_drafter(), tmp_path)
    (tmp_path / "config.json").unlink()
    assert torch.equal(load_checkpoint(tmp_path, config=drafter_config()).fc.weight, small_drafter().fc.weight)


def test_parameters_that_are_views_of_one_buffer_can_be_saved(tmp_path: Path) -> None:
    drafter = small_drafter()
    flat = torch.cat([p.detach().flatten() for p in drafter.parameters()])
    start = 0
    for parameter in drafter.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    save_checkpoint(drafter, tmp_path)
    assert torch.equal(load_checkpoint(tmp_path).norm.weight, drafter.norm.weight)


def test_a_kill_while_saving_again_leaves_the_old_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(small_drafter(), tmp_path)

    def killed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_tensors", killed)
    changed = small_drafter().init_weights(7)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(changed, tmp_path)
    assert torch.equal(load_checkpoint(tmp_path).fc.weight, small_drafter().fc.weight)


def test_a_kill_while_saving_another_drafter_leaves_nothing_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(small_drafter(), tmp_path)
    monkeypatch.setattr(checkpoint, "write_json_atomic", lambda *_: None)
    save_checkpoint(small_drafter(num_layers=3), tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json: expected a drafter's configuration"):
        load_checkpoint(tmp_path)


def test_every_wrong_tensor_is_named(tmp_path: Path) -> None:
    save_checkpoint(small_drafter(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["norm.weight"]
    tensors["model.hidden_norm.weight"] = tensors.pop("hidden_norm.weight")
    tensors["lm_head.weight"] = torch.zeros(2, 2)
    tensors["fc.weight"] = torch.zeros(24, 24)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path)
    message = str(caught.value)
    assert "norm.weight: missing (expected shape [24])" in message
    assert "model.hidden_norm.weight: must be named hidden_norm.weight, without a prefix" in message
    assert "lm_head.weight: unexpected, of shape [2, 2]" in message
    assert "fc.weight: shape [24, 24], expected [24, 48]" in message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.full((24,), float("nan")), "norm.weight: has 24 values that are not finite"),
        (torch.ones(24, dtype=torch.int8), "norm.weight: dtype torch.int8"),
        (torch.ones(24).to(torch.float8_e4m3fn), "norm.weight: dtype torch.float8_e4m3fn"),
    ],
)
def test_weights_that_nothing_can_be_computed_with_are_named(tmp_path: Path, value: torch.Tensor, message: str) -> None:
    save_checkpoint(small_drafter(), tmp_path)
    save_file(load_file(tmp_path / "model.safetensors") | {"norm.weight": value}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_checkpoint(tmp_path)


def test_a_truncated_file_and_a_missing_field_are_errors_that_name_them(tmp_path: Path) -> None:
    save_checkpoint(small_drafter(), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected a drafter's weights"):
        load_checkpoint(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["dflash_config"]["target_layer_ids"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"expected the field dflash_config\.target_layer_ids"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("hidden_size",), "wide"), (("hidden_size",), 2.5), (("hidden_size",), True), (("head_dim",), None), (("num_hidden_layers",), 10**12),
        (("vocab_size",), -1), (("block_size",), 1), (("rms_norm_eps",), "small"), (("dflash_config",), []),
        (("dflash_config", "target_layer_ids"), 3),
        (("dflash_config", "target_layer_ids"), []), (("dflash_config", "mask_token_id"), None), (("rope_parameters",), "default"),
        (("rope_parameters", "rope_theta"), "1e6"), (("rope_parameters", "rope_theta"), -1), (("speculators_config",), "yes"),
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_kind_is_an_error_that_names_it_and_what_it_holds(tmp_path: Path, path: tuple[str, ...], value: object) -> None:
    save_checkpoint(small_drafter(), tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    holder = fields
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{path[-1]}.* = {re.escape(repr(value))}"):
        load_checkpoint(tmp_path)
