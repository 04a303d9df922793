"""`specinfer run-batch`: a file of requests, with interruptions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from specinfer.cli.serve import run_batch
from specinfer.errors import ConfigError, UserError
from tests.tiny_models import write_tiny_llama

OPTIONS = "--dtype float32 --kv-cache-memory 16MB --tree-size fixed --max-batch-size 2"


def write(path: Path, count: int) -> None:
    lines = []
    for number in range(count):
        body = {"max_tokens": 8, "ignore_eos": True, "seed": 1, "prompt": f"This is {number}"}
        request = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(request) + "\n")
    path.write_text("".join(lines))


@pytest.mark.thorough
def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """Its last line may have broken off; where nothing is left, no model is loaded."""
    folder = tmp_path / "tiny"
    write_tiny_llama(folder, vocab_size=128, max_context=1024, eos_token_id=0, tokenizer=True)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    words = ["run-batch", str(folder), "-i", str(source), "-o", str(target), *OPTIONS.split()]
    command = [sys.executable, "-m", "specinfer", *words]

    def run(said: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"out.jsonl has 6 answers, 0 of them errors{said}" in done.stderr

    write(source, 6)
    run("")
    whole = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join([*whole[:4], whole[4][:-9]]))
    run("; 4 were there before")
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert target.read_bytes().startswith(b"".join(whole[:4]))
    assert sorted(record["custom_id"] for record in answers) == [f"r{i}" for i in range(6)]
    assert {record["response"]["status_code"] for record in answers} == {200}
    (folder / "model.safetensors").unlink()
    run("; 6 were there before")


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
