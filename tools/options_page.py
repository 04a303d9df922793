"""Write the tables of docs/options.md from the config classes: python tools/options_page.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specinfer.config import ENGINE_OPTIONS
from specinfer.option import Option, options_of
from specinfer.serve.config import ServeConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
TABLES = {"engine": [one for _, one in ENGINE_OPTIONS.values()], "server": list(options_of(ServeConfig))}


def table(options: Sequence[Option]) -> str:
    """Return a Markdown table of options, their defaults and their purposes."""
    rows = ["| option | default | |", "|---|---|---|"]
    for one in options:
        default = one.about.shown or f"`{one.shown_default() or 'none'}`"
        text = f"{one.about.purpose} {one.about.more}".rstrip()
        rows.append(f"| `{one.name}` | {default} | {text} |")
    return "\n".join(rows)


def written(page: str) -> str:
    """Return the page with new tables; raises ValueError if the page has no place for one."""
    for name, options in TABLES.items():
        begin, end = f"<!-- {name} options: tools/options_page.py -->\n", "<!-- end -->"
        before, after = page.split(begin)
        page = before + begin + table(options) + "\n" + after[after.index(end) :]
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
