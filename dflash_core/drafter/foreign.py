"""Drafters that others have trained, as a starting point: z-lab's, SpecForge's and speculators' checkpoints.

    imported = import_drafter("Qwen3-8B-DFlash", "start", info)   # then drafter.initial_checkpoint: start

The body of a DFlash drafter has the same tensors everywhere. What differs is how the configuration is spelled, from where layers are counted, how
files are split and prefixed, and which of the target's own tensors are stored beside it. What would be another function (windows that see a block
both ways, biases, further heads) is refused, never left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_core.drafter.checkpoint import CONFIG, load_checkpoint, read_serving_config, tensor_problems, value_problems, write_drafter
from dflash_core.drafter.config import DFlashConfig
from dflash_core.drafter.export import target_problems
from dflash_core.drafter.rope import flat_rope_parameters
from dflash_core.drafter.serving import CAUSAL_KEYS, from_serving, to_serving
from dflash_core.errors import CheckpointError, TargetError
from dflash_core.target.weights import stored_tensors
from dflash_core.words import counted

if TYPE_CHECKING:
    from dflash_core.target.info import TargetInfo

TRAINERS_STATE = "training_state.pt"
PREFIXES = ("", "model.", "draft_model.")
TARGETS_OWN = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t")
"""What speculators stores of the target, or of a choice among its tokens: all of it frozen, none of it the drafter's."""
OTHER_DRAFTERS = ("projector_type", "conv_kernel_size", "selector_rank", "markov_rank", "attention_sink_bias", "attention_value_scale")
"""Settings, in ``dflash_config`` or beside it, of drafters that are more than the common body."""

SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps",
    "max_position_embeddings", "rope_theta", "rope_parameters", "rope_scaling", "layer_types", "sliding_window",
)  # fmt: skip
"""Settings that have the same name in both layouts."""


@dataclass(frozen=True)
class ImportedDrafter:
    """What was brought in.

    layout:   "speculators" or "z-lab", which SpecForge writes as well
    left_out: names of stored tensors that are the target's own
    dtype:    of the tensors as they were stored and are written, such as "bfloat16"
    """

    folder: Path
    layout: str
    config: DFlashConfig
    left_out: tuple[str, ...]
    dtype: str

    def settings(self) -> str:
        """The section of a configuration that goes on training it, as YAML."""
        config, window = self.config, ""
        if config.sliding_layers:
            window = f"\n  sliding_window: {config.sliding_window}\n  full_attention_layers: {config.full_layers}"
        return (
            f"drafter:\n  initial_checkpoint: {json.dumps(str(self.folder))}\n"
            f"  num_layers: {config.num_layers}\n  tap_layers: {list(config.tap_layers)}\n"
            f"  block_size: {config.block_size}\n  mask_token_id: {config.mask_token_id}\n  intermediate_size: {config.intermediate_size}{window}"
        )


