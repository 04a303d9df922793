"""Write the table of docs/which_draft.md from data/drafts.csv: python tools/drafts_page.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specinfer.hub.known_drafts import known_drafts

PAGE = Path(__file__).resolve().parents[1] / "docs" / "which_draft.md"
BEGIN, END = "<!-- table: tools/drafts_page.py -->\n", "<!-- end -->"


def table() -> str:
    """Return the Markdown table: a row for each draft and what was measured, with its targets."""
    targets: dict[tuple[str, str, str, str], list[str]] = {}
    for row in known_drafts():
        size = row.size if row.bytes else "?"
        targets.setdefault((row.draft, row.form, size, row.measured), []).append(row.target)
    lines = [
        f"|{', '.join(names)}|`{draft}`|{form}|{size}|{measured or '-'}|\n"
        for (draft, form, size, measured), names in targets.items()
    ]
    return "".join(["|target|draft|kind|size|measured|\n", "|---|---|---|---|---|\n", *lines])


def written(page: str) -> str:
    """Return the page with the table of today; raises ValueError if the page has no place for it."""
    before, after = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{after[after.index(END) :]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
