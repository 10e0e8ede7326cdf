import hashlib
from pathlib import Path

import pytest

from storage.filesystem import list_folder, open_store, sizes_in
from storage.manifest import FileEntry, hash_files, list_files
from storage.parts import MiB
from storage.retry import StoreError
from storage.transfer import TransferReport, download_folder, upload_folder


def make(root: Path, contents: dict[str, bytes]) -> list[FileEntry]:
    for name, data in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return hash_files(root, list_files(root))


def noise(size: int, seed: int = 0) -> bytes:
    return hashlib.shake_128(bytes([seed])).digest(size)


THREE = {"config.json": b"{}", "sub/empty": b"", "sub/deep/weights.bin": noise(3 * MiB)}


class Stop(Exception):
    pass


@pytest.mark.parametrize("slash", ["", "/"])
def test_repeated_upload_has_the_same_keys(target, slash: str, tmp_path: Path) -> None:
    files = make(tmp_path / "src", THREE)
    uri = target.uri + "/model" + slash
    reports = [upload_folder(tmp_path / "src", uri, target.endpoint_url, files) for _ in range(2)]
    total = 2 + 3 * MiB
    assert reports == [TransferReport(3, total, 3, total), TransferReport(3, total, 0, 0)]
    assert reports[1].skipped_files == 3
    fs, root = open_store(uri, target.endpoint_url)
    assert sizes_in(fs, root) == {name: len(data) for name, data in THREE.items()}
    assert all(fs.cat_file(f"{root}/{name}") == data for name, data in THREE.items())


def test_listing_sees_what_another_client_wrote(s3) -> None:
    fs, root = open_store(s3.uri, s3.endpoint_url)
    assert list_folder(fs, root) == {}
    type(fs).clear_instance_cache()
    other, _ = open_store(s3.uri, s3.endpoint_url)
    assert other is not fs
    other.pipe_file(f"{root}/new", b"x")
    assert sizes_in(fs, root) == {"new": 1}


def test_multipart_upload_is_planned_and_proven(s3, tmp_path: Path) -> None:
    data = noise(23 * MiB)
    files = make(tmp_path, {"weights.bin": data})
    upload_folder(tmp_path, s3.uri, s3.endpoint_url, files, part_size=5 * MiB)
    fs, root = open_store(s3.uri, s3.endpoint_url)
    bucket, key, _ = fs.split_path(f"{root}/weights.bin")
    parts = [
        fs.call_s3("head_object", Bucket=bucket, Key=key, PartNumber=number)["ContentLength"] for number in range(1, 6)
    ]
    assert parts == [5 * MiB] * 4 + [3 * MiB]
    assert fs.info(f"{root}/weights.bin")["ETag"].strip('"').endswith("-5")
    assert hashlib.sha256(fs.cat_file(f"{root}/weights.bin")).hexdigest() == files[0].sha256
    again = upload_folder(tmp_path, s3.uri, s3.endpoint_url, files, part_size=5 * MiB)
    other_parts = upload_folder(tmp_path, s3.uri, s3.endpoint_url, files)  # another ETag: proven by reading it
    assert again.moved_files == other_parts.moved_files == 0


def test_interrupted_upload_goes_on(target, tmp_path: Path) -> None:
    files = make(tmp_path, {f"shard-{i}": noise(1 * MiB, i) for i in range(20)})
    seen = []

    def stop_after_five(done: int, total: int, what: str) -> None:
        seen.append(what)
        if len(seen) == 5:
            raise Stop

    with pytest.raises(Stop):
        upload_folder(tmp_path, target.uri, target.endpoint_url, files, progress=stop_after_five)
    fs, root = open_store(target.uri, target.endpoint_url)
    there = len(list_folder(fs, root))
    assert 5 <= there < 20
    report = upload_folder(tmp_path, target.uri, target.endpoint_url, files)
    assert report.moved_files == 20 - there and len(list_folder(fs, root)) == 20


def test_interrupted_multipart_upload_leaves_no_parts(s3, tmp_path: Path) -> None:
    files = make(tmp_path, {"weights.bin": noise(20 * MiB)})

    def stop(done: int, total: int, what: str) -> None:
        raise Stop

    with pytest.raises(Stop):
        upload_folder(tmp_path, s3.uri, s3.endpoint_url, files, progress=stop)
    fs, root = open_store(s3.uri, s3.endpoint_url)
    assert "Uploads" not in fs.call_s3("list_multipart_uploads", Bucket=root.split("/")[0])
    assert list_folder(fs, root) == {}