def import_drafter(source: str | Path, out: str | Path, info: TargetInfo | None = None) -> ImportedDrafter:
    """Write a drafter of another trainer as a checkpoint of this one, and compare it tensor by tensor with what was read.

    Args:
        source: folder with ``config.json`` and safetensors files, split or not
        out:    folder to write; must not be there
        info:   the target to go on with; needed where the checkpoint does not say how many layers its target has

    Raises:
        CheckpointError: ``source`` cannot be read, is of a drafter that cannot be trained here, or does not fit the target; lists every problem.
    """
    source, out = Path(source), Path(out)
    if out.exists():
        raise CheckpointError(f"{out}: is there already. Name a folder that does not exist.")
    if not (source / CONFIG).is_file() and (source / TRAINERS_STATE).is_file():
        message = f"{source}: holds SpecForge's {TRAINERS_STATE}, a pickle, which is never loaded"
        raise CheckpointError(f"{message}. Write a folder of it first: specforge export --to hf.")
    fields = read_serving_config(source)
    speculators = "speculators_model_type" in fields and "transformer_layer_config" in fields
    native = _from_speculators(fields, source, info) if speculators else _from_zlab(fields, source)
    heads, hidden = native.get("num_attention_heads"), native.get("hidden_size")
    if not native.get("head_dim") and type(heads) is type(hidden) is int and heads > 0:
        native["head_dim"] = hidden // heads
    problems = [*_unsupported(fields, native), *(_contradictions(fields, native) if speculators else ())]
    if problems:
        raise _error(source, problems)
    config = from_serving(native, str(source / CONFIG))
    if info is not None:
        problems += _target_problems(config, info)
        config = replace(config, target_name=info.served_as)
    problems += _range_problems(config)
    tensors, left_out = _read_tensors(source)
    problems += tensor_problems(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    problems += _value_problems(tensors)
    if problems:
        raise _error(source, problems)
    if info is not None:  # the same frequencies, in the target's spelling, so that training finds nothing to object to
        config = replace(config, rope_parameters=flat_rope_parameters(info), max_position_embeddings=info.max_position_embeddings)
    dtype = str(tensors["norm.weight"].dtype).removeprefix("torch.")
    write_drafter(out, to_serving(config, dtype), tensors)
    written = load_checkpoint(out)
    changed = [name for name, tensor in written.state_dict().items() if not torch.equal(tensor, tensors[name])]
    if written.config != config or changed:
        raise CheckpointError(f"{out}: not what was read from {source}: {', '.join(changed) or CONFIG}. Delete the folder and import again.")
    return ImportedDrafter(out, "speculators" if speculators else "z-lab", config, left_out, dtype)


def _error(source: Path, problems: list[str]) -> CheckpointError:
    return CheckpointError("\n  ".join([f"{source}: {counted(len(problems), 'problem')}; cannot be trained further here:", *problems]))


def _from_zlab(fields: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Newer checkpoints keep the block size and the target's depth among the drafter's own settings."""
    own = _section(fields, "dflash_config", source)
    return {**{key: own[key] for key in ("block_size", "num_target_layers") if key in own}, **fields}


def _section(fields: Mapping[str, Any], key: str, source: Path) -> dict[str, Any]:
    """An object among the fields; an empty one if there is none."""
    found = fields.get(key) or {}
    if not isinstance(found, dict):
        raise _error(source, [f"{CONFIG}: {key} = {found!r}, expected an object with its settings. Save the drafter again."])
    return found


def _from_speculators(fields: Mapping[str, Any], source: Path, info: TargetInfo | None) -> dict[str, Any]:
    """z-lab's keys from those of speculators, which counts layers from 1 and keeps the shape in ``transformer_layer_config``."""
    taps = fields.get("aux_hidden_state_layer_ids")
    if not isinstance(taps, list) or not all(type(layer) is int for layer in taps):
        raise _error(source, [f"{CONFIG}: aux_hidden_state_layer_ids = {taps!r}, expected a list of layers. Save it with its layers named."])
    depth = fields.get("num_target_layers") or (info.num_layers if info is not None else None)
    if depth is None:
        raise _error(source, [f"{CONFIG}: does not say how many layers the target has. Name the target: --target MODEL."])
    own = ("block_size", "speculators_model_type", "speculators_config", "sample_from_anchor", "dtype")
    return {
        **_section(fields, "transformer_layer_config", source),
        **{key: fields[key] for key in own if key in fields},
        "num_target_layers": depth,
        "dflash_config": {"target_layer_ids": [layer - 1 for layer in taps], "mask_token_id": fields.get("mask_token_id")},
    }


def _unsupported(fields: Mapping[str, Any], native: Mapping[str, Any]) -> Iterator[str]:
    """What makes the drafter another function than the one that is trained here."""
    own = native.get("dflash_config") or {}
    kinds = native.get("layer_types")
    sliding = [i for i, kind in enumerate(kinds) if kind != "full_attention"] if isinstance(kinds, list) else []
    causal = {key: (own if "." in key else fields).get(key.rpartition(".")[2]) for key in CAUSAL_KEYS}
    both_ways = [key for key, said in causal.items() if said is False]
    if fields.get("sliding_window_non_causal"):
        both_ways.append("sliding_window_non_causal")
    for key in both_ways if sliding else ():
        yield f"{CONFIG}: {key} lets the sliding layers {sliding} see their block both ways, here they see backwards. Choose another drafter."
    for key in ("use_swa", "swa_window_size"):
        if own.get(key):
            yield f"{CONFIG}: dflash_config.{key} = {own[key]!r}: a window that sees its block both ways. Choose another drafter."
    if native.get("hidden_act", "silu") != "silu":
        yield f"{CONFIG}: hidden_act = {native['hidden_act']!r}, expected 'silu'"
    for key, said in causal.items():
        if said:
            yield f"{CONFIG}: {key} is true: its blocks see backwards only, here they see both ways. Choose another drafter."
    for key in OTHER_DRAFTERS:
        if value := own.get(key) or fields.get(key):
            yield f"{CONFIG}: {key} = {value!r}: this drafter is more than DFlash's layers. Choose a plain DFlash drafter."


def _contradictions(fields: Mapping[str, Any], native: Mapping[str, Any]) -> Iterator[str]:
    """Where a file that has the keys of both layouts says one thing by these and another by those."""
    own, theirs = _flat(fields), _flat(native)
    for path in (*SHAPE, "dflash_config.target_layer_ids", "dflash_config.mask_token_id"):
        if path in own and path in theirs and own[path] != theirs[path]:
            yield f"{CONFIG}: {path} = {own[path]!r}, but speculators reads {theirs[path]!r}: correct the one that is wrong."


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """With the settings of ``dflash_config`` among them."""
    inside = fields.get("dflash_config")
    return {**fields, **({f"dflash_config.{key}": value for key, value in inside.items()} if isinstance(inside, dict) else {})}


def _target_problems(config: DFlashConfig, info: TargetInfo) -> Iterator[str]:
    yield from target_problems(config, info)
    for path, value, wanted in (
        ("num_attention_heads", config.num_heads, info.num_heads),
        ("num_key_value_heads", config.num_kv_heads, info.num_kv_heads),
        ("rms_norm_eps", config.rms_norm_eps, info.rms_norm_eps),
    ):
        if value != wanted:
            yield f"{CONFIG}: {path} = {value!r}, but {info.name} has {wanted!r}, and a drafter here has its target's"


def _range_problems(config: DFlashConfig) -> Iterator[str]:
    """What can be told without the target."""
    taps, last = config.tap_layers, config.num_target_layers - 2
    if list(taps) != sorted(set(taps)) or not taps or taps[0] < 0 or taps[-1] > last:
        yield f"{CONFIG}: tapped layers {list(taps)} (counted from 0), expected ascending ones from 0 to {last}"
    if not isinstance(config.mask_token_id, int) or not 0 <= config.mask_token_id < config.vocab_size:
        yield f"{CONFIG}: mask_token_id = {config.mask_token_id!r}, expected a token below vocab_size = {config.vocab_size}"
    if config.block_size < 2:
        yield f"{CONFIG}: block_size = {config.block_size!r}, expected at least 2"


def _read_tensors(source: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The drafter's tensors by their bare names, and the names of those that are the target's own."""
    try:
        stored = stored_tensors(source)
    except TargetError as error:
        raise CheckpointError(f"{source}: the weights cannot be read: {error}") from error
    prefix = next((prefix for prefix in PREFIXES if f"{prefix}fc.weight" in stored), "")
    bare = {name: name.removeprefix(prefix) for name in stored}
    left_out = tuple(sorted(name for name in stored if bare[name] in TARGETS_OWN))
    tensors = {}
    for path in sorted({entry.file for entry in stored.values()}):
        with safe_open(path, framework="pt") as file:
            tensors.update({bare[name]: file.get_tensor(name) for name, entry in stored.items() if entry.file == path and name not in left_out})
    return tensors, left_out


def _value_problems(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    yield from value_problems(tensors)
    dtypes = sorted({str(tensor.dtype) for tensor in tensors.values()})
    if len(dtypes) > 1:
        yield f"the tensors are of several dtypes, {', '.join(dtypes)}. Save them in one."
