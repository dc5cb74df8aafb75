"""Compiled code of earlier starts: where it is kept, who decides, and that a bad cache costs time and nothing else."""

import logging
import os
from pathlib import Path

import pytest
import torch

from dflash_core.errors import ConfigError
from dflash_core.training import compile_cache
from dflash_core.training.compile_cache import with_compile_cache

CPU = [torch.device("cpu")]


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that what is set here is undone afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(compile_cache, "_set", {})


def folder_in_use() -> Path:
    return with_compile_cache(CPU, lambda: Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))


def test_the_folder_is_of_these_versions_and_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_in_use()
    assert folder.parent == tmp_path / "compiled"
    assert f"torch{torch.__version__}" in folder.name
    assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")
    assert folder_in_use() == folder
    monkeypatch.setattr(torch, "__version__", "3.0")
    assert folder_in_use() != folder


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_whoever_sets_the_environment_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, str(tmp_path / "mine"))
    before = dict(os.environ)
    with_compile_cache(CPU, lambda: None)
    assert dict(os.environ) == before


def test_a_cache_that_breaks_warm_up_is_put_aside_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_in_use()
    (folder / "damaged").touch()

    def build() -> str:
        if (folder / "damaged").exists():
            raise RuntimeError("invalid ELF header")
        return "built"

    with caplog.at_level(logging.WARNING):
        assert with_compile_cache(CPU, build) == "built"
    assert "RuntimeError: invalid ELF header" in caplog.text
    assert (folder.with_name(f"{folder.name}.damaged") / "damaged").exists()
    assert folder.is_dir()


@pytest.mark.parametrize("error", [ConfigError("config", []), torch.OutOfMemoryError("full")])
def test_errors_that_are_not_the_caches_are_not_tried_again(error: Exception) -> None:
    (folder_in_use() / "something").touch()
    calls: list[int] = []

    def build() -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error)):
        with_compile_cache(CPU, build)
    assert len(calls) == 1
