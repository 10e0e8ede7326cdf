"""The same pipeline with an S3 server as its store and as the place where it publishes."""

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Finished, small_config
from moto.server import ThreadedMotoServer

from miles_core.config.run import RunConfig
from storage.filesystem import list_folder, open_store
from storage.store import ArtifactStore
from tasks.pipeline import PIPELINE

STEPS = {step.name for step in PIPELINE}


@pytest.fixture(scope="module")
def s3_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunConfig]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint, bucket = f"http://{host}:{port}", f"bucket-{uuid.uuid4().hex[:8]}"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        fs, _ = open_store(f"s3://{bucket}", endpoint)
        fs.call_s3("create_bucket", Bucket=bucket)
        yield small_config(f"s3://{bucket}/store", endpoint, name="on-s3", upload={"uri": f"s3://{bucket}/published"})
    server.stop()


@pytest.fixture(scope="module")
def s3_run(run: Callable[..., Finished], s3_config: RunConfig) -> Finished:
    return run(s3_config)


def test_whole_run(s3_run: Finished, s3_config: RunConfig) -> None:
    assert s3_run.ran == STEPS
    store = ArtifactStore(s3_config.store.uri, s3_config.store.endpoint_url)
    assert {entry.complete for entry in store.ls()} == {True}
    for entry in store.ls():
        ref = store.find(entry.kind, entry.key)
        assert ref is not None
        store.verify(ref)


def test_weights_are_those_of_the_run_in_a_local_folder(s3_run: Finished, first_run: Finished) -> None:
    digests = [{stage.stage: stage.digest for stage in finished.summary.stages} for finished in (s3_run, first_run)]
    for step in ("download", "convert", "quantize", "train", "export"):
        assert digests[0][step] == digests[1][step], step


def test_release_is_whole(s3_run: Finished, s3_config: RunConfig) -> None:
    assert s3_config.upload.uri is not None
    fs, root = open_store(s3_config.upload.uri, s3_config.store.endpoint_url)
    key = fs.cat_file(f"{root}/latest").decode().strip()
    manifest = json.loads(fs.cat_file(f"{root}/{key}/MANIFEST.json"))
    present = {name: info["size"] for name, info in list_folder(fs, f"{root}/{key}").items()}
    assert {entry["name"]: entry["size"] for entry in manifest["files"]}.items() <= present.items()
    assert s3_run.summary.paths["published"] == f"{s3_config.upload.uri}/{key}"


def test_again_all_is_cached_and_a_deleted_object_is_noticed(
    run: Callable[..., Finished], s3_run: Finished, s3_config: RunConfig
) -> None:
    assert run(s3_config).ran == set()
    (export,) = [stage for stage in s3_run.summary.stages if stage.stage == "export"]
    fs, path = open_store(export.uri, s3_config.store.endpoint_url)
    fs.rm_file(f"{path}/model.safetensors")
    assert run(s3_config).ran == {"export"}


def test_another_machine_takes_everything_from_the_store(
    run: Callable[..., Finished],
    s3_run: Finished,
    s3_config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(s3_config).ran == set()
    assert run(s3_config, refresh=("evaluate",)).ran == {"evaluate-initial", "evaluate-exported"}
