"""The folder that is served, and the proof that it is right.

    export_drafter(drafter, info, "out", facts)   # writes, reads everything back, compares
    verify_export("out", info)                    # the same check at any later time

vLLM's loader does not report a missing tensor, and a wrong rope costs nearly all acceptance without any error: so the check is ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from dflash_core.drafter.card import model_card
from dflash_core.drafter.checkpoint import CONFIG, WEIGHTS, read_serving_config, stored_tensors, tensor_problems, value_problems, write_drafter
from dflash_core.drafter.config import DFlashConfig, mask_token_problems, tap_problems
from dflash_core.drafter.model import DFlashDrafter
from dflash_core.drafter.rope import flat_rope_parameters, rope_frequencies
from dflash_core.drafter.serving import CAUSAL_KEYS, SPECULATORS_KEYS, fits_speculators, from_serving, to_serving
from dflash_core.errors import CheckpointError
from dflash_core.stages import atomic_write
from dflash_core.words import counted

if TYPE_CHECKING:
    from dflash_core.target.info import TargetInfo

REMOTE_CODE, CARD = "dflash.py", "README.md"


def export_drafter(drafter: DFlashDrafter, info: TargetInfo, folder: str | Path, facts: Mapping[str, object]) -> Path:
    """Write the serving folder in bfloat16 and verify it tensor by tensor.

    Args:
        drafter: trained weights in any float dtype
        info:    its target
        folder:  where to write; ``config.json`` comes last, so an interrupted export loads nowhere
        facts:   what the model card states as measured: label to value, in order

    Returns:
        The folder.

    Raises:
        CheckpointError: what was written is not what should be served; names everything that is wrong.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    code = resources.files("dflash_core.drafter").joinpath("remote_code.py.txt").read_text(encoding="utf-8")
    for name, text in ((REMOTE_CODE, code), (CARD, model_card(drafter.config, info, facts))):
        with atomic_write(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in drafter.state_dict().items()}
    write_drafter(folder, to_serving(drafter.config, "bfloat16", _architectures(info)), tensors)
    verify_export(folder, info, drafter)
    return folder


def verify_export(folder: str | Path, info: TargetInfo, drafter: DFlashDrafter | None = None) -> None:
    """Check an exported folder against its target and, if given, against the drafter it was made of, in its configuration and its weights.

    Raises:
        CheckpointError: lists everything that is wrong: files, fields of ``config.json``, layer ids in every convention, mask token, rope of
            target, drafter and export, and each tensor's name, shape, dtype and values.
    """
    folder = Path(folder)
    fields = read_serving_config(folder)
    config = from_serving(fields, str(folder / CONFIG))
    problems = [f"{name}: missing" for name in (REMOTE_CODE, CARD) if not (folder / name).is_file()]
    problems += _field_problems(fields, config if drafter is None else replace(drafter.config, target_name=config.target_name), info)
    problems += _size_problems(config, info)
    if config.target_name != info.served_as:
        field = "speculators_config.verifier.name_or_path" if fits_speculators(config) else "target_name_or_path"
        problems.append(f"{CONFIG}: {field} = {config.target_name!r}, the target is {info.served_as!r}")
    problems += _rope_problems(fields, config, info, drafter)
    problems += _stored_problems(folder, config, drafter)
    if problems:
        raise CheckpointError("\n  ".join([f"{folder}: {counted(len(problems), 'problem')}; do not serve it, export the drafter again:", *problems]))


def _architectures(info: TargetInfo) -> list[str]:
    path = Path(info.path) / CONFIG
    return json.loads(path.read_text(encoding="utf-8")).get("architectures") or [] if path.is_file() else []


def _field_problems(fields: Mapping[str, Any], config: DFlashConfig, info: TargetInfo) -> Iterator[str]:
    """Each field must be what this drafter's configuration is spelled as; this covers both rope spellings and all conventions of layer ids."""
    expected = _flatten(to_serving(config, "bfloat16", _architectures(info)))
    found = _flatten(fields)
    for path, value in expected.items():
        if path not in found:
            yield f"{CONFIG}: {path} is missing, expected {value!r}"
        elif found[path] != value:
            yield f"{CONFIG}: {path} = {found[path]!r}, expected {value!r}"
    for path in CAUSAL_KEYS:
        if path in found:
            yield f"{CONFIG}: {path} = {found[path]!r} must be left out, it overrides the attention of every layer"
    if not fits_speculators(config):
        for path in SPECULATORS_KEYS:
            if path in fields:
                yield f"{CONFIG}: {path} must be left out: read by it, vLLM gives full and sliding layers the same causality"


