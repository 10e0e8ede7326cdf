"""Uploads to S3 whose integrity the server's ETag proves, without reading the object back."""

import base64
import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from fsspec.spec import AbstractFileSystem

from storage.parts import PartPlan
from storage.retry import with_retries


def md5(data: bytes) -> bytes:
    """Digest that S3 checks a part against (no matter of security here)."""
    return hashlib.md5(data, usedforsecurity=False).digest()


def expected_etag(part_md5s: Sequence[bytes]) -> str:
    """The ETag that S3 gives an object sent in parts with these digests: md5 of the one, or md5 of the md5s and count.

    Source: AWS, "Checking object integrity". Objects encrypted with SSE-KMS or SSE-C have other ETags.
    """
    if len(part_md5s) == 1:
        return part_md5s[0].hex()
    return f"{md5(b''.join(part_md5s)).hex()}-{len(part_md5s)}"


class S3Upload:
    """One object on its way: a put for a single part, else a multipart upload that `finish` or `abort` ends."""

    def __init__(self, fs: AbstractFileSystem, path: str, plan: PartPlan) -> None:
        bucket, key, _ = fs.split_path(path)
        self._call = partial(_call, fs, path, Bucket=bucket, Key=key)
        self._etags: dict[int, str] = {}
        self._upload_id = None if plan.count == 1 else self._call("create_multipart_upload")["UploadId"]

    def send(self, number: int, data: bytes, data_md5: bytes) -> None:
        """Sends part `number`, counted from 1; the server refuses it if its md5 differs."""
        body = {"Body": data, "ContentMD5": base64.b64encode(data_md5).decode()}
        if self._upload_id is None:
            answer = self._call("put_object", **body)
        else:
            answer = self._call("upload_part", UploadId=self._upload_id, PartNumber=number, **body)
        self._etags[number] = answer["ETag"]

    def finish(self) -> str:
        """Makes the object visible; returns its ETag without quotes."""
        if self._upload_id is None:
            return self._etags[1].strip('"')
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(self._etags.items())]
        answer = self._call("complete_multipart_upload", UploadId=self._upload_id, MultipartUpload={"Parts": parts})
        return answer["ETag"].strip('"')

    def abort(self) -> None:
        """Drops the parts sent so far; they would be stored, and paid for, but never seen."""
        if self._upload_id is not None:
            self._call("abort_multipart_upload", UploadId=self._upload_id)


def _call(fs: AbstractFileSystem, path: str, method: str, **kwargs: Any) -> dict[str, Any]:
    return with_retries(lambda: fs.call_s3(method, **kwargs), f"{method} {path}")
