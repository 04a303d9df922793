"""Check the English of pages, docstrings, comments and messages.

    python tools/prose.py                     check the whole repository
    python tools/prose.py specinfer/engine    check a folder or a file

Sentences are read from Markdown with markdown-it and from Python with ast and tokenize. prose_rules.py has
this project's rules; proselint adds its general ones (cliches, archaisms, misspellings, doubled words).
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import proselint.checks
from markdown_it import MarkdownIt
from prose_rules import RULES
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

ROOT = Path(__file__).resolve().parents[1]
CHECKED = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs",
    "specinfer",
    "benchmarks",
    "examples",
    "tests",
    "tools",
)
HISTORY = ("benchmarks/results/",)  # dated entries, kept as they were written
MAX_WORDS = 35

_CODE = "CODE"  # stands for a code span
# Keywords of texts for users.
_SHOWN = ("help", "short_help", "epilog", "purpose", "more", "allowed", "shown")
_SHOWING = re.compile(r"^(?:info|warning|error|echo|secho)$|(?:Error|Exception|refused?)$")
_END = re.compile(r"[.!?][\"')]*\s+(?=[\"'(]?[A-Z0-9`])|\s\|\s")

_ANY = re.compile("|".join(rule.pattern for rule in RULES), re.IGNORECASE)  # most sentences match no rule
_OFF = (
    "typography",
    "terms",
    "annotations",
    "spelling.consistency",
    "weasel_words.very",
    "misc.but",
    "dates_times",  # "bf16 amx" is no time of day
)
_PROSELINT = DEFAULT | {"checks": dict.fromkeys(_OFF, False) | DEFAULT["checks"] | dict.fromkeys(_OFF, False)}


class Passage(NamedTuple):
    """A paragraph, list item, heading, comment or message, and the line that it starts on."""

    line: int
    text: str  # lines are separated by newlines


class Problem(NamedTuple):
    """A match of a rule."""

    path: str
    line: int
    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.found!r}: {self.advice}"


def passages(path: Path) -> list[Passage]:
    """Return the prose of a Markdown or Python file."""
    text = path.read_text(encoding="utf-8")
    return list(dict.fromkeys(_of_markdown(text) if path.suffix == ".md" else _of_python(text)))


def _of_markdown(text: str) -> Iterator[Passage]:
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for token in tokens:
        if token.type != "inline" or token.map is None:
            continue
        words = []
        for child in token.children or ():
            if child.type == "code_inline":
                words.append(_CODE)
            elif child.type in ("softbreak", "hardbreak"):
                words.append("\n")
            elif child.type == "text":
                words.append(child.content)
        yield Passage(token.map[0] + 1, "".join(words))


def _of_python(text: str) -> Iterator[Passage]:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                docstring = node.body[0].value  # type: ignore[attr-defined]
                yield from _paragraphs(docstring.lineno, docstring.value)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from _messages(node.exc.args[:1])
        elif isinstance(node, ast.Call):
            yield from _messages(_shown(node))
    yield from _comments(text)


def _shown(call: ast.Call) -> list[ast.expr]:
    """Return the arguments of a call that users read."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    shown = [keyword.value for keyword in call.keywords if keyword.arg in _SHOWN]
    if name == "option":
        shown += call.args[1:2]
    elif _SHOWING.search(name):
        shown += call.args[:1]
    return shown


def _messages(nodes: Sequence[ast.expr]) -> Iterator[Passage]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else _CODE for part in node.values)
        else:
            continue
        if " " in text:
            yield Passage(node.lineno, text.replace("\n", " "))


def _paragraphs(line: int, docstring: str) -> Iterator[Passage]:
    """Split a docstring at blank lines and list items; leave indented code out."""
    lines = docstring.splitlines()
    indent = min((len(one) - len(one.lstrip()) for one in lines[1:] if one.strip()), default=0)
    held: list[str] = []
    for number, one in enumerate([*lines, ""]):
        content = one if number == 0 else one[indent:]
        ends = not content.strip() or content.startswith("    ") or content.lstrip().startswith(("- ", "* "))
        if held and ends:
            yield Passage(line + number - len(held), _plain("\n".join(held)))
            held = []
        if content.strip() and not (content.startswith("    ") and not held):
            held.append(content.strip())


