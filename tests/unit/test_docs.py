"""Files and names in documents exist."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
README = ROOT / "README.md"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def test_links_and_files_that_are_named_exist() -> None:
    folders = "tests|docs|tools|benchmarks|examples|specinfer"
    for page in PAGES:
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
    lines = [line for block in blocks(README, "sh") for line in block.splitlines()]
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
    [program], [said] = blocks(README, "python"), blocks(README, "text")
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
