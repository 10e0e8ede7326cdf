"""Real stores: a local folder, fsspec's memory file system, and an S3 server on loopback."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from moto.server import ThreadedMotoServer

from storage.filesystem import open_store
from storage.store import ArtifactStore


@dataclass(frozen=True)
class Target:
    """A place to store at."""

    uri: str
    endpoint_url: str | None
    scratch: Path

    def store(self, machine: str = "a") -> ArtifactStore:
        """The store as seen from one of several machines."""
        return ArtifactStore(self.uri, self.endpoint_url, scratch=self.scratch / machine)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Target:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    fs, _ = open_store(f"s3://{bucket}", s3_server)
    fs.call_s3("create_bucket", Bucket=bucket)
    return Target(f"s3://{bucket}/prefix", s3_server, tmp_path / "scratch")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Target]:
    yield Target("memory://root/store", None, tmp_path / "scratch")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def local(tmp_path: Path) -> Target:
    return Target(str(tmp_path / "store"), None, tmp_path / "scratch")


@pytest.fixture(params=["local", "memory", "s3"])
def target(request: pytest.FixtureRequest) -> Target:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["memory", "s3"])
def remote(request: pytest.FixtureRequest) -> Target:
    return request.getfixturevalue(request.param)
