"""The fork server of the tests: commands that cannot run, and a server that cannot start."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fork_server import AVAILABLE, forking_popen


def test_an_error_before_the_module_runs_is_raised_at_once(
    fork_server: type[subprocess.Popen[Any]], tmp_path: Path
) -> None:
    command, before = [sys.executable, "-m", "specinfer", "--version"], psutil.Process().children()
    began = time.monotonic()
    with pytest.raises(OSError, match="missing"):
        fork_server(command, cwd=tmp_path / "missing")
    assert time.monotonic() - began < 20.0
    assert psutil.Process().children() == before
    with fork_server(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:  # its own reply is next
        assert process.communicate()[0].startswith(b"specinfer")
    assert process.returncode == 0


@pytest.mark.skipif(not AVAILABLE, reason="needs CLONE_PARENT of Linux")
def test_processes_start_as_usual_if_the_server_has_more_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.warns(UserWarning, match="has not started"), forking_popen() as popen:
        assert popen is subprocess.Popen
