"""The training step of two other trainers against ours: the same shapes and optimiser, on one GPU, in one process.

python -m benchmarks.peers --specforge specforge-0.2.0-py3-none-any.whl --speculators speculators-0.9.0-py3-none-any.whl
python -m benchmarks.peers --shape 4x3072 --specforge FOLDER --speculators FOLDER

A path is a wheel or the folder it was unpacked into; neither is installed, and what they import without having it here is stood in for by empty
modules, whose names are recorded. Our replica stays in memory and is timed before and after each of them, so a ratio is between neighbours.
Each runs as its own trainer would run it:

specforge    bf16 weights, flex_attention compiled by itself as transformers does, chunked loss with recomputation, ``BF16Optimizer``
speculators  float32 weights under autocast, whole forward compiled, eager cross-entropy against the argmax of the target's logits, which its step
             works out anew (its fused loss does not compile on torch 2.11); AdamW, here in torch's fused form, which is faster than its own choice
"""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.machinery
import math
import statistics
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import SHAPES, Recorder, Shape, arguments, matmul_ceiling, recorder_for, time_ms
from benchmarks.step import LEARNING_RATE, Step, build

GAMMA = 7.0
TrainingStep = Callable[[], Tensor]


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages in ``names`` to be empty modules. What is taken from one is an empty class: good enough to be named, not to be used."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.names else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__module__": self.__name__})


def import_peer(root: Path, modules: Sequence[str]) -> tuple[list[types.ModuleType], list[str]]:
    """Modules of a package that lies in ``root``, and the names of the packages that had to be stood in for while they were imported."""
    package = modules[0].partition(".")[0]
    absent = StandIns()
    sys.path.insert(0, str(root))
    sys.meta_path.append(absent)  # last: what is installed is found first
    try:
        while True:
            try:
                return [importlib.import_module(module) for module in modules], sorted(absent.names)
            except ModuleNotFoundError as error:
                missing = (error.name or "").partition(".")[0]
                if missing in ("", package) or missing in absent.names:
                    raise
                absent.names.add(missing)
                _forget({package})
    finally:
        sys.meta_path.remove(absent)
        sys.path.remove(str(root))
        _forget(absent.names)  # an import later on is to fail in the open


