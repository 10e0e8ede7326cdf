import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from storage.lock import stage_lock

HOLDER = """
import sys, time
from pathlib import Path
from storage.lock import stage_lock
with stage_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_waits_for_holder_and_survives_its_sigkill(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "locks" / "hf-key.lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    entered = threading.Event()

    def wait() -> None:
        with stage_lock(path):
            entered.set()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    try:
        while not caplog.records:  # the waiter has found the lock taken
            waiter.join(0.01)
        assert not entered.is_set()
        assert f'"pid": {holder.pid}' in caplog.text and str(path) in caplog.text
    finally:
        holder.kill()
        holder.wait()
    waiter.join(60)
    assert entered.is_set()


def test_threads_exclude_each_other_and_holder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            with stage_lock(path):
                inside += 1
                most = max(most, inside)
                assert json.loads(path.read_text())["pid"] > 0
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert path.read_text() == ""
