"""Pages on the server: their examples run against one, and the table has every path."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.served import Served

DOCS = Path(__file__).parents[3] / "docs"
HERE = "http://127.0.0.1:8000"


def curls(*shells: str) -> list[str]:
    """The curl commands of some blocks."""
    return re.findall(r"^curl .*?(?:'\{.*?\}'|$)(?=\ncurl|\n\Z|\Z)", "".join(shells), re.M | re.S)


def run(command: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=120, check=False, **more
    )


def block(page: str, section: str, language: str) -> str:
    """The only block of that language in a section of a page, without its subsections."""
    whole = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    [text] = re.findall(rf"^#+ {section}\n(.*?)(?=^##+ |\Z)", whole, re.M | re.S)
    [found] = re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)
    return str(found)


@pytest.mark.thorough
def test_the_openai_example_runs(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    program = block("serving", "Requests", "python")
    exec(compile(program.replace(HERE, served.url), "serving.md", "exec"), {})
    assert re.fullmatch(r"\d+\.\d+ tokens per step", capsys.readouterr().out.splitlines()[-1])


@pytest.mark.thorough
def test_the_curl_examples_run(served: Served) -> None:
    commands = curls(block("serving", "Requests", "sh"), block("http", "Anthropic's clients", "sh"))
    assert len(commands) == 6
    for command in commands:
        done = run(command.replace(HERE, served.url) + " --fail-with-body")
        assert done.returncode == 0, (command, done.stdout)
        assert done.stdout.startswith("{")


@pytest.mark.thorough
def test_the_examples_of_filling_in_are_refused_by_a_model_that_cannot(served: Served) -> None:
    commands = curls(block("serving", "Filling in the middle", "sh"))
    assert len(commands) == 2
    for command in commands:
        assert "looked for <|fim_prefix|>" in run(command.replace(HERE, served.url)).stdout


@pytest.mark.thorough
def test_the_example_of_a_batch_runs(folder: Path, tmp_path: Path) -> None:
    command = block("batches", "Offline batches", "sh").replace(
        "specinfer run-batch", f"{sys.executable} -m specinfer run-batch {folder}"
    )
    done = run(command.replace("answers.jsonl", "answers.jsonl --kv-cache-memory 16MB"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == ["one", "two"]
    assert [answer["error"] for answer in answers] == [None, None]


@pytest.mark.thorough
def test_the_table_names_the_paths_there_are(served: Served) -> None:
    page = (DOCS / "http.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(/[\w/-]*)`", "".join(re.findall(r"^\| (`/.*?) \|", page, re.M))))
    described = set(served.get("/openapi.json").json()["paths"])
    described = {path for path in described if "{" not in path} - {"/v1/embeddings"}
    assert named - {"/"} == described
