"""Blocks of code on the users' pages are parsed and run; what documents name exists; the site builds."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
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


DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
ASSET = re.compile(r"<(?:script|link|img)\b[^>]*\b(?:src|href)=\"?(https?:)?//", re.I)


def texts_of(page: Path, language: str) -> list[str]:
    return [block.text for block in blocks(page) if block.language == language]


def test_links_and_files_that_are_named_exist() -> None:
    folders = "tests|docs|tools|benchmarks|examples|specinfer"
    for page in DOCUMENTS:
        text = page.read_text(encoding="utf-8")
        links = {t for t in re.findall(r"\]\(([^)#]+)", text) if "://" not in t}
        assert {t for t in links if not (page.parent / t).exists()} == set(), page
        text = re.sub(r"\]\([^)]*\)", "]", text)
        named = set(re.findall(rf"(?<!serve/)\b((?:{folders})/[\w/.]+\.(?:py|md))\b", text))
        assert {name for name in named if not (ROOT / name).exists()} == set(), page


def test_files_that_the_code_names_exist() -> None:
    sources = [
        *ROOT.glob("specinfer/**/*.py"),
        *ROOT.glob("specinfer/kernels/cpu/*"),
        *ROOT.glob("tests/native/*"),
    ]
    files = {path.as_posix() for path in ROOT.glob("specinfer/**/*.*")}
    files |= {path.as_posix() for path in ROOT.glob("tests/**/*.*")}
    for source in sources:
        for name in re.findall(r"(?<![\w/<*])(?:\w+/)+\w+\.(?:py|cpp)\b", source.read_text(encoding="utf-8")):
            assert any(file.endswith(f"/{name}") for file in files), f"{source.name}: {name}"


def test_the_readme_is_short_and_shows_commands() -> None:
    lines = [line for block in texts_of(README, "sh") for line in block.splitlines()]
    assert len([line for line in lines if line.startswith("specinfer ")]) >= 2
    assert len(README.read_text(encoding="utf-8").split()) <= 600


def test_the_reference_is_made_of_the_code() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "reference.py"))
    pages = [page.read_text(encoding="utf-8") for page in tool["DOCS"].glob("*.md")]
    made = [part for page in pages for part in re.findall(r"<!-- made: ([\w ]+) -->", page)]
    assert sorted(made) == sorted(tool["PARTS"])
    assert [tool["written"](page) for page in pages] == pages, "run python tools/reference.py"


def test_the_computed_table_of_offloading_is_the_plans() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "offload_page.py"))
    page = tool["PAGE"].read_text(encoding="utf-8")
    assert tool["written"](page) == page, "run python tools/offload_page.py"


def test_the_table_of_drafts_is_of_the_data() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "drafts_page.py"))
    page = tool["PAGE"].read_text(encoding="utf-8")
    assert tool["written"](page) == page, "run python tools/drafts_page.py"


def test_the_table_of_models_has_the_families_that_there_are() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "models_page.py"))
    page = tool["PAGE"].read_text(encoding="utf-8")
    assert tool["written"](page) == page, "run python tools/models_page.py"
    assert sum(row.runs for row in tool["rows_of"](page)) >= 80
    if f"transformers {'.'.join(importlib.metadata.version('transformers').split('.')[:2])} " in page:
        assert [row.kind for row in tool["rows_of"](page)] == tool["kinds"]()


@pytest.mark.slow
def test_the_readmes_program_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    [program], [said] = texts_of(README, "python"), texts_of(README, "text")
    exec(compile(program, README.name, "exec"), {})
    text, steps = capsys.readouterr().out.splitlines()
    assert text == said.splitlines()[0]
    # How many depends on how large trees pay on the machine; a busy one may measure them too dear.
    shown = [re.fullmatch(r"(\d+\.\d) tokens per step", line) for line in (steps, said.splitlines()[1])]
    assert all(shown)
    assert [float(found[1]) > 3 for found in shown if found] == [True, True]


def test_the_glossary_is_short_and_sorted() -> None:
    words = re.findall(r"^\*\*(.+?)\*\*", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.M)
    assert words == sorted(words, key=str.lower)
    assert 0 < len(words) <= 50


def test_every_variable_of_the_environment_is_on_its_page() -> None:
    sources = [*ROOT.glob("specinfer/**/*.py"), ROOT / "setup.py"]
    used = {
        name for path in sources for name in re.findall(r"\bSPECINFER_[A-Z]+(?:_[A-Z]+)*\b", path.read_text())
    }
    page = (ROOT / "docs/environment.md").read_text(encoding="utf-8")
    assert {name for name in used if f"`{name}`" not in page} == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for needed in ("material", "mkdocstrings_handlers"):
        pytest.importorskip(needed, reason="the site is built by packages of: pip install 'specinfer[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # warns of links to nothing, and of pages out of the navigation
    return folder


def test_the_python_page_describes_fields(site: Path) -> None:
    page = (site / "python" / "index.html").read_text(encoding="utf-8")
    for field, comment in (
        ("error", "message, if finish_reason"),
        ("expansion", "widths &lt;k1,k2,...&gt; of"),
    ):
        assert f"<li><code>{field}</code>: {comment}" in page
    above = "[prompt tokens], the first is None; None unless requested."  # a comment above its field
    assert f"<li><code>prompt_logprobs</code>: {above}" in page


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loading = [page for page in site.rglob("*.html") if ASSET.search(page.read_text(encoding="utf-8"))]
    assert loading == []
