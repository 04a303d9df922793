"""CURRENT.toml names the result pages that are current, by question, and the folder has no others."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections import defaultdict
from datetime import date, timedelta
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
RESULTS = BENCHMARKS / "results"
OLDEST = timedelta(days=60)  # maximum age of a page, relative to the newest one
WITHOUT_COMMAND = {"identity_2026-11-22"}  # a table of many runs


def stale(listed: dict[str, list[str]], pages: dict[str, str], scripts: set[str]) -> list[str]:
    """Why pages, given by name with their text, are not current; empty if all are."""
    names = [name for question in listed.values() for name in question]
    problems = [f"{name} is not in CURRENT.toml: list it, or delete it" for name in pages.keys() - {*names}]
    problems += [f"{name} is in CURRENT.toml, and there is no such page" for name in {*names} - pages.keys()]
    problems += [f"{name} is in CURRENT.toml twice" for name in {*names} if names.count(name) > 1]
    versions: dict[str, list[str]] = defaultdict(list)
    for name in pages:
        versions[name.rpartition("_")[0]].append(name)
    days = {name: date.fromisoformat(name.rpartition("_")[2]) for name in pages}
    for same in versions.values():
        *older, newest = sorted(same)
        problems += [f"{name} is replaced by {newest}: delete it" for name in older]
    for name, text in pages.items():
        if max(days.values()) - days[name] > OLDEST:
            problems.append(
                f"{name} is more than {OLDEST.days} days older than the newest page: measure again"
            )
        command = re.search(r"python (?:-m )?(benchmarks[./][\w./]+)", text)
        script = command[1].removesuffix(".py").replace("/", ".").rpartition(".")[2] if command else None
        of_a_card = name.startswith("gpu_")  # by tests/gpu/run.py
        if script not in scripts and name not in WITHOUT_COMMAND and not of_a_card:
            problems.append(f"{name} was made by {script}, which is gone: delete it")
    return sorted(problems)


def test_every_page_is_current() -> None:
    listed = tomllib.loads((RESULTS / "CURRENT.toml").read_text(encoding="utf-8"))
    pages = {path.stem: path.read_text(encoding="utf-8") for path in RESULTS.glob("*.md")}
    assert stale(listed, pages, {path.stem for path in BENCHMARKS.rglob("*.py")}) == []


def test_every_command_of_a_page_leads_to_a_script() -> None:
    table = (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    moved = {
        name: command.replace("NAME", name)
        for names, command in re.findall(
            r"^\| (`\w+`.*) \| `python -m (benchmarks\.\w+\.NAME)` \|$", table, re.M
        )
        for name in re.findall(r"`(\w+)`", names)
    }
    commands = [
        command
        for path in RESULTS.glob("*.md")
        for command in re.findall(r"python (?:-m )?(benchmarks[./][\w./]+)", path.read_text(encoding="utf-8"))
    ]
    scripts = {moved[Path(one).stem] if one.endswith(".py") else one for one in commands}
    assert len(scripts) > 20
    assert {one for one in scripts if importlib.util.find_spec(one) is None} == set()
