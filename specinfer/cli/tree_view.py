"""Token trees drawn as text: what was guessed, by whom, and what the target made of it.

    step 3: 2 of 4 accepted
    " the"
    |-- " cat" (draft, lookup) *
    |   |-- " sat" (draft) *
    |   |   `=> " on"
    |   `-- " ran" (draft)
    `-- " dog" (draft)

A star (and colour, on a terminal) marks the accepted path; the arrow is the target's own next token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specinfer.engine.trace import TreeEvent

_STYLES = {"accepted": "32;1", "bonus": "36;1", "rejected": "2"}  # SGR codes: green, cyan, dim


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a drawing; `mark` is '', 'accepted', 'bonus' or 'rejected' and concerns `text` alone."""

    branches: str
    text: str
    mark: str

    def plain(self) -> str:
        """The line without colour."""
        return self.branches + self.text

    def coloured(self) -> str:
        """The line for a terminal."""
        style = _STYLES.get(self.mark)
        return self.branches + (f"\x1b[{style}m{self.text}\x1b[0m" if style else self.text)


def draw_tree(event: TreeEvent, token_text: Callable[[int], str]) -> list[Line]:
    """The lines of one step's tree, the title first; `token_text` gives the text of a token id."""
    from specinfer.tree.token_tree import proposed_by

    tree, acceptance = event.tree, event.acceptance
    children = [list(below.values()) for below in tree.children()]
    names = proposed_by(tree)
    accepted = set(acceptance.path)
    last = acceptance.path[-1] if acceptance.path else 0
    guesses = tree.num_nodes - 1
    title = f"step {event.step}: {f'{len(accepted)} of {guesses} accepted' if guesses else 'no guesses'}"
    lines = [Line("", title, ""), Line("", _quoted(token_text(tree.token_ids[0])), "")]

    def below(node: int, indent: str) -> None:
        entries: list[int | None] = [*children[node]]
        if node == last:
            entries.append(None)  # the bonus token
        for entry in entries:
            end = entry is entries[-1]
            if entry is None:
                lines.append(Line(indent + "`=> ", _quoted(token_text(acceptance.next_token)), "bonus"))
                continue
            star = " *" if entry in accepted else ""
            text = f"{_quoted(token_text(tree.token_ids[entry]))} ({', '.join(names[entry])}){star}"
            mark = "accepted" if entry in accepted else "rejected"
            lines.append(Line(indent + ("`-- " if end else "|-- "), text, mark))
            below(entry, indent + ("    " if end else "|   "))

    below(0, "")
    return lines


def _quoted(text: str) -> str:
    """The text between double quotes, with what would move the cursor escaped."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return '"' + shown.replace('"', '\\"') + '"'