def test_interrupted_download_goes_on_within_a_file(target, tmp_path: Path) -> None:
    files = make(tmp_path / "src", {"a": b"a", "weights.bin": noise(20 * MiB)})
    upload_folder(tmp_path / "src", target.uri, target.endpoint_url, files)

    def stop_in_the_second_file(done: int, total: int, what: str) -> None:
        if done > 9 * MiB:
            raise Stop

    dst = tmp_path / "dst"
    with pytest.raises(Stop):
        download_folder(target.uri, target.endpoint_url, dst, files, progress=stop_in_the_second_file)
    assert sorted(path.name for path in dst.iterdir()) == ["a", "weights.bin.partial"]
    assert (dst / "weights.bin.partial").stat().st_size == 16 * MiB
    steps = []
    report = download_folder(
        target.uri, target.endpoint_url, dst, files, progress=lambda done, total, what: steps.append(done)
    )
    assert steps == [1 + 16 * MiB, 1 + 20 * MiB]
    assert report == TransferReport(2, 1 + 20 * MiB, 1, 20 * MiB)
    assert hash_files(dst, list_files(dst)) == files


def test_damaged_partial_is_fetched_again(memory, tmp_path: Path) -> None:
    files = make(tmp_path / "src", {"weights.bin": noise(20 * MiB)})
    upload_folder(tmp_path / "src", memory.uri, None, files)
    dst = tmp_path / "dst"
    dst.mkdir()
    (dst / "weights.bin.partial").write_bytes(bytes(9 * MiB))
    download_folder(memory.uri, None, dst, files)
    assert hash_files(dst, list_files(dst)) == files


def test_damaged_object_is_named_and_not_kept(target, tmp_path: Path) -> None:
    files = make(tmp_path / "src", THREE)
    upload_folder(tmp_path / "src", target.uri, target.endpoint_url, files)
    fs, root = open_store(target.uri, target.endpoint_url)
    fs.pipe_file(f"{root}/sub/deep/weights.bin", bytes(3 * MiB))
    with pytest.raises(StoreError, match=r"sub/deep/weights\.bin is damaged"):
        download_folder(target.uri, target.endpoint_url, tmp_path / "dst", files)
    assert list_files(tmp_path / "dst") == ["config.json", "sub/empty"]
    report = upload_folder(tmp_path / "src", target.uri, target.endpoint_url, files)
    assert report.moved_files == 1
    download_folder(target.uri, target.endpoint_url, tmp_path / "dst", files)


def test_missing_and_short_objects_are_named_before_the_first_byte(target, tmp_path: Path) -> None:
    files = make(tmp_path / "src", THREE)
    upload_folder(tmp_path / "src", target.uri, target.endpoint_url, files)
    fs, root = open_store(target.uri, target.endpoint_url)
    fs.rm_file(f"{root}/config.json")
    fs.pipe_file(f"{root}/sub/deep/weights.bin", b"short")
    with pytest.raises(StoreError, match=r"config.json \(missing, expected 2 bytes\), sub/deep/weights.bin \(5, expec"):
        download_folder(target.uri, target.endpoint_url, tmp_path / "dst", files)
    assert not (tmp_path / "dst").exists()


def test_changed_local_file_is_refused(target, tmp_path: Path) -> None:
    files = make(tmp_path, {"a": b"first", "b": b"equal"})
    (tmp_path / "a").write_bytes(b"other")
    with pytest.raises(StoreError, match=r"/a has sha256"):
        upload_folder(tmp_path, target.uri, target.endpoint_url, files)
    (tmp_path / "a").write_bytes(b"longer than before")
    with pytest.raises(StoreError, match=r"a \(18, expected 5 bytes\)"):
        upload_folder(tmp_path, target.uri, target.endpoint_url, files)


def test_passing_fault_is_retried(memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make(tmp_path, {"a": b"data"})
    upload_folder(tmp_path, memory.uri, None, files)
    fs, _ = open_store(memory.uri)
    cat_file, calls = fs.cat_file, []

    def failing_once(*args, **kwargs) -> bytes:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionResetError("reset by peer")
        return cat_file(*args, **kwargs)

    monkeypatch.setattr(fs, "cat_file", failing_once)
    download_folder(memory.uri, None, tmp_path / "dst", files)
    assert len(calls) == 2 and (tmp_path / "dst" / "a").read_bytes() == b"data"


def test_names_that_leave_the_folder_are_refused() -> None:
    for name in ("../x", "a/../../x", "/etc/passwd"):
        with pytest.raises(ValueError, match="leaves its artifact"):
            FileEntry(name=name, size=0, sha256="")