def _forget(packages: set[str]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The folder itself, or a temporary one that holds what is in the wheel."""
    if path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(folder)
        yield Path(folder)


def specforge_step(shape: Shape, device: torch.device, root: Path) -> tuple[TrainingStep, list[str]]:
    """``OnlineDFlashModel`` and ``BF16Optimizer`` of SpecForge 0.2.0. On the CPU attention is eager: flex_attention has no backward there."""
    modules = ("specforge.algorithms.common.dflash_family_model", "specforge.modeling.draft.dflash", "specforge.optimizer")
    (family, draft, optimizer_module), absent = import_peer(root, modules)
    attention = "flex_attention" if device.type == "cuda" else "eager"
    config = _qwen3(shape, attention, num_target_layers=36, block_size=shape.S)
    config.dflash_config = {"target_layer_ids": list(range(1, 1 + shape.layers)), "mask_token_id": shape.V - 1}
    with torch.device(device):
        drafter = draft.DFlashDraftModel(config).bfloat16()
        embedding, head = nn.Embedding(shape.V, shape.H).bfloat16(), nn.Linear(shape.H, shape.V, bias=False).bfloat16()
        _fill(embedding.weight, head.weight)
        model = family.OnlineDFlashModel(
            drafter, head, embedding, mask_token_id=shape.V - 1, block_size=shape.S, attention_backend=attention, num_anchors=shape.N,
            loss_decay_gamma=GAMMA,
        )  # fmt: skip
        batch = {
            "input_ids": torch.randint(0, shape.V, (shape.B, shape.T)),
            "hidden_states": torch.randn(shape.B, shape.T, shape.layers * shape.H, dtype=torch.bfloat16),
            "loss_mask": torch.ones(shape.B, shape.T),
        }
    optimizer = optimizer_module.BF16Optimizer(drafter, lr=LEARNING_RATE, max_grad_norm=1.0, total_steps=1000, warmup_ratio=0.0)

    def step() -> Tensor:
        loss: Tensor = model(**batch)[0]
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, absent


def speculators_step(shape: Shape, device: torch.device, root: Path) -> tuple[TrainingStep, list[str]]:
    """``DFlashDraftModel`` of speculators 0.9.0, stepped as its trainer steps it: rows are documents of one packed sequence."""
    modules = ("speculators.models.dflash", "speculators.losses")
    (dflash, losses), absent = import_peer(root, modules)
    attention = "simple_flex_attention" if device.type == "cuda" else "eager"
    config = dflash.DFlashSpeculatorConfig(
        transformer_layer_config=_qwen3(shape, attention), draft_vocab_size=shape.V, block_size=shape.S,
        aux_hidden_state_layer_ids=list(range(1, 1 + shape.layers)), mask_token_id=shape.V - 1,
    )  # fmt: skip
    T = shape.B * shape.T
    with torch.device(device):
        model = dflash.DFlashDraftModel(config)
        _fill(model.embed_tokens.weight, model.lm_head.weight, model.verifier_lm_head.weight)
        batch = {
            "hidden_states": torch.randn(1, T, shape.layers * shape.H, dtype=torch.bfloat16),
            "input_ids": torch.randint(0, shape.V, (1, T)),
            "loss_mask": torch.ones(1, T, dtype=torch.bool),
            "verifier_last_hidden_states": torch.randn(1, T, shape.H, dtype=torch.bfloat16),
            "document_ids": torch.arange(shape.B).repeat_interleave(shape.T)[None],
            "position_ids": torch.arange(shape.T).repeat(shape.B)[None],
        }
    call = {"loss_config": losses.resolve_loss_config("ce", "eager"), "gamma": GAMMA, "max_anchors": shape.B * shape.N}
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step() -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss: Tensor = model(**batch, **call)[1]
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step, absent


PEERS = {"specforge": specforge_step, "speculators": speculators_step}


def _qwen3(shape: Shape, attention: str, **settings: Any) -> Any:
    from transformers import Qwen3Config

    config = Qwen3Config(
        hidden_size=shape.H, intermediate_size=shape.I, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, vocab_size=shape.V, rms_norm_eps=1e-6, max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **settings,
    )  # fmt: skip
    config._attn_implementation = attention
    return config


def _fill(*weights: Tensor) -> None:
    for weight in weights:
        weight.requires_grad_(False).normal_(std=0.02)


def measure_peer(recorder: Recorder, shape: Shape, name: str, path: Path, ours: Step) -> None:
    """Milliseconds of a peer's step, the memory it adds at most, and its time over ours just before and after."""
    device = recorder.device
    with unpacked(path) as root:
        _collect(device)
        before = _allocated(device)
        step, absent = PEERS[name](shape, device, root)
        losses = [float(step()) for _ in range(3)]
        our_samples = _time_ours(ours, device)
        samples = time_ms(step, device, repeats=20)
        peak = (torch.cuda.max_memory_allocated(device) - before) / 2**30 if device.type == "cuda" else 0.0
        losses.append(float(step()))
        del step
    _collect(device)
    our_samples += _time_ours(ours, device)
    if not all(math.isfinite(loss) for loss in losses):
        raise ValueError(f"the losses of {name} are not finite: {losses}")
    theirs, mine = statistics.median(samples), statistics.median(our_samples)
    detail = {"min": round(min(samples), 3), "max": round(max(samples), 3), "losses": [round(loss, 4) for loss in losses], "absent": absent}
    prefix = _prefix(name, shape)
    recorder.add(f"{prefix}.ms", theirs, "ms", len(samples), {"shape": shape.name, "wheel": path.name, **detail})
    recorder.add(f"{prefix}.peak", peak, "GiB", len(samples))
    recorder.add(f"{prefix}.ratio", theirs / mine, "ratio", len(our_samples), {"shape": shape.name, "ours": round(mine, 4)})


def _prefix(name: str, shape: Shape) -> str:
    return f"peers.{name}" + ("" if shape.name == "1x2048" else f".{shape.name}")


def _time_ours(ours: Step, device: torch.device) -> list[float]:
    with ours.replica.on_device():
        return time_ms(ours, device, repeats=15)


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def main(words: list[str] | None = None) -> int:
    """Measure the peers whose path is given; 1 if anything failed."""
    parser = arguments(__doc__ or "", ["peers"])
    for name in PEERS:
        parser.add_argument(f"--{name}", type=Path, help=f"wheel of {name}, or the folder it was unpacked into")
    options = parser.parse_args(words)
    recorder, shape = recorder_for(options), SHAPES[options.shape]
    matmul_ceiling(recorder, 8192 if recorder.device.type == "cuda" else 64)
    ours = build("product", shape, recorder.device)
    for name in PEERS:
        if (path := getattr(options, name)) is not None:
            recorder.attempt(f"{_prefix(name, shape)}.ratio", partial(measure_peer, recorder, shape, name, path, ours))
    return int(bool(recorder.failures))


if __name__ == "__main__":
    raise SystemExit(main())
