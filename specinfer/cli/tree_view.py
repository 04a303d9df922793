"""Steps shown as text: their token trees, and who guessed, who did not, expectations and results.

    step 3: 2 of 4 accepted
    " the"
    |-- " cat" (draft, lookup) *
    |   |-- " sat" (draft) *
    |   |   `=> " on"
    |   `-- " ran" (draft)
    `-- " dog" (draft)

A star (and colour, on a terminal) marks the accepted path; the arrow is the target's own next token.
`specinfer generate --explain` prints the same steps as a table:

     step  guessed                  did not          expected  came  guesses  expected    took
        7  lookup 3 of 7, draft 2   grammar: no guess    3.21     4    5.1      24.0    23.1
        8                           all: plain step      1.00     1    0.0      18.9    19.4

Tokens are the request's; milliseconds are those of the step, which serves all requests there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from specinfer.speculate.decision import GUESSED, REQUEST, Contribution, Decision

if TYPE_CHECKING:
    from specinfer.engine.steps import TreeEvent
    from specinfer.request import RequestOutput

    _Explained = tuple[TreeEvent, Decision, int]  # a step, its decision, and its tokens of the answer

_WIDTH: Final = 120  # columns of the table when the output is not a terminal


def show_tree(event: TreeEvent, token_text: Callable[[int], str]) -> None:
    """Print the tree of a step, in colours on a terminal."""
    colour = False if os.environ.get("NO_COLOR") else None  # None: on a terminal
    click.echo("\n".join([*draw_tree(event, token_text), ""]), color=colour)


def draw_tree(event: TreeEvent, token_text: Callable[[int], str]) -> list[str]:
    """The lines of one step's tree, coloured, the title first; `token_text` gives the text of a token id."""
    from specinfer.tree.token_tree import proposed_by

    tree, acceptance = event.tree, event.acceptance
    children = [list(below.values()) for below in tree.children()]
    names = proposed_by(tree)
    accepted = set(acceptance.path)
    last = acceptance.path[-1] if acceptance.path else 0
    guesses = tree.num_nodes - 1
    title = f"step {event.step}: {f'{len(accepted)} of {guesses} accepted' if guesses else 'no guesses'}"
    lines = [title, _quoted(token_text(tree.token_ids[0]))]

    def below(node: int, indent: str) -> None:
        entries: list[int | None] = [*children[node]]
        if node == last:
            entries.append(None)  # the bonus token
        for entry in entries:
            end = entry is entries[-1]
            if entry is None:
                bonus = click.style(_quoted(token_text(acceptance.next_token)), fg="cyan", bold=True)
                lines.append(f"{indent}`=> {bonus}")
                continue
            text = f"{_quoted(token_text(tree.token_ids[entry]))} ({', '.join(names[entry])})"
            if entry in accepted:
                text = click.style(f"{text} *", fg="green", bold=True)
            else:
                text = click.style(text, dim=True)
            lines.append(indent + ("`-- " if end else "|-- ") + text)
            below(entry, indent + ("    " if end else "|   "))

    below(0, "")
    return lines


def _quoted(text: str) -> str:
    """The text between double quotes, with control characters escaped."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return '"' + shown.replace('"', '\\"') + '"'


def steps_as_json(events: Sequence[TreeEvent], answer: RequestOutput) -> list[dict[str, Any]]:
    """An answer's steps as plain JSON values, with decisions and results."""
    return [
        {
            "step": event.step,
            **decision.to_json(),
            "tokens": tokens,
            "seconds": round(sum(event.seconds.values()), 6),
        }
        for event, decision, tokens in _explained(events, answer)
    ]


def print_steps(events: Sequence[TreeEvent], answer: RequestOutput) -> None:
    """Print an answer's steps as a table, and their totals."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    steps = _explained(events, answer)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step", justify="right")
    table.add_column("guessed (verified of drawn)")
    table.add_column("did not")
    for name in ("tokens expected", "tokens", "guesses ms", "expected ms", "took ms"):
        table.add_column(name, justify="right")
    never = _never(steps)
    for event, decision, tokens in steps:
        table.add_row(
            str(event.step),
            ", ".join(
                f"{one.name} {one.verified} of {one.drawn}"
                for one in decision.contributions
                if one.reason == GUESSED
            ),
            _others([one for one in decision.contributions if one.name not in never]),
            "-" if decision.expected_tokens is None else f"{decision.expected_tokens:.2f}",
            str(tokens),
            _milliseconds(decision.guess_seconds),
            _milliseconds(decision.seconds),
            _milliseconds(sum(event.seconds.values())),
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    console.print(table)
    console.print(_total(steps), soft_wrap=True)


def _explained(events: Sequence[TreeEvent], answer: RequestOutput) -> list[_Explained]:
    """The answer's steps; accepted tokens after the end of the text do not count."""
    found: list[_Explained] = []
    left = len(answer.token_ids)
    for event in events:
        if event.request_id != answer.request_id:
            continue
        tokens = min(len(event.acceptance.path) + 1, left)
        left -= tokens
        if event.decision is not None:
            found.append((event, event.decision, tokens))
    return found


def _total(steps: Sequence[_Explained]) -> str:
    """Totals of all steps, expected and measured, and the speculators that never guess."""
    parts = [f"{len(steps)} steps, including the prompt's, {sum(tokens for *_, tokens in steps)} tokens"]
    likely = [decision.expected_tokens for _, decision, _ in steps if decision.expected_tokens is not None]
    if likely:
        parts.append(f"{sum(likely):.1f} expected")
    timed = [(event, decision.seconds) for event, decision, _ in steps if decision.seconds is not None]
    if timed:
        expected = sum(seconds for _, seconds in timed)
        took = sum(sum(event.seconds.values()) for event, _ in timed)
        parts.append(f"{1e3 * expected:.0f} ms expected, {1e3 * took:.0f} ms taken")
    if never := _never(steps):
        parts.append(f"{', '.join(never)}: {REQUEST}")
    return "; ".join(parts)


def _never(steps: Sequence[_Explained]) -> list[str]:
    """The speculators that may not guess for the request at all, or have nothing to guess from."""
    return [one.name for one in steps[0][1].contributions if one.reason == REQUEST] if steps else []


def _others(contributions: Sequence[Contribution]) -> str:
    """Speculators without guesses, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for one in contributions:
        if one.reason != GUESSED:
            by_reason.setdefault(one.reason, []).append(one.name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"
