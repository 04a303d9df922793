"""Writes a table of contents into a Markdown file, between two marks."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

BEGIN = "<!-- toc -->"
END = "<!-- /toc -->"
HEADING = re.compile(r"^(#{1,6})\s+(.+?)\s*#*$")


@dataclass(frozen=True)
class Heading:
    level: int
    title: str
    anchor: str


def slug(title: str) -> str:
    """The anchor that the web view gives a heading."""
    text = re.sub(r"[`*_]", "", title).lower()
    text = re.sub(r"[^\w\s-]", "", text)
    return re.sub(r"\s+", "-", text.strip())


def headings(text: str, deepest: int = 3) -> list[Heading]:
    """The headings of a page from level 2 down to `deepest`; equal anchors are numbered."""
    seen: dict[str, int] = {}
    found = []
    for line in text.splitlines():
        match = HEADING.match(line)
        if match is None:
            continue
        level = len(match.group(1))
        title = match.group(2)
        anchor = slug(title)
        count = seen.get(anchor, 0)
        seen[anchor] = count + 1
        if count:
            anchor = f"{anchor}-{count}"
        if 2 <= level <= deepest:
            found.append(Heading(level, title, anchor))
    return found


def table_of_contents(found: list[Heading]) -> str:
    return "\n".join(f"{'  ' * (h.level - 2)}- [{h.title}](#{h.anchor})" for h in found)


def insert(text: str, toc: str) -> str:
    """The page with `toc` between the marks; raises ValueError when they are not there."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{toc}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--depth", type=int, default=3, help="deepest level listed")
    parser.add_argument("--check", action="store_true", help="change nothing, fail when out of date")
    args = parser.parse_args()
    old = args.file.read_text(encoding="utf-8")
    new = insert(old, table_of_contents(headings(old, args.depth)))
    if args.check:
        raise SystemExit(old != new)
    args.file.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
