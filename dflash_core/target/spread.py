"""A target whose layers lie on several devices, as the stages of a pipeline: while one batch is at the second stage, another is at the first.

    device_map, first_layers = place(info, ("cuda:0", "cuda:1"))       # which weights are loaded where; the whole lies nowhere
    stages = Stages(structure, taps, devices, first_layers)
    with stages.batch():                                               # a thread; at every stage one batch at a time
        decoder(…)

A thread takes its batch through all stages. At the border between two it copies what it has to the next device, lets the following thread into the
stage that it leaves, and waits for its turn in the next. So as many threads as stages keep all devices busy, and a batch goes through the very same
operations as on one device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash_core.errors import TargetError
from dflash_core.target.attention import Documents
from dflash_core.target.device import on_device
from dflash_core.target.info import TargetInfo, load_config_of
from dflash_core.target.structure import LayerTaps, Structure, find_structure


def place(info: TargetInfo, devices: Sequence[str], trust_remote_code: bool = False) -> tuple[dict[str, str], tuple[int, ...]]:
    """Where each module of a target is loaded, as Transformers' ``device_map``, and the first layer of every stage.

    Layers stay in order and are divided so that the largest stage is as small as can be. Embedding and rotary positions are with the first,
    norm and head with the last; a head that is the embedding is where that is.

    Raises:
        TargetError: there are more devices than layers, or the kind of model is not supported.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config_of(Path(info.path), trust_remote_code), trust_remote_code=trust_remote_code)
    structure = find_structure(model)
    if len(devices) > len(structure.layers):
        raise TargetError(f"{info.name} has {len(structure.layers)} layers, which cannot be spread over {len(devices)} devices. Name fewer of them.")
    tied = bool(info.tie_word_embeddings)
    sizes = [_size(layer) for layer in structure.layers]
    sizes[0] += _size(structure.embedding)
    sizes[-1] += 0 if tied else _size(structure.head)
    first_layers = divide(sizes, len(devices))
    names = {id(module): name for name, module in model.named_modules()}
    device_map = {"": devices[0], names[id(getattr(structure.decoder, structure.norm_name))]: devices[-1]}
    device_map[names[id(structure.head)]] = devices[0] if tied else devices[-1]
    for index, layer in enumerate(structure.layers):
        device_map[names[id(layer)]] = devices[_stage_of(index, first_layers)]
    return device_map, first_layers


def divide(sizes: Sequence[int], parts: int) -> tuple[int, ...]:
    """Where each of so many consecutive parts begins, such that the largest of their sums is as small as can be."""
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    best: list[tuple[int, tuple[int, ...]]] = [(total, (0,)) for total in sums]  # [end]: the largest sum of the items before it, and the begins
    for part in range(1, parts):
        best = [
            min((max(best[begin][0], sums[end] - sums[begin]), (*best[begin][1], begin)) for begin in range(part, end)) if end > part else best[end]
            for end in range(len(sums))
        ]
    return best[-1][1]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _stage_of(layer: int, first_layers: Sequence[int]) -> int:
    return sum(first <= layer for first in first_layers) - 1


def without_hooks(model: Any) -> Any:
    """The model without the hooks by which Accelerate would move activations: they are bound to single modules, and do not survive copies of them."""
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)
    return model


@dataclass
class _Batch:
    """A batch on its way: the stage that it is at and whose lock it holds, and what has been copied to that stage's device."""

    stage: int
    held: threading.Lock | None
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class Stages:
    """The stages of one spread target. Any number of threads may run batches."""

    def __init__(self, structure: Structure, taps: LayerTaps, devices: Sequence[torch.device], first_layers: Sequence[int]) -> None:
        """Hooks are put on the layers of all stages but the first, on the norm and on the head; copies of these modules share them."""
        self.devices = tuple(devices)
        self._taps = taps
        self._turns = [threading.Lock() for _ in devices]
        self._own = threading.local()
        for index, layer in enumerate(structure.layers):
            if stage := _stage_of(index, first_layers):
                layer.register_forward_pre_hook(self._enter(stage), with_kwargs=True)
        getattr(structure.decoder, structure.norm_name).register_forward_pre_hook(self._enter(len(devices) - 1), with_kwargs=True)
        head = structure.head
        head.register_forward_pre_hook(lambda _module, arguments: _moved(arguments, head.weight.device, {}))

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Within the block, this thread's pass goes from stage to stage, and waits where another thread's batch is before it."""
        self._turns[0].acquire()
        batch = self._own.batch = _Batch(0, self._turns[0])
        try:
            with on_device(self.devices[0]):
                yield
        finally:
            self._own.batch = None
            if batch.held is not None:
                batch.held.release()

    def _enter(self, stage: int) -> Callable[..., Any]:
        device = self.devices[stage]

        def enter(_module: nn.Module, arguments: Any, named: Any) -> Any:
            batch: _Batch | None = getattr(self._own, "batch", None)
            copies = {} if batch is None else batch.copies
            if batch is None or batch.stage == stage:
                return _moved(arguments, device, copies), _moved(named, device, copies)
            copies.clear()
            # While the stage that is left is still this thread's: the copies must be queued on its device before the work of the next batch.
            arguments, named = _moved(arguments, device, copies), _moved(named, device, copies)
            self._taps.replace(lambda tapped: _moved(tapped, device, copies))
            if batch.held is not None:
                batch.held.release()
            batch.held = None
            self._turns[stage].acquire()
            batch.stage, batch.held = stage, self._turns[stage]
            if device.type == "cuda":
                torch.cuda.set_device(device)  # until the end of the batch, which sets it back
            return arguments, named

        return enter


def _moved(value: Any, device: torch.device, copies: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """``value`` with all its tensors on ``device``. What all layers are given, such as angles and masks, is copied once: ``copies`` holds it."""
    if isinstance(value, torch.Tensor):
        if value.device == device:
            return value
        if id(value) not in copies:
            copies[id(value)] = value, value.to(device, non_blocking=True)  # the original is kept, so that no other tensor can have its id
        return copies[id(value)][1]
    if isinstance(value, Documents):
        return dataclasses.replace(value, **{name: _moved(getattr(value, name), device, copies) for name in ("ids", "positions", "ends")})
    if type(value) in (tuple, list):
        return type(value)(_moved(item, device, copies) for item in value)
    if type(value) is dict:
        return {name: _moved(item, device, copies) for name, item in value.items()}
    return value
