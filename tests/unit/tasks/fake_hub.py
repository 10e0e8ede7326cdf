"""A Hugging Face Hub on loopback: one repository, one commit, and faults on demand."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

REPO = "someone/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Its files, what it is to do wrong, and what it was asked for."""

    files: dict[str, bytes]
    large: set[str]  # stored as LFS: listed with a sha256
    broken: bool = False  # every answer is a 500
    cut_off: str | None = None  # this file ends after half of its bytes
    sent: list[str] = field(default_factory=list)  # names of the files whose bytes were asked for
    url: str = ""

    def listing(self) -> list[dict[str, object]]:
        entries: list[dict[str, object]] = []
        for name, data in self.files.items():
            entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": git_sha1(data)}
            if name in self.large:
                entry["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 130}
            entries.append(entry)
        return entries

    def etag(self, name: str) -> str:
        return sha256(self.files[name]) if name in self.large else git_sha1(self.files[name])


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Serves `hub` at `hub.url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

        def answer(self, with_body: bool) -> None:
            path = urlsplit(self.path).path
            if hub.broken:
                self.reply(500, b"{}", {}, with_body)
            elif path == f"/api/models/{REPO}/tree/{COMMIT}":
                self.reply(200, json.dumps(hub.listing()).encode(), {}, with_body)
            elif path in (f"/api/models/{REPO}", f"/api/models/{REPO}/revision/main"):
                self.reply(200, json.dumps({"id": REPO, "sha": COMMIT, "siblings": []}).encode(), {}, with_body)
            elif path.startswith(f"/{REPO}/resolve/{COMMIT}/") and path.rsplit("/", 1)[1] in hub.files:
                self.send_file(path.rsplit("/", 1)[1], with_body)
            else:
                code = "RevisionNotFound" if path.startswith(f"/api/models/{REPO}/") else "RepoNotFound"
                self.reply(404, b"{}", {"X-Error-Code": code}, with_body)

        def send_file(self, name: str, with_body: bool) -> None:
            data, headers = hub.files[name], {"ETag": f'"{hub.etag(name)}"', "X-Repo-Commit": COMMIT}
            if not with_body:
                self.reply(200, data, headers, with_body)
                return
            hub.sent.append(name)
            start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
            if name == hub.cut_off:
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
                return
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.reply(206 if start else 200, data[start:], headers, with_body)

        def reply(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
