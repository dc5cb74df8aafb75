"""``dflashctl prompts``: all prompts of a configuration in one file, to be carried to a machine that cannot reach their sources."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from dflash_core.data import write_prompts
from dflash_core.retrain.config import load_any_config
from dflash_core.target import TargetModel, load_tokenizer, resolve_target
from dflash_core.target.requests import drawn_requests, generation_by
from flows.one_stage import require_new


def write(path: Path, overrides: Sequence[str], out: Path) -> None:
    """Write ``out`` and print what it holds. Fetches the target, whose tokenizer says which prompts leave room for a response, and who may
    write prompts itself.

    Raises:
        InputError: ``out`` is there already.
        ConfigError, DataError, TargetError: the settings, a source or the target cannot be used.
    """
    require_new("OUT", out)
    config = load_any_config(path, overrides)
    target, info = config.target, resolve_target(config.target)
    tokenizer = load_tokenizer(info.path, target.trust_remote_code)

    @functools.cache
    def load() -> TargetModel:
        return TargetModel.from_pretrained(info, dtype=target.dtype, device=target.device, trust_remote_code=target.trust_remote_code)

    drawn = drawn_requests(config, info, tokenizer, generation_by(info, load))
    counts = write_prompts(drawn.as_source_of(config) if drawn else config, tokenizer, out)
    words = ", ".join(f"{count} {name}" for name, count in counts.items() if name != "conversations")
    print(f"{out}: {counts['conversations']} conversations, {out.stat().st_size:,} bytes ({words})")