def _flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        flat.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return flat


def target_problems(config: DFlashConfig, info: TargetInfo) -> Iterator[str]:
    """Why a drafter cannot draft for a target, one line each. Names are not compared: one model has many."""
    yield from _size_problems(config, info)
    wanted = rope_frequencies(flat_rope_parameters(info), info.head_dim, info.max_position_embeddings)
    found = rope_frequencies(config.rope_parameters, config.head_dim, config.max_position_embeddings)
    if config.head_dim == info.head_dim and not (torch.equal(wanted[0], found[0]) and wanted[1] == found[1]):
        yield f"{CONFIG}: rope {config.rope_parameters} gives other frequencies than that of {info.name}, {info.rope_parameters}"


def _size_problems(config: DFlashConfig, info: TargetInfo) -> Iterator[str]:
    pairs = (
        ("hidden_size", config.hidden_size, info.hidden_size),
        ("vocab_size", config.vocab_size, info.vocab_size),
        ("num_target_layers", config.num_target_layers, info.num_layers),
        ("head_dim", config.head_dim, info.head_dim),
    )
    for path, value, wanted in pairs:
        if value != wanted:
            yield f"{CONFIG}: {path} = {value!r}, but {info.name} has {wanted!r}"
    for problem in (*tap_problems(config.tap_layers, info), *mask_token_problems(config.mask_token_id, info)):
        yield f"{CONFIG}: {problem}"


def _rope_problems(fields: Mapping[str, Any], config: DFlashConfig, info: TargetInfo, drafter: DFlashDrafter | None) -> Iterator[str]:
    """Compare the frequencies themselves, as the target has them, as Transformers reads the export, and as the drafter was trained."""
    from transformers import Qwen3Config

    wanted, factor = rope_frequencies(flat_rope_parameters(info), info.head_dim, info.max_position_embeddings)
    try:
        read = Qwen3Config(**{key: fields[key] for key in fields if key not in ("auto_map", "transformer_layer_config", "speculators_config")})
        sides = {"the export": rope_frequencies(read.rope_parameters, read.head_dim, read.max_position_embeddings)}
    except Exception as error:  # of many kinds: whatever a reader of such a folder would get
        yield f"{CONFIG}: Transformers cannot read it: {type(error).__name__}: {' '.join(str(error).split())}"
        return
    if drafter is not None:
        sides["the trained drafter"] = (drafter.inv_freq.cpu(), drafter.rope_factor)
    for name, (found, found_factor) in sides.items():
        if found.shape != wanted.shape or not torch.equal(found, wanted) or found_factor != factor:
            has = f"rope_parameters {config.rope_parameters} against {info.rope_parameters}"
            yield f"rope: inv_freq of {name} differs from that of {info.name} ({has})"


def _stored_problems(folder: Path, config: DFlashConfig, drafter: DFlashDrafter | None) -> Iterator[str]:
    stored = stored_tensors(folder)
    for problem in tensor_problems(config, {name: shape for name, (shape, _) in stored.items()}):
        yield f"{WEIGHTS}: {problem}"
    trained = drafter.state_dict() if drafter is not None else {}
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        for name, (shape, dtype) in stored.items():
            if dtype != "BF16":
                yield f"{WEIGHTS}: {name}: dtype {dtype}, expected BF16"
            if dtype not in ("BF16", "F16", "F32"):
                continue
            tensor = file.get_tensor(name)
            if problems := list(value_problems({name: tensor})):
                yield from (f"{WEIGHTS}: {problem}" for problem in problems)
            elif name in trained and tuple(trained[name].shape) == shape and not torch.equal(tensor, trained[name].to("cpu", tensor.dtype)):
                yield f"{WEIGHTS}: {name}: differs from the trained weights"
