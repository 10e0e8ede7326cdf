import os
import tempfile
from pathlib import Path

import pytest

from storage.filesystem import check_writable, list_folder, open_store
from storage.retry import StoreError


@pytest.mark.parametrize("uri", ["{tmp}/store", "{tmp}/store/", "file://{tmp}/store"])
def test_local_uris_name_one_absolute_folder(uri: str, tmp_path: Path) -> None:
    assert open_store(uri.format(tmp=tmp_path))[1] == f"{tmp_path}/store"


def test_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store("a/b")[1] == f"{tmp_path}/a/b"


def test_writable_leaves_nothing_behind(target, tmp_path: Path) -> None:
    check_writable(target.uri, target.endpoint_url)
    fs, root = open_store(target.uri, target.endpoint_url)
    assert list_folder(fs, root.rsplit("/", 1)[0]) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("uri", "endpoint_url", "words"),
    [
        ("{tmp}/file/store", None, ["{tmp}/file", "is a file", "store.uri"]),
        ("{tmp}/file", None, ["is a file", "store.uri"]),
        ("/proc/store", None, ["/proc/store", "can not be written to", "store.uri"]),
        ("nosuch://x/y", None, ["unknown scheme 'nosuch'", "store.uri"]),
        ("s3://", None, ["names no bucket", "store.uri"]),
        ("s3://bucket/x", "http://127.0.0.1:9", ["http://127.0.0.1:9", "store.endpoint_url"]),
        ("s3://bucket/x", "127.0.0.1:9", ["Invalid endpoint", "store.endpoint_url"]),
    ],
)
def test_faults_name_value_and_option(
    uri: str, endpoint_url: str | None, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as caught:
        check_writable(uri.format(tmp=tmp_path), endpoint_url)
    for word in words:
        assert word.format(tmp=tmp_path) in str(caught.value)


def test_missing_bucket(s3) -> None:
    with pytest.raises(StoreError, match=r"bucket 'nowhere-1' .* does not exist: create it, or check upload\.uri"):
        check_writable("s3://nowhere-1/x", s3.endpoint_url, section="upload")


def test_missing_credentials(s3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    type(open_store(s3.uri, s3.endpoint_url)[0]).clear_instance_cache()
    with pytest.raises(StoreError, match=r"no credentials .* AWS_ACCESS_KEY_ID"):
        check_writable(s3.uri, s3.endpoint_url)
    type(open_store(s3.uri, s3.endpoint_url)[0]).clear_instance_cache()


@pytest.mark.skipif(os.geteuid() != 0, reason="drops root's rights in a child process")
def test_no_permission() -> None:
    """In a child without root's rights, since root may write anywhere."""
    with tempfile.TemporaryDirectory() as closed:
        os.chmod(closed, 0o555)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                check_writable(f"{closed}/store")
            except StoreError as error:
                status = 0 if "Permission denied" in str(error) and "store.uri" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert os.listdir(closed) == []
