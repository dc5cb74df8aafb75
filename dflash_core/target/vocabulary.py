"""The target's embedding and head, which the drafter shares: frozen, and all of the target that offline training needs.

    vocabulary = TargetVocabulary.from_pretrained(info, dtype=torch.bfloat16, device="cuda:0")

Shapes: V vocabulary, H hidden.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch.nn import functional

from dflash_core.errors import TargetError
from dflash_core.target.info import TargetInfo, read_target_info
from dflash_core.target.quick import QuickLinear
from dflash_core.target.weights import StoredTensor, stored_tensors

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
_FLOATS = ("BF16", "F16", "F32", "F64")  # what is smaller is quantised, and nothing without its scales
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")


class TargetVocabulary:
    """What tokens look like at the target's input and how hidden states become logits at its output.

    embedding_weight: [V, H], without the scale
    head_weight:      [V, H]; the same tensor as embedding_weight if the target ties them and is not spread over devices
    embedding_scale, logit_softcap, logit_scale: as in ``TargetInfo``
    """

    def __init__(self, embedding_weight: torch.Tensor, head_weight: torch.Tensor, info: TargetInfo) -> None:
        self.embedding_weight = embedding_weight.detach()
        self.head_weight = self.embedding_weight if head_weight is embedding_weight else head_weight.detach()
        self.embedding_scale = info.embedding_scale
        self.logit_softcap = info.logit_softcap
        self.logit_scale = info.logit_scale
        self._head = QuickLinear(self.head_weight) if self.head_weight.device.type == "cpu" else None
        # Gemma rounds the factor to the precision of the weights before it multiplies.
        self._scale = torch.tensor(info.embedding_scale, dtype=torch.float32).to(embedding_weight)

    @classmethod
    def from_pretrained(cls, source: TargetInfo | str | Path, *, dtype: torch.dtype, device: str | torch.device = "cpu") -> TargetVocabulary:
        """Read the two tensors straight from the safetensors files (sharded or not); the model is not loaded.

        Raises:
            TargetError: the files are damaged, or hold no embedding or head of the configured size.
        """
        info = source if isinstance(source, TargetInfo) else read_target_info(source)
        tensors = stored_tensors(Path(info.path))
        embedding = _read(*_find(tensors, _EMBEDDINGS, "input embedding", info), dtype, device)
        if info.tie_word_embeddings:
            return cls(embedding, embedding, info)
        return cls(embedding, _read(*_find(tensors, _HEADS, "output head", info), dtype, device), info)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights and of what ``embed`` returns."""
        return self.embedding_weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding_weight.device

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., H] of token ids [...], exactly as the target's first layer gets them."""
        embeddings = functional.embedding(ids, self.embedding_weight)
        return embeddings if self.embedding_scale == 1.0 else embeddings * self._scale

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., H] that have passed the final norm, scaled and soft-capped as the target's are.

        They are where the hidden states are, also if the head is elsewhere: that of a target spread over devices is on the last one.
        """
        if self._head is None:
            logits = functional.linear(hidden.to(self.head_weight.device), self.head_weight).to(hidden.device)
        else:
            logits = self._head(hidden)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits


def _find(tensors: dict[str, StoredTensor], endings: tuple[str, ...], what: str, info: TargetInfo) -> tuple[str, StoredTensor]:
    """The one tensor of size [V, H] whose name ends in one of the usual ways."""
    shape = (info.vocab_size, info.hidden_size)
    found = {name: tensor for name, tensor in tensors.items() if name.endswith(endings) and tensor.shape == shape and tensor.dtype in _FLOATS}
    if len(found) != 1:
        raise TargetError(
            f"{info.path}: expected one tensor of shape {list(shape)} and of 16 bits or more as the {what}, named like {', '.join(endings)}; "
            f"found {', '.join(sorted(found)) or 'none'}. "
            "The model is of a kind that is not supported, or its weights are incomplete."
        )
    return next(iter(found.items()))


def _read(name: str, tensor: StoredTensor, dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    with safe_open(tensor.file, framework="pt") as file:
        return file.get_tensor(name).to(device=device, dtype=dtype)
