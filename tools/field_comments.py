"""Extension of the site's Python reference (mkdocs.yml): classes are shown with the comments of their fields.

A field's comment is behind it, or in lines above it.
"""

from __future__ import annotations

from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Adds a list of the commented public fields to the docstring of each class."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Mutates the docstring of `cls`, whose members are complete."""
        fields = [one for one in cls.members.values() if one.is_attribute and not one.name.startswith("_")]
        found = {one.name: _comment(one).replace("<", "&lt;") for one in fields}
        rows = [f"- `{name}`: {comment}" for name, comment in found.items() if comment]
        if rows and cls.docstring is not None:
            cls.docstring.value += "\n\n" + "\n".join(rows)


def _comment(field: griffe.Object | griffe.Alias) -> str:
    """Return the comment behind a field, else the one above it; empty: there is none."""
    lines = field.lines_collection[field.filepath]
    first, last = field.lineno or 1, field.endlineno or 1
    if behind := lines[last - 1].partition("  # ")[2]:
        return behind
    above: list[str] = []
    while first > 1 and lines[first - 2].lstrip().startswith("# "):
        first -= 1
        above.insert(0, lines[first - 1].strip().removeprefix("# "))
    return " ".join(above)
