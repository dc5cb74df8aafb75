"""Importing another trainer from its wheel where half of what it asks for is not installed."""

from __future__ import annotations

import sys
import zipfile

import pytest

pytest.importorskip("triton")

from benchmarks.peers import import_peer, unpacked

SOURCE = """
from absent_logger import logger
import absent_client.types
Handle = absent_client.types.Handle | None
def size(x): return len(x)
def log(x): return logger.info(x)
"""


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "peer_of_a_test-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("peer_of_a_test/__init__.py", "from peer_of_a_test.core import size")
        archive.writestr("peer_of_a_test/core.py", SOURCE)
        archive.writestr("peer_of_a_test/broken.py", "import peer_of_a_test.nowhere")
    yield path
    for name in [name for name in sys.modules if name.startswith("peer_of_a_test")]:
        del sys.modules[name]


def test_absent_packages_are_stood_in_for_and_named_and_are_absent_again_afterwards(wheel):
    with unpacked(wheel) as root:
        (package, core), absent = import_peer(root, ("peer_of_a_test", "peer_of_a_test.core"))
    assert absent == ["absent_client", "absent_logger"]
    assert package.size([1, 2]) == 2
    with pytest.raises(AttributeError):
        core.log("a stand-in may be named, not used")
    with pytest.raises(ModuleNotFoundError):
        __import__("absent_logger")


def test_a_module_that_the_peer_itself_lacks_is_no_absent_package(wheel):
    with unpacked(wheel) as root, pytest.raises(ModuleNotFoundError, match="nowhere"):
        import_peer(root, ("peer_of_a_test.broken",))
