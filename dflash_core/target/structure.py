"""Where the parts of a causal language model are, and how the outputs of its layers are tapped.

The parts are found by what they are, not by what a family calls them: the decoder is the module that holds the input
embedding beside a list of as many layers as the configuration says. Layer ids are 0-based; a tap is a layer's output,
before the final norm.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dflash_core.errors import TargetError


@dataclass(frozen=True)
class Structure:
    """Parts of a target. ``layers_name`` and ``norm_name`` are attributes of ``decoder``."""

    decoder: nn.Module
    embedding: nn.Embedding
    layers: nn.ModuleList
    layers_name: str
    norm_name: str
    head: nn.Linear


def find_structure(model: Any) -> Structure:
    """Parts of a Transformers causal language model, also of the text side of a vision-language wrapper.

    Raises:
        TargetError: a part is not there, or not unique; says what was looked for and what was found.
    """
    text = model.config.get_text_config(decoder=True)
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding):
        raise _unsupported(model, "an input embedding", [repr(embedding)])
    found = [
        (module, name, child)
        for module in model.modules()
        if any(child is embedding for child in module.children())
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == text.num_hidden_layers
    ]
    if len(found) != 1:
        wanted = f"one module with the input embedding and a list of num_hidden_layers = {text.num_hidden_layers} layers side by side"
        raise _unsupported(model, wanted, [f"{name} of {type(module).__name__}" for module, name, _ in found])
    decoder, layers_name, layers = found[0]
    norms = [name for name, child in decoder.named_children() if _is_norm(child, text.hidden_size)]
    if len(norms) != 1:
        raise _unsupported(model, f"one final norm of width {text.hidden_size} in {type(decoder).__name__}", norms)
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise _unsupported(model, "a linear output head without bias", [repr(head)])
    for what, weight in (("output head", head.weight), ("input embedding", embedding.weight)):
        if not weight.is_floating_point() or weight.dtype.itemsize < 2 or weight.shape[-1] != text.hidden_size:
            raise _unsupported(model, f"an {what} that is not quantised", [f"one of {weight.dtype}, {list(weight.shape)}"])
    return Structure(decoder, embedding, layers, layers_name, norms[0], head)


def truncated_decoder(structure: Structure, depth: int) -> nn.Module:
    """The decoder with its first ``depth`` layers and no final norm.

    A shallow clone: its layers and embedding are the same modules, its lists are its own, so the full model stays as it is for other threads.
    """
    clone = copy.copy(structure.decoder)
    clone._modules = dict(structure.decoder._modules)
    setattr(clone, structure.layers_name, nn.ModuleList(list(structure.layers)[:depth]))
    setattr(clone, structure.norm_name, nn.Identity())
    return clone


class LayerTaps:
    """Records layer outputs. The hooks stay on the layers and do nothing unless the calling thread is recording."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self._recording = threading.local()
        for index, layer in enumerate(layers):
            layer.register_forward_hook(self._hook(index))

    def _hook(self, index: int) -> Any:
        def record(_module: nn.Module, _arguments: Any, output: Any) -> None:
            taps: dict[int, torch.Tensor | None] | None = getattr(self._recording, "taps", None)
            if taps is not None and index in taps:
                taps[index] = output[0] if isinstance(output, tuple) else output

        return record

    @contextlib.contextmanager
    def record(self, tap_layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Within the block, this thread's forward passes fill the yielded mapping: layer id → output [B, T, H]."""
        taps: dict[int, Any] = dict.fromkeys(tap_layers)
        self._recording.taps = taps
        try:
            yield taps
        finally:
            self._recording.taps = None

    def replace(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """What this thread has recorded so far becomes what ``function`` gives for it."""
        taps: dict[int, torch.Tensor | None] = getattr(self._recording, "taps", None) or {}
        for layer, output in taps.items():
            if output is not None:
                taps[layer] = function(output)


def _is_norm(module: nn.Module, width: int) -> bool:
    """Whether a module is a norm over the hidden size: a weight of that width and little else."""
    own = dict(module.named_parameters())
    weight = own.get("weight")
    return "norm" in type(module).__name__.lower() and weight is not None and weight.shape == (width,) and set(own) <= {"weight", "bias"}


def _unsupported(model: Any, wanted: str, found: Sequence[str]) -> TargetError:
    return TargetError(
        f"{type(model).__name__} ({model.config.model_type}) is not a supported kind of target. "
        f"Looked for {wanted}; found {', '.join(found) or 'none'}. "
        "Supported are decoder-only models of Transformers built like Llama, Qwen, Mistral or Gemma; please report others."
    )
