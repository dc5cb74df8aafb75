"""``dflashctl prompts``: all prompts of a configuration in one file, to be carried to a machine that cannot reach their sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash_core.data import write_prompts
from dflash_core.retrain.config import load_any_config
from dflash_core.target import load_tokenizer, resolve_target
from flows.one_stage import require_new


def write(path: Path, overrides: Sequence[str], out: Path) -> None:
    """Write ``out`` and print what it holds. Fetches the target, whose tokenizer says which prompts leave room for a response.

    Raises:
        InputError: ``out`` is there already.
        ConfigError, DataError, TargetError: the settings, a source or the target cannot be used.
    """
    require_new("OUT", out)
    config = load_any_config(path, overrides)
    info = resolve_target(config.target)
    counts = write_prompts(config, load_tokenizer(info.path, config.target.trust_remote_code), out)
    words = ", ".join(f"{count} {name}" for name, count in counts.items() if name != "conversations")
    print(f"{out}: {counts['conversations']} conversations, {out.stat().st_size:,} bytes ({words})")
