"""Draw docs/images/trees.svg, the moving picture of the README: python tools/tree_picture.py.

It answers PROMPT with the model and the draft head of the package, in trees of a fixed size, and draws the
steps of the trace. Each step shows the proposals, then the accepted ones and the bonus token. The picture
is SVG with CSS animation, readable on light and dark pages.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from html import escape
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "images" / "trees.svg"
PROMPT = "Write a Python function that adds two numbers."
COMMAND = ("generate", "--draft", "smollm2-135m-head", "--tree-size", "fixed", "--max-nodes", "12")
SAMPLING = ("--temperature", "0", "--max-tokens", "60")
END_OF_ANSWER = "```"  # steps behind the function are not drawn

SECONDS_OF_A_FRAME = 1.1
WIDTH, COLUMN, ROW, TOP, LEFT = 860, 132, 30, 176, 24
STYLE = """
svg { --page: #f6f8fa; --ink: #1f2328; --faint: #8c959f; --line: #afb8c1; --good: #1a7f37; --own: #0969da;
  font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
@media (prefers-color-scheme: dark) { svg { --page: #161b22; --ink: #e6edf3; --faint: #7d8590;
  --line: #484f58; --good: #3fb950; --own: #58a6ff } }
.page { fill: var(--page); stroke: var(--line) } text { fill: var(--ink) } .faint { fill: var(--faint) }
path { fill: none; stroke: var(--line); stroke-width: 1.5 }
rect.node { fill: var(--page); stroke: var(--line) }
.good rect { stroke: var(--good); stroke-width: 2 } .good text { fill: var(--good); font-weight: 600 }
.own rect { stroke: var(--own); stroke-width: 2 } .own text { fill: var(--own); font-weight: 600 }
"""


@dataclass(frozen=True)
class Step:
    """A step of a trace. Node 0 is the last token of the text, `path` the accepted nodes below it."""

    texts: list[str]
    parents: list[int]
    path: list[int]
    next_text: str

    @property
    def made(self) -> list[str]:
        """The tokens that the step adds to the text."""
        return [*(self.texts[node] for node in self.path), self.next_text]


def recorded() -> list[Step]:
    """The steps of the answer to PROMPT, up to the end of its program."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        command = [sys.executable, "-m", "specinfer", *COMMAND, *SAMPLING, "--trace", str(trace), PROMPT]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    steps = [Step(row["texts"], row["parents"], row["path"], row["next_text"]) for row in rows]
    ends = [i for i, step in enumerate(steps) if i and END_OF_ANSWER in step.made]
    return steps[: ends[0] + 1] if ends else steps


def picture(steps: list[Step]) -> str:
    """The SVG of the steps, two frames for each: the guesses, and what became of them."""
    frames, text = [], ""
    passes, tokens = 0, 0
    for step in steps:
        guesses = _count(len(step.texts) - 1, "guess")
        frames.append(_frame(step, text, f"pass {passes + 1}: {guesses}", verified=False))
        passes, tokens = passes + 1, tokens + len(step.made)
        text += "".join(step.made)
        gain = f"pass {passes}: {_count(len(step.path), 'guess')} accepted and one token of the model's own"
        frames.append(_frame(step, text, f"{gain}; {_count(tokens, 'token')} so far", verified=True))
    height = TOP + ROW * max(len(_rows(step)) and max(_rows(step)) + 1 for step in steps) + 20
    total = SECONDS_OF_A_FRAME * len(frames)
    share = 100 / len(frames)
    styles = [STYLE, f"@keyframes show {{ 0% {{ opacity: 1 }} {share:.3f}%, 100% {{ opacity: 0 }} }}"]
    styles.append(f".frame {{ opacity: 0; animation: show {total:.1f}s infinite step-end }}")
    styles.append(".frame:last-child { opacity: 1 }")
    shown = []
    for i, frame in enumerate(frames):
        delay = f"animation-delay: {(i - len(frames)) * SECONDS_OF_A_FRAME:.1f}s"
        shown.append(f'<g class="frame" style="{delay}">\n{frame}\n</g>')
    title = f"Token trees of the answer to: {PROMPT}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{''.join(styles)}</style>",
            f'<rect class="page" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="8"/>',
            f'<text class="faint" x="{LEFT}" y="28">&gt; {escape(PROMPT)}</text>',
            *shown,
            "</svg>\n",
        ]
    )


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _frame(step: Step, text: str, caption: str, *, verified: bool) -> str:
    lines = text.split("\n")[-5:]
    drawn = [
        f'<text x="{LEFT}" y="{50 + 19 * i}" xml:space="preserve">{escape(line)}</text>'
        for i, line in enumerate(lines)
    ]
    drawn.append(f'<text class="faint" x="{LEFT}" y="{TOP - 22}">{escape(caption)}</text>')
    rows, depths = _rows(step), _depths(step)
    places = [(LEFT + COLUMN * depth, TOP + ROW * row) for row, depth in zip(rows, depths, strict=True)]
    good = step.path if verified else []  # not node 0, which is text already
    for node, parent in enumerate(step.parents):
        if parent >= 0:
            drawn.append(_line(places[parent], places[node]))
        drawn.append(_node(places[node], step.texts[node], "good" if node in good else ""))
    if verified:
        last = step.path[-1] if step.path else 0
        taken = [places[node] for node, parent in enumerate(step.parents) if parent == last]
        x = places[last][0] + COLUMN
        y = max([y for _, y in taken], default=places[last][1] - ROW) + ROW
        free = next(y + ROW * i for i in range(30) if (x, y + ROW * i) not in places)
        drawn += [_line(places[last], (x, free)), _node((x, free), step.next_text, "own")]
    return "\n".join(drawn)


def _depths(step: Step) -> list[int]:
    depths: list[int] = []
    for parent in step.parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def _rows(step: Step) -> list[int]:
    """A row for each node: its first child's, the accepted child being the first; others stand below."""
    children: list[list[int]] = [[] for _ in step.parents]
    for node, parent in enumerate(step.parents):
        if parent >= 0:
            children[parent].append(node)
    rows = [0] * len(step.parents)
    row, todo = -1, [0]
    begins_row = {0}
    while todo:
        node = todo.pop()
        row += node in begins_row
        rows[node] = row
        below = sorted(children[node], key=lambda child: child not in step.path)
        begins_row.update(below[1:])
        todo += reversed(below)
    return rows


def _line(start: tuple[int, int], end: tuple[int, int]) -> str:
    x, bend = start[0] + COLUMN - 26, start[0] + COLUMN - 13
    return f'<path d="M{x} {start[1]} H{bend} V{end[1]} H{end[0]}"/>'


def _node(place: tuple[int, int], text: str, kind: str) -> str:
    x, y = place
    shown = json.dumps(text, ensure_ascii=False)
    shown = shown if len(shown) <= 12 else shown[:11] + "~"
    box = f'<rect class="node" x="{x}" y="{y - 12}" width="{COLUMN - 26}" height="24" rx="5"/>'
    return f'<g class="{kind}">{box}<text x="{x + 7}" y="{y + 5}">{escape(shown, quote=False)}</text></g>'


if __name__ == "__main__":
    PAGE.write_text(picture(recorded()), encoding="utf-8")
