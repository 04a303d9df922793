"""The fork server of the tests: commands that cannot run, and a server that cannot start."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest


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
