"""From the name of a target to its folder on this machine: the built-in model, a local folder, or a Hugging Face repository.

info = resolve_target(config.target)
"""

from __future__ import annotations

import os
from pathlib import Path

from dflash_core.config import TargetConfig
from dflash_core.errors import TargetError
from dflash_core.stages import Progress, no_progress
from dflash_core.target import smollm2
from dflash_core.target.info import TargetInfo, read_target_info

_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def resolve_target(config: TargetConfig, cache_dir: Path | None = None, progress: Progress | None = None, *, download: bool = True) -> TargetInfo:
    """Find the target, fetching what is missing, and read what is to be known of it.

    Args:
        config: the ``target`` section.
        cache_dir: where the built-in target is kept. Default: ``$DFLASH_CACHE``, else ``~/.cache/dflash-pipeline``.
            Hugging Face models go to the hub's own cache, where other tools find them too.
        progress: told when fetching begins and ends.
        download: False only looks at what this machine already has.

    Raises:
        TargetError: no such folder or repository, files missing or damaged, or not fetched yet and ``download`` is False.
    """
    progress = progress or no_progress
    if config.model == smollm2.NAME:
        progress(0, 1, "targets")
        folder = smollm2.ensure_smollm2(cache_dir) if download else smollm2.find_smollm2(cache_dir)
        progress(1, 1, "targets")
        return read_target_info(folder, name=smollm2.NAME, repository=smollm2.REPOSITORY)
    local = Path(config.model).expanduser()
    if local.is_dir():
        return read_target_info(local, trust_remote_code=config.trust_remote_code)
    if is_path(config.model):
        raise TargetError(f"target.model = {config.model!r}: expected the folder of a model, found nothing at {local.absolute()}. Correct the path.")
    progress(0, 1, "targets")
    folder = _snapshot(config, download)
    progress(1, 1, "targets")
    name = config.model
    return read_target_info(folder, name=name, revision=folder.name, repository=name, trust_remote_code=config.trust_remote_code)


def is_path(model: str) -> bool:
    """Whether a name can only be meant as a path: repositories are called ``name`` or ``owner/name``."""
    return model.startswith((".", "~", os.sep)) or model.count("/") > 1 or "\\" in model


def _snapshot(config: TargetConfig, download: bool) -> Path:
    """Folder of a repository in the hub's cache; its last component is the commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*_PATTERNS, "*.py"] if config.trust_remote_code else _PATTERNS
    try:
        return Path(snapshot_download(config.model, revision=config.revision, allow_patterns=patterns, local_files_only=not download))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = f" at revision {config.revision!r}" if config.revision else ""
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = (
            "Check the name, the network, and HF_TOKEN if the repository is gated; or download it elsewhere and give its folder"
            if download
            else "It is fetched when the pipeline runs"
        )
        raise TargetError(
            f"target.model = {config.model!r}{at} is not on this machine and could not be had from Hugging Face: {reason}. {remedy}."
        ) from error
