"""What the documents say is there is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from specinfer.cli import cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
MAP = (ROOT / "docs/map.md").read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def test_the_map_names_every_module_and_no_other() -> None:
    named = set(re.findall(r"^      ([\w/]+\.py) ", MAP, re.M))
    modules = {p.relative_to(ROOT / "specinfer").as_posix() for p in (ROOT / "specinfer").rglob("*.py")}
    there = {m for m in modules if not m.endswith("/__init__.py")} | {"cli/__init__.py"}
    assert named - there == set(), "docs/map.md names files that are gone"
    assert there - named == set(), "docs/map.md needs a line for these files"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = {t for t in re.findall(r"\]\(([^)#]+)", text) if "://" not in t}
    assert {t for t in targets if not (page.parent / t).exists()} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(
        re.findall(r"\b((?:tests|docs|tools|benchmarks|examples|specinfer)/[\w/.]+\.(?:py|md))\b", text)
    )
    assert {name for name in named if not (ROOT / name).exists()} == set()


def commands() -> list[str]:
    """The specinfer commands in the README's shell blocks."""
    lines = "".join(blocks(ROOT / "README.md", "sh")).splitlines()
    return [line for line in lines if line.startswith("specinfer ")]


def test_the_readme_shows_commands() -> None:
    assert len(commands()) >= 5


@pytest.mark.parametrize("line", commands())
def test_the_readmes_commands_are_understood(line: str) -> None:
    _, name, *arguments = shlex.split(line, comments=True)
    command = cli.get_command(click.Context(cli), name)
    assert command is not None, f"there is no command {name}"
    # These files are the reader's own: one of ours stands for them.
    own = (".txt", ".jsonl", ".gguf")
    arguments = [str(ROOT / "README.md") if a.endswith(own) else a for a in arguments]
    command.make_context(name, arguments)  # raises on an unknown option or a bad value


@pytest.mark.slow
def test_the_readmes_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    program = "\n".join(blocks(ROOT / "README.md", "python"))
    exec(compile(program, "README.md", "exec"), {})
    assert re.search(r"^\d+\.\d\d tokens per step$", capsys.readouterr().out, re.M)
