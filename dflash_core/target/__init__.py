"""The frozen target: finding it, tapping its hidden states, generating with it.

Names are loaded on first use, so that ``dflash_core.target.info`` needs neither torch nor Transformers at import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_core.target.fetch import resolve_target
    from dflash_core.target.info import TargetInfo, load_tokenizer, read_target_info, static_cache_bytes
    from dflash_core.target.model import TargetModel, TargetOutput
    from dflash_core.target.static import StaticTarget
    from dflash_core.target.vocabulary import TargetVocabulary
    from dflash_core.target.weights import loaded_bytes

__all__ = [
    "StaticTarget",
    "TargetInfo",
    "TargetModel",
    "TargetOutput",
    "TargetVocabulary",
    "load_tokenizer",
    "loaded_bytes",
    "read_target_info",
    "resolve_target",
    "static_cache_bytes",
]

_HOMES = {
    "StaticTarget": "static",
    "TargetInfo": "info",
    "TargetModel": "model",
    "TargetOutput": "model",
    "TargetVocabulary": "vocabulary",
    "load_tokenizer": "info",
    "loaded_bytes": "weights",
    "read_target_info": "info",
    "resolve_target": "fetch",
    "static_cache_bytes": "info",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
