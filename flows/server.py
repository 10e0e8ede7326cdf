"""A temporary Prefect server, UI included, in a process of its own.

Prefect would start one by itself, but without a UI, and only when its client first needs it, after everything is
imported; both take seconds. `start` begins at once, so that server and client import side by side.
"""

import gc
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import uvicorn

_START_SECONDS = 180  # the first start creates the database


class ServerError(RuntimeError):
    """The temporary Prefect server does not answer."""


@dataclass(frozen=True)
class TemporaryServer:
    """A server on the database in $PREFECT_HOME. It ends with the process that started it."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path  # what the server has to say, which is of no interest while it works

    def wait(self) -> None:
        """Returns when the server answers.

        Raises:
            ServerError: it ended, or did not answer in time.
        """
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(
                    f"the temporary Prefect server ended with exit code {self.process.returncode}: see {self.log}"
                )
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=_START_SECONDS):
                    return
            except OSError:  # not listening yet, or not yet answering
                time.sleep(0.05)
        raise ServerError(
            f"the temporary Prefect server at {self.url} did not answer within {_START_SECONDS} s: see {self.log}"
        )

    def stop(self) -> None:
        """Ends the server before its time, but not before it has started."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def start() -> TemporaryServer | None:
    """Starts a server, unless the environment names one.

    The server's standard input is a pipe that nobody writes to. It ends when the pipe closes: when this process has
    ended, however it did, after Prefect has sent its last logs and events.
    """
    if os.environ.get("PREFECT_API_URL"):
        return None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect") / "temporary-server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "flows.server", str(port)]
    url = f"http://127.0.0.1:{port}/api"
    with log.open("w") as output:
        # A session of its own: Ctrl-C is for the flow, which still has to tell the server what became of it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"PREFECT_UI_API_URL": url},  # where the UI's pages look: Prefect's default is port 4200
        )
    return TemporaryServer(process, url, log)


def serve(port: int) -> None:
    """`python -m flows.server PORT`: serves Prefect on the loopback interface until standard input closes."""
    gc.disable()  # while importing hardly anything becomes garbage, and looking for it costs seconds
    import uvicorn
    from prefect.server.api.server import create_app

    server = uvicorn.Server(uvicorn.Config(create_app(), host="127.0.0.1", port=port, log_level="error", lifespan="on"))
    gc.freeze()
    gc.enable()
    threading.Thread(target=_end_with_stdin, args=(server,), daemon=True).start()
    server.run()


def _end_with_stdin(server: "uvicorn.Server") -> None:
    sys.stdin.buffer.read()
    while not server.started:  # it may be creating its database, of which there must not remain a half
        time.sleep(0.05)
    server.should_exit = True


if __name__ == "__main__":
    serve(int(sys.argv[1]))
