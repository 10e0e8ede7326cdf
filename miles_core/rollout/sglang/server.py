"""The life of one SGLang server process."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

_LOG_LINES_SHOWN = 40


class ServerError(RuntimeError):
    """The server did not start, or died too often; the message holds the end of its log."""


class SglangServer:
    """Starts `sglang.launch_server` on a free port and keeps its log; `restart` replaces a dead one."""

    def __init__(
        self,
        model: Path,
        server_args: Mapping[str, str | int | float | bool],
        *,
        startup_timeout: float,
        max_restarts: int,
        module: str = "sglang.launch_server",
    ) -> None:
        self._model, self._args, self._module = model, server_args, module
        self._timeout, self._restarts_left = startup_timeout, max_restarts
        self.log = Path(tempfile.mkdtemp(prefix="miles-sglang-")) / "server.log"
        self._start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def alive(self) -> bool:
        """Whether the process runs; a hanging server counts as alive."""
        return self._process.poll() is None

    def restart(self) -> None:
        """Ends what is left of the server and starts a new one, with the weights that lie on disk."""
        self.close()
        if self._restarts_left == 0:
            raise ServerError(f"the SGLang server died more often than rollout.sglang.max_restarts; {self._log_end()}")
        self._restarts_left -= 1
        Console(stderr=True).print(f"SGLang server on port {self._port} died: starting another; log {self.log}")
        self._start()

    def close(self) -> None:
        """Ends the server and all processes it started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # it has ended by itself
        self._process.wait()

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        command = [sys.executable, "-m", self._module, "--model-path", str(self._model)]
        command += ["--host", "127.0.0.1", "--port", str(self._port), *_flags(self._args)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + self._timeout
        while not self._healthy():
            if not self.alive():
                raise ServerError(f"the SGLang server ended with code {self._process.returncode}; {self._log_end()}")
            if time.monotonic() > deadline:
                self.close()
                raise ServerError(
                    f"no answer from the SGLang server in rollout.sglang.startup_timeout={self._timeout} s; "
                    f"{self._log_end()}"
                )
            time.sleep(0.2)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def _log_end(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
        return f"the end of its log ({self.log}):\n" + "\n".join(lines)


def _flags(args: Mapping[str, str | int | float | bool]) -> list[str]:
    """{"mem_fraction_static": 0.5, "disable_radix_cache": True} as command-line flags; false leaves a flag out."""
    flags = []
    for name, value in args.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is not False:
            flags += [flag, str(value)]
    return flags
