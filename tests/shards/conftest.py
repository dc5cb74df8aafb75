"""A finished dataset, and stores to share it in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shards.fakes import FakeSamples, run


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of an empty bucket of a real S3 server on the loopback."""
    s3fs = pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    import boto3

    with pytest.MonkeyPatch.context() as patch:
        server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="shards")
        s3fs.S3FileSystem.clear_instance_cache()  # they know the server of another module
        yield "s3://shards"
        server.stop()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    run(folder, FakeSamples(22))
    return folder


@pytest.fixture(params=["s3", "file", "memory"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{tmp_path.name}"
    return f"file://{tmp_path}/store" if request.param == "file" else f"memory://{tmp_path.name}"
