"""What the rest of the pipeline must know of a target without loading it: dimensions, rotary base, token ids, digests.

    info = read_target_info("path/to/model")

Everything comes from the folder's configuration and tokenizer; the weights are hashed, never read into memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_core.config import TargetConfig, digest_of
from dflash_core.errors import TargetError
from dflash_core.target.quantised import quantisation_of
from dflash_core.target.weights import cached_sha256, read_json, stored_tensors

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "vocab.txt")
_TOKENIZER_EXTRAS = ("merges.txt", "added_tokens.json", "special_tokens_map.json")


@dataclass(frozen=True)
class TargetInfo:
    """Facts about a target. JSON-able by ``to_dict``; sizes are counts, digests are sha256 in hex.

    name:             as the config names it; a local folder by its last component
    path, revision:   folder on this machine; commit of the Hugging Face repository, None for folders
    digest:           of config.json and all weight files
    tokenizer_digest: of the tokenizer's files without the chat template
    template_digest:  of the chat template; None when the tokenizer has none
    rope_parameters:  of full attention, as Transformers 5 spells them (rope_type, rope_theta, …)
    eos_token_ids:    every token that ends an answer
    embedding_scale:  factor on the embeddings before the first layer (Gemma: sqrt(hidden_size)), 1.0 for most
    logit_softcap:    c of c·tanh(logits / c); None for most
    logit_scale:      factor on the head's output, 1.0 for most
    quantisation:     how the weights are stored ('fp8', 'gptq', …); None where they are plain
    repository:       the Hugging Face repository where servers find it; None for folders
    """

    name: str
    path: str
    revision: str | None
    digest: str
    tokenizer_digest: str
    template_digest: str | None
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    attention_bias: bool
    rope_theta: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    bos_token_id: int | None
    embedding_scale: float
    logit_softcap: float | None
    logit_scale: float
    quantisation: str | None = None
    repository: str | None = None

    @property
    def served_as(self) -> str:
        """What a server is told to load: the repository, where there is one."""
        return self.repository or self.name

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return {**asdict(self), "eos_token_ids": list(self.eos_token_ids)}


def static_cache_bytes(info: TargetInfo, rows: int, capacity: int, element: int) -> int:
    """Bytes of a ``StaticCache`` of a target all of whose layers have the same heads, with ``element`` bytes a number."""
    return 2 * info.num_layers * rows * info.num_kv_heads * (capacity + 1) * info.head_dim * element


def read_target_info(
    source: str | Path | TargetConfig,
    *,
    name: str | None = None,
    revision: str | None = None,
    repository: str | None = None,
    trust_remote_code: bool = False,
) -> TargetInfo:
    """Read a model folder, or the folder that a ``TargetConfig`` means if it is already on this machine (nothing is fetched).

    Raises:
        TargetError: configuration, weights or tokenizer are missing or damaged; names the file and the remedy.
    """
    if isinstance(source, TargetConfig):
        from dflash_core.target.fetch import resolve_target

        return resolve_target(source, download=False)
    folder = Path(source).expanduser().resolve()
    config = load_config_of(folder, trust_remote_code)
    stored_tensors(folder)  # a truncated file is an error here, not after minutes of loading
    tokenizer = load_tokenizer(folder, trust_remote_code)
    text = config.get_text_config(decoder=True)
    if not hasattr(text, "model_type"):
        raise TargetError(
            f"{folder / 'config.json'}: text_config = {str(text)[:60]}: expected the settings of a language model. Fetch the model again."
        )
    rope = _rope_parameters(text)
    template = tokenizer.chat_template
    return TargetInfo(
        name=name or folder.name,
        path=str(folder),
        revision=revision,
        digest=_weights_digest(folder),
        tokenizer_digest=_tokenizer_digest(folder),
        template_digest=digest_of(template) if template else None,
        model_type=config.model_type,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocab_size=text.vocab_size,
        rms_norm_eps=_first(text, "rms_norm_eps", "layer_norm_eps", "norm_eps") or 1e-6,
        attention_bias=bool(getattr(text, "attention_bias", False)),
        rope_theta=float(rope["rope_theta"]),
        rope_parameters=rope,
        max_position_embeddings=text.max_position_embeddings,
        tie_word_embeddings=bool(text.tie_word_embeddings),
        eos_token_ids=_eos_token_ids(folder, text, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        embedding_scale=_embedding_scale(text),
        logit_softcap=getattr(text, "final_logit_softcapping", None),
        logit_scale=_logit_scale(text),
        quantisation=quantisation_of(folder),
        repository=repository,
    )


def load_config_of(folder: Path, trust_remote_code: bool = False) -> Any:
    """The Transformers configuration in ``folder``. Raises ``TargetError`` when it is missing, unreadable or of an unknown kind."""
    if not folder.is_dir():
        raise TargetError(f"{folder}: expected the folder of a target model, found no folder. Correct target.model.")
    if not (folder / "config.json").is_file():
        raise TargetError(f"{folder}: expected config.json, found none. Point target.model at the folder of a Hugging Face model.")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # Transformers raises many kinds here; all mean that this file cannot be used
        remedy = "Check the file; a new kind of model may need a newer transformers, one with its own code needs target.trust_remote_code: true"
        raise TargetError(f"{folder / 'config.json'} cannot be used: {_summary(error)}. {remedy}.") from error


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer in ``folder``.

    Raises:
        TargetError: there is none. Checked here, because Transformers would make up an empty one from config.json.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise TargetError(f"{folder}: expected a tokenizer (one of {', '.join(_TOKENIZER_FILES)}), found none. Copy it from the original model.")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # as above
        raise TargetError(
            f"{folder}: its tokenizer cannot be loaded: {_summary(error)}. Copy the tokenizer's files from the original model."
        ) from error


def _weights_digest(folder: Path) -> str:
    files = [folder / "config.json", *sorted({tensor.file for tensor in stored_tensors(folder).values()})]
    return digest_of([[path.name, cached_sha256(path)] for path in files])


def _tokenizer_digest(folder: Path) -> str:
    parts: list[Any] = [[name, cached_sha256(folder / name)] for name in (*_TOKENIZER_FILES, *_TOKENIZER_EXTRAS) if (folder / name).is_file()]
    settings = folder / "tokenizer_config.json"
    if settings.is_file():  # holds the template too, which has a digest of its own
        parts.append({key: value for key, value in read_json(settings).items() if key != "chat_template"})
    return digest_of(parts)


def _rope_parameters(text: Any) -> dict[str, Any]:
    parameters = getattr(text, "rope_parameters", None) or {}
    if parameters and all(isinstance(value, dict) or value is None for value in parameters.values()):  # one entry per kind of layer (Gemma 3)
        parameters = parameters.get("full_attention") or {}
    theta = parameters.get("rope_theta") or getattr(text, "rope_theta", None)
    if theta is None:
        raise TargetError(f"A model of type {text.model_type} has no rotary base (rope_theta). Only targets with rotary positions are supported.")
    return {"rope_type": "default", **parameters, "rope_theta": float(theta)}


def _eos_token_ids(folder: Path, text: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids of the generation configuration if there is one, else of the model's; and the tokenizer's own."""
    generation: dict[str, Any] = {}
    path = folder / "generation_config.json"
    if path.is_file():
        generation = read_json(path)
    found = generation.get("eos_token_id", getattr(text, "eos_token_id", None))
    ids = [] if found is None else list(found) if isinstance(found, list | tuple) else [found]
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if not all(type(token) is int for token in ids):
        raise TargetError(f"{folder}: eos_token_id = {ids} in generation_config.json or config.json: expected token ids. Correct it there.")
    if not ids:
        raise TargetError(
            f"{folder}: no end-of-sequence token in generation_config.json, config.json or the tokenizer. Add eos_token_id to one of them."
        )
    return tuple(dict.fromkeys(ids))


def _embedding_scale(text: Any) -> float:
    if str(text.model_type).startswith("gemma"):
        return float(text.hidden_size**0.5)
    return float(getattr(text, "embedding_multiplier", None) or 1.0)  # Granite


def _logit_scale(text: Any) -> float:
    divisor = getattr(text, "logits_scaling", None)  # Granite divides, Cohere multiplies
    return 1.0 / float(divisor) if divisor else float(getattr(text, "logit_scale", None) or 1.0)


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _summary(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": .")