def _comments(text: str) -> Iterator[Passage]:
    held: list[str] = []
    first = last = column = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, at = token.start
        content = token.string.lstrip("#:").strip()
        content = re.sub(r"(?:^|#\s*)(?:noqa|type: ignore|fmt:|mypy:|pragma:|!)[^#]*", "", content).strip()
        alone = not token.line[:at].strip()
        if held and not (alone and row == last + 1 and at == column):
            yield Passage(first, _plain("\n".join(held)))
            held = []
        if not content:
            continue
        if not held:
            first = row
        held.append(content)
        last, column = row, at
    if held:
        yield Passage(first, _plain("\n".join(held)))


def _plain(text: str) -> str:
    return re.sub(r"``?[^`]+``?", _CODE, text)


def sentences(passage: Passage) -> Iterator[Passage]:
    """Split a passage into sentences, with the line that each starts on."""
    begin = 0
    for end in [*(match.end() for match in _END.finditer(passage.text)), len(passage.text)]:
        sentence = passage.text[begin:end]
        if sentence.strip():
            yield Passage(passage.line + passage.text.count("\n", 0, begin), " ".join(sentence.split()))
        begin = end


def problems(path: Path) -> list[Problem]:
    """Return the problems of a file, by line."""
    name = path.resolve().relative_to(ROOT).as_posix() if path.resolve().is_relative_to(ROOT) else str(path)
    found = []
    whole = passages(path)
    for sentence in (one for passage in whole for one in sentences(passage)):
        if _ANY.search(sentence.text):
            matches = ((rule.find(sentence.text), rule) for rule in RULES)
            found += [Problem(name, sentence.line, match, rule.advice) for match, rule in matches if match]
        if (words := len(sentence.text.split())) > MAX_WORDS:
            advice = f"{words} words; at most {MAX_WORDS}"
            found.append(Problem(name, sentence.line, sentence.text[:40] + "...", advice))
    return sorted({*found, *_general(name, whole)}, key=lambda one: one.line)


def _general(name: str, whole: Sequence[Passage]) -> Iterator[Problem]:
    """Run proselint's checks over the passages, as the paragraphs of one text."""
    if not whole:
        return
    if not CheckRegistry().checks:
        CheckRegistry().register_many(proselint.checks.__register__)
    lines: list[int] = []
    for passage in whole:
        lines += range(passage.line, passage.line + passage.text.count("\n") + 1)
        lines.append(passage.line)  # the line of the dot behind it
    text = "\n.\n".join(passage.text for passage in whole)
    for result in LintFile(name, text).lint(_PROSELINT):
        line = lines[
            text.count("\n", 0, result.check_result.span[0])
        ]  # the span begins after an added newline
        check = result.check_result
        if check.check_path == "lexical_illusions" and re.search(rf"{_CODE}|in '\W*\w\W", check.message):
            continue  # two code spans, or a drawing
        yield Problem(name, line, check.check_path, " ".join(check.message.split()))


def files(names: Sequence[str]) -> list[Path]:
    """Return the tracked files with prose below the folders and files named, history left out."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *names]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    named = [name for name in listed if name.endswith((".md", ".py")) and not name.startswith(HISTORY)]
    return [ROOT / name for name in named if (ROOT / name).exists()]


def main(names: Sequence[str]) -> int:
    """Print the problems of the named or all files; return 1 if there are any."""
    with ProcessPoolExecutor() as pool:
        found = list(chain.from_iterable(pool.map(problems, files(names or CHECKED), chunksize=8)))
    for one in found:
        print(one)
    if found:
        print(f"{len(found)} problems; CONTRIBUTING.md says how we write")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main([Path(name).resolve().relative_to(ROOT).as_posix() for name in sys.argv[1:]]))
