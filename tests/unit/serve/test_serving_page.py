"""docs/serving.md: its examples run against a server, its table names the paths there are."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.served import Served

PAGE = (Path(__file__).parents[3] / "docs/serving.md").read_text(encoding="utf-8")
HERE = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


@pytest.mark.thorough
def test_the_openai_example_runs(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    [program] = blocks("python")
    exec(compile(program.replace(HERE, served.url), "serving.md", "exec"), {})
    assert re.fullmatch(r"\d+\.\d+ tokens per step", capsys.readouterr().out.splitlines()[-1])


@pytest.mark.thorough
def test_the_curl_examples_run(served: Served) -> None:
    commands = re.findall(
        r"^curl .*?(?:'\{.*?\}'|$)(?=\ncurl|\n\Z|\Z)", "".join(blocks("sh")[1:2]), re.M | re.S
    )
    assert len(commands) == 5
    for command in commands:
        done = subprocess.run(
            ["sh", "-c", command.replace(HERE, served.url) + " --fail-with-body"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout)
        assert done.stdout.startswith("{")


@pytest.mark.thorough
def test_the_table_names_the_paths_there_are(served: Served) -> None:
    named = set(re.findall(r"`(/[\w/-]*)`", "".join(re.findall(r"^\| (`/.*?) \|", PAGE, re.M))))
    described = set(served.get("/openapi.json").json()["paths"])
    described = {path for path in described if "{" not in path} - {"/v1/embeddings"}
    assert named - {"/"} == described
