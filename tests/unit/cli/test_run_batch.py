"""`specinfer run-batch`: a file of requests, with interruptions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specinfer.cli.serve import run_batch
from specinfer.errors import ConfigError, UserError
from tests.tiny_models import write_tiny_llama

_STARTING = 120.0  # seconds; machines that run tests are busy
_OPTIONS = "--dtype float32 --kv-cache-memory 16MB --tree-size fixed --max-batch-size 2"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are bytes, and whose texts end with max_tokens."""
    folder = tmp_path_factory.mktemp("batch") / "tiny"
    write_tiny_llama(folder, vocab_size=128, max_context=1024, eos_token_id=0, tokenizer=True)
    return folder


def write(path: Path, count: int, max_tokens: int = 8) -> None:
    body = {"max_tokens": max_tokens, "ignore_eos": True, "seed": 1}
    requests = (
        {"custom_id": f"r{i}", "url": "/v1/completions", "body": body | {"prompt": f"This is {i}"}}
        for i in range(count)
    )
    path.write_text("".join(f"{json.dumps(request | {'method': 'POST'})}\n" for request in requests))


def begin(model: Path, folder: Path) -> subprocess.Popen[str]:
    files = ("-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"))
    command = [sys.executable, "-m", "specinfer", "run-batch", str(model), *files, *_OPTIONS.split()]
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env, cwd=folder)


def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def wait_for_answers(run: subprocess.Popen[str], folder: Path, count: int) -> None:
    out, until = folder / "out.jsonl", time.monotonic() + _STARTING
    while not out.exists() or out.read_bytes().count(b"\n") < count:
        assert run.poll() is None, run.communicate()[1]
        assert time.monotonic() < until, "no answers come"
        time.sleep(0.01)


@pytest.mark.thorough
def test_a_run_that_is_killed_goes_on_where_it_was(model: Path, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", 24, max_tokens=100)
    with begin(model, tmp_path) as run:
        wait_for_answers(run, tmp_path, 4)
        run.kill()
    before = (tmp_path / "out.jsonl").read_bytes()
    before = before[: before.rindex(b"\n") + 1]
    earlier = before.count(b"\n")
    assert 4 <= earlier < 24
    with begin(model, tmp_path) as run:
        _, log = run.communicate(timeout=_STARTING)
    assert run.returncode == 0, log
    assert f"out.jsonl has 24 answers, 0 of them errors; {earlier} were there before" in log
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before)
    names = [record["custom_id"] for record in answers(tmp_path)]
    assert sorted(names) == sorted(f"r{i}" for i in range(24))
    assert {record["response"]["status_code"] for record in answers(tmp_path)} == {200}
    with begin(model, tmp_path) as run:  # nothing is left, and no model is loaded
        _, log = run.communicate(timeout=_STARTING)
    assert (run.returncode, log.count("24 were there before")) == (0, 1)


def test_an_invalid_run_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in", 1)
    for arguments, complaint in {
        "-i in -o ./in": "the requests and the answers are both in",
        "-i nothing -o out": "nothing is not a file",
        "-i in -o out --expansion 0": "expansion is '0'",
    }.items():
        error = CliRunner().invoke(run_batch, arguments).exception
        assert isinstance(error, (ConfigError, UserError)), arguments
        assert complaint in str(error), arguments
        assert not (tmp_path / "out").exists(), arguments


def test_options_that_only_a_server_has_are_unknown() -> None:
    flags = {flag for option in run_batch.params for flag in option.opts}
    assert {"--draft", "--max-batch-size", "--served-model-name", "--max-n", "--log-traffic"} <= flags
    assert not {"--host", "--port", "--api-key", "--grace", "--max-waiting", "--max-connections"} & flags
