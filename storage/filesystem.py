"""From a URI to an fsspec file system, and a check that it can be written to."""

import os
import tempfile
import uuid
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from storage.retry import StoreError

_S3_SCHEMES = ("s3", "s3a")


def uri_scheme(uri: str) -> str:
    """`s3` of `s3://bucket/prefix`; `file` of a plain path."""
    return uri.split("://", 1)[0] if "://" in uri else "file"


def open_store(uri: str, endpoint_url: str | None = None) -> tuple[AbstractFileSystem, str]:
    """The file system of `uri`, and the path in it, absolute and without a slash at the end.

    `endpoint_url` is used by s3:// only. Listings are never cached, so that what another process wrote is seen; a
    wrong endpoint fails within seconds.

    Raises:
        StoreError: unknown scheme, missing package for a scheme, or no bucket.
    """
    scheme = uri_scheme(uri)
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme == "file":
        options["auto_mkdir"] = True
    elif scheme in _S3_SCHEMES:
        if not uri.split("://", 1)[1].strip("/"):
            raise StoreError(f"{uri!r} names no bucket; write {scheme}://BUCKET/PREFIX")
        options |= _s3_options(endpoint_url)
    elif scheme not in fsspec.available_protocols():
        raise StoreError(f"unknown scheme {scheme!r} in {uri!r}; use a local path, s3:// or another scheme of fsspec")
    try:
        fs, path = url_to_fs(uri, **options)
    except ImportError as error:
        raise StoreError(f"{uri!r} needs a package that is not installed: {error}") from error
    return fs, path.rstrip("/")


def _s3_options(endpoint_url: str | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "connect_timeout": 5,
        "read_timeout": 60,
        "retries": {"max_attempts": 2, "mode": "standard"},
        "max_pool_connections": 32,
    }
    if endpoint_url is not None:
        # Newer checksum headers are unknown to many S3-compatible servers; transfers send Content-MD5, which all know.
        config |= {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
    return {"endpoint_url": endpoint_url, "config_kwargs": config}


def is_s3(fs: AbstractFileSystem) -> bool:
    """Whether `fs` is S3 itself (its calls are then at hand)."""
    return "s3" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def list_folder(fs: AbstractFileSystem, root: str) -> dict[str, dict[str, Any]]:
    """Names relative to `root` of all files under it -> fsspec's info (`size`; `ETag` on S3); {} if there is none."""
    fs.invalidate_cache()
    try:
        found = fs.find(root, detail=True)
    except FileNotFoundError:
        return {}
    return {path[len(root) + 1 :]: info for path, info in found.items() if path.startswith(f"{root}/")}


def sizes_in(fs: AbstractFileSystem, root: str) -> dict[str, int]:
    """Names relative to `root` of all files under it -> bytes."""
    return {name: info["size"] for name, info in list_folder(fs, root).items()}


def is_local(fs: AbstractFileSystem) -> bool:
    """Whether paths of `fs` are paths of this machine."""
    return isinstance(fs, LocalFileSystem)


def check_writable(uri: str, endpoint_url: str | None = None, *, section: str = "store") -> None:
    """Writes and deletes a small object at `uri` (a permission bit alone proves nothing: root passes it everywhere).

    Args:
        section: configuration section that holds `uri` and `endpoint_url`, for messages.

    Raises:
        StoreError: it can not be written to; the message names the value, the reason and the option.
    """
    try:
        fs, path = open_store(uri, endpoint_url)
        if is_local(fs):
            _probe_local(Path(path))
        else:
            marker = f"{path}/.write-check-{uuid.uuid4().hex}"
            fs.pipe_file(marker, b"")
            fs.rm_file(marker)
    except StoreError as error:
        raise StoreError(f"{error} ({section}.uri)") from error.__cause__
    except Exception as error:  # whatever a file system raises, the user gets one message that names the option
        raise StoreError(_explain(error, uri, endpoint_url, section)) from error


def _probe_local(path: Path) -> None:
    existing = path
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        raise StoreError(f"{str(path)!r} can not be a folder: {str(existing)!r} is a file")
    with tempfile.TemporaryFile(dir=existing) as probe:
        probe.write(b"\0")


def _explain(error: Exception, uri: str, endpoint_url: str | None, section: str) -> str:
    import botocore.exceptions as boto

    at = f"{uri!r}" + (f" at {endpoint_url!r}" if endpoint_url else "")
    if uri_scheme(uri) not in _S3_SCHEMES:
        return f"{at} can not be written to: {error}; choose another {section}.uri"
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.TokenRetrievalError):
        return f"no credentials for {at}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile ({section}.uri)"
    if isinstance(error, FileNotFoundError):
        bucket = uri.split("://", 1)[1].split("/")[0]
        return f"bucket {bucket!r} of {at} does not exist: create it, or check {section}.uri and {section}.endpoint_url"
    if isinstance(error, boto.ParamValidationError):
        return f"{uri!r} is no valid S3 address: {str(error).splitlines()[-1].partition(': ')[0]} ({section}.uri)"
    if isinstance(error, PermissionError):
        return (
            f"{at} refuses to be written to: {error}; it takes credentials with the rights to put and delete objects "
            f"({section}.uri)"
        )
    return (
        f"{at} does not answer as an S3 server: {error}; check {section}.endpoint_url "
        f"({endpoint_url or 'not set: AWS is used'})"
    )
