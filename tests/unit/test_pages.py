"""Every block of code on the users' pages is parsed, and each one that can run here runs, in order."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import click
import pytest

from specinfer.cli import cli
from tests.page_folder import PageFolder
from tests.pages import PAGES, ROOT, blocks

pytestmark = pytest.mark.thorough

README = ROOT / "README.md"
IN_CHECKOUT = re.compile(r"(?:benchmarks|deploy|examples|specinfer|tests|tools)/")  # begins a path


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
            for words in block.lines:
                check_words(words)
        if block.language == "python":
            compile(block.text, page.name, "exec")


def check_words(words: list[str]) -> None:
    """Fail if a command line names a file, a module or a target of make that does not exist."""
    for word in words:
        assert not IN_CHECKOUT.match(word) or (ROOT / word).exists(), f"there is no {word}"
    if words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]) is not None, f"there is no module {words[2]}"
    if words[0] == "make":
        done = subprocess.run(
            ["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_a_name_that_does_not_exist_is_found() -> None:
    for line, missing in (
        ("docker build -f deploy/Dockerfile.old .", "there is no deploy/Dockerfile.old"),
        ("python -m benchmarks.identity.speed --out x.md", "there is no module benchmarks.identity.speed"),
        ("make whel", "No rule to make target 'whel'"),
    ):
        with pytest.raises(AssertionError, match=missing):
            pytest.fail(f"{line}: {check_words(line.split())}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_in_blocks_and_reasons_are_sentences(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    assert re.findall(r"^    (?:specinfer [a-z]|python -m|make [a-z]|pip ).*$", prose, re.M) == []
    plain = "\n".join(block.text for block in blocks(page) if block.language in ("", "text"))
    assert re.findall(r"^(?:specinfer [a-z]|python -m|make [a-z]|pip ).*$", plain, re.M) == []
    reasons = re.findall(r"^<!-- not run: .*$", text, re.M)
    assert len(reasons) == sum(block.reason is not None for block in blocks(page)), (
        "one stands before no block"
    )
    assert all(len(block.reason.split()) >= 3 for block in blocks(page) if block.reason)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if any(b.reason is None and b.language in ("sh", "python") for b in blocks(page))
    ],
    ids=lambda page: page.stem,
)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: None) -> None:
    if shutil.which("curl") is None:
        pytest.skip("the pages' requests need curl")
    folder = PageFolder(tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with folder.commands.listening():
        for block in blocks(page):
            text = folder.here(block.text)
            if block.language == "yaml":
                (tmp_path / "server.yaml").write_text(text)
            elif block.reason is None and block.language == "sh":
                place, variables = folder.installation() if block.installs else (tmp_path, folder.variables)
                command = ["bash", "-e", "-o", "pipefail", "-c", text]
                done = subprocess.run(
                    command, cwd=place, env=variables, capture_output=True, text=True, check=False
                )
                assert done.returncode == 0, (text, done.stdout[-2000:], done.stderr[-4000:])
                if folder.commands.processes:
                    with urllib.request.urlopen(f"http://127.0.0.1:{folder.commands.port}/ready", timeout=60):
                        pass
            elif block.reason is None and block.language == "python":
                exec(compile(text, page.name, "exec"), names)
        if (shell := tmp_path / "home" / ".bashrc").exists():
            completes = ["bash", "--norc", "-c", f". {shell} && complete -p specinfer"]
            subprocess.run(completes, env=folder.variables, check=True, capture_output=True)
