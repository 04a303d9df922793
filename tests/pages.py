"""Code blocks of the pages.

A comment `<!-- not run: REASON -->` in front of a block keeps it from being run; it is parsed all the same.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAB = ("map.md", "glossary.md")  # for those who read the code: nothing to run
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in ROOT.glob("docs/*.md") if page.name not in LAB),
    *sorted(ROOT.glob("docs/benchmarks/*.md")),
]
_BLOCK = re.compile(r"^(?:<!-- not run: ([^\n]*?) -->\n)?```(\w*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block; `reason` says why it is not run."""

    language: str
    text: str
    reason: str | None

    @property
    def lines(self) -> list[list[str]]:
        """The words of each command line in a block of shell, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        # A line inside of a quoted text, such as JSON for curl, is no command line.
        return [shlex.split(line, comments=True) for line in lines if _is_whole(line)]

    @property
    def commands(self) -> list[list[str]]:
        """The words of each specinfer command, without the program's name.

        The image's entry point is `specinfer serve`, so `docker run IMAGE OPTIONS` is one, too.
        """
        found = []
        for words in self.lines:
            if "specinfer" not in words:
                continue
            after = words[words.index("specinfer") + 1 :]
            if words[:2] == ["docker", "run"]:
                found.append(["serve", *after])
            elif words[0] not in ("docker", "kubectl"):
                found.append(after)
        return found

    @property
    def installs(self) -> bool:
        """True if it installs packages with pip."""
        return any("pip" in words and "install" in words for words in self.lines)


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order."""
    return [Block(language, text, reason or None) for reason, language, text in _found(page)]


def _found(page: Path) -> Iterator[tuple[str, str, str]]:
    for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield match[1], match[2], match[3]


def _is_whole(line: str) -> bool:
    try:
        return bool(shlex.split(line, comments=True))
    except ValueError:
        return False
