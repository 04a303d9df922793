"""Every block of code on the users' pages is parsed, and each one that can run here runs, in order."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest

from specinfer.cli import cli
from tests.page_command import stop
from tests.pages import PAGES, ROOT, blocks, environment, free_port, furnish

HERE = re.compile(r"http://(?:127\.0\.0\.1|localhost):8000")
README = ROOT / "README.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_are_parsed(page: Path) -> None:
    for block in blocks(page):
        assert block.language in ("sh", "python", "yaml", "text", ""), block
        if block.language == "sh":
            done = subprocess.run(
                ["bash", "-n"], input=block.text, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            for name, *arguments in block.commands:
                if name.startswith("--"):
                    assert name in {option for param in cli.params for option in param.opts}
                    continue
                command = cli.get_command(click.Context(cli), name)
                assert command is not None, f"there is no command {name}"
                # Examples name the reader's files; test files replace them.
                own = (".txt", ".jsonl", ".gguf")
                arguments = [str(README) if word.endswith(own) else word for word in arguments]
                command.make_context(name, arguments)  # raises on an unknown option or a bad value
        if block.language == "python":
            compile(block.text, page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_in_blocks_and_reasons_are_sentences(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    assert re.findall(r"^    (?:specinfer [a-z]|python -m|make [a-z]).*$", prose, re.M) == []
    reasons = re.findall(r"^<!-- not run: .*$", text, re.M)
    assert len(reasons) == sum(block.reason is not None for block in blocks(page)), (
        "one stands before no block"
    )
    assert all(len(block.reason.split()) >= 3 for block in blocks(page) if block.reason)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(b.reason is None for b in blocks(page))],
    ids=lambda page: page.stem,
)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("curl") is None:
        pytest.skip("the pages' requests need curl")
    port = free_port()
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    variables = environment(tmp_path, port)
    for name in ("PAGE_PORT", "PAGE_SERVER"):
        monkeypatch.setenv(name, variables[name])
    names: dict[str, Any] = {}
    try:
        for block in blocks(page):
            text = HERE.sub(f"http://127.0.0.1:{port}", block.text)
            if block.language == "yaml":
                (tmp_path / "server.yaml").write_text(text)
            elif block.reason is None and block.language == "sh":
                command = ["bash", "-e", "-o", "pipefail", "-c", text]
                done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
                assert done.returncode == 0, (text, done.stdout[-2000:], done.stderr[-4000:])
            elif block.reason is None and block.language == "python":
                exec(compile(text, page.name, "exec"), names)
    finally:
        stop()
