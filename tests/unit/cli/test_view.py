"""`specinfer view`."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from specinfer.cli import cli
from specinfer.errors import UserError

EVENT = {
    "step": 1,
    "token_ids": [5, 6],
    "parents": [-1, 0],
    "proposed_by": [[], ["lookup"]],
    "path": [1],
    "next_token": 8,
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(EVENT) + "\n")
    return file


def test_it_shows_the_trace_until_it_is_interrupted_without_torch_or_a_web_framework(trace: Path) -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'fastapi', 'uvicorn'): sys.modules[name] = None\n"  # importing them fails
        "from specinfer.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-u", "-c", program, "view", str(trace), "--no-browser"]
    # Tests in the background ignore Ctrl-C, and so would their child processes.
    listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=listening) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        [address] = re.findall(r"http://127\.0\.0\.1:\d+/\?trace=trace\.jsonl", line)
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
        connection.request("GET", "/trace.jsonl")
        assert connection.getresponse().read() == trace.read_bytes()
        connection.close()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


def test_a_file_that_is_no_trace_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "prose.txt").write_text("hello")
    done = CliRunner().invoke(cli, ["view", str(tmp_path / "prose.txt"), "--no-browser"])
    assert isinstance(done.exception, UserError)
    assert "prose.txt, line 1: it is not JSON; give a file" in str(done.exception)
