"""Tree decoding against other ways to verify several tokens at once, on the same targets."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from benchmarks.paper.lab import Lab
from benchmarks.paper.passes import BLOCK, expanded, filled_runner, medians, paths, tree_rows
from benchmarks.paper.plots import INK, bars
from benchmarks.paper.question import Cells, Figure, Figures, Verdict
from benchmarks.paper.ways import PLAIN, compare, shaped
from benchmarks.study import spread, table
from specinfer.models.language_model import LanguageModel

ASKS: Final = "Do trees beat other ways to verify several tokens at once?"
_TREE: Final = (1, 1, 3, 1, 1, 1, 1, 1)  # the paper's expansion
_LEVELS: Final = {"head": 5, "pair": 8}  # levels that the head and the draft guess
_TARGETS: Final = {
    "head": "SmolLM2-135M, guesses of its block head",
    "pair": "Qwen2.5-Coder-1.5B, guesses of the 0.5B",
}
_PAPER: Final = 1.2  # speed of trees over sequences, at least
_TEXT: Final = 128  # cached tokens before the passes that are timed
_BEAMS: Final = "beams"
_WAYS: Final = {
    PLAIN: "one token a step",
    "lookup": "prompt lookup, sized by cost",
    "sequence": "sequence",
    "tree": "tree",
    _BEAMS: "a sequence for each leaf of the tree",
    "cost": "tree sized by cost",
    "all": "tree sized by cost, with lookups",
}


def keys(lab: Lab) -> list[str]:
    targets = lab.pick(full=("head", "pair"), quick=("head",), toy=("head",))
    kinds = lab.pick(full=("Alpaca", "humaneval"), quick=("Alpaca", "humaneval"), toy=("Alpaca",))
    return [f"{name},{kind}" for name in targets for kind in kinds]


def measure(lab: Lab, key: str) -> Figures:
    name, kind = key.split(",")
    cost: dict[str, Any] = {"tree_size": "cost"}
    ways = {
        "lookup": {**cost, "lookup": True, "drafts": ()},
        "sequence": shaped(*[1] * len(_TREE)),
        "tree": shaped(*_TREE),
        "cost": cost,
        "all": {**cost, "lookup": True},
    }
    count, tokens, rounds, passes = lab.pick(full=(6, 48, 2, 9), quick=(3, 32, 1, 3), toy=(1, 8, 1, 1))
    questions = lab.questions(kind, count)
    figures = compare(lab, name, ways, questions, batch=1, max_tokens=tokens, rounds=rounds)
    target, drafts = lab.pair(name)
    with lab.llm(target, drafts) as llm:
        return {"ways": figures, "passes": _passes(llm.models.target, _TREE[: _LEVELS[name]], passes)}


def _passes(target: LanguageModel, widths: tuple[int, ...], rounds: int) -> dict[str, float]:
    """Return the seconds of a pass over the tree, and over its sequences as a batch with one cached text."""
    parents = expanded(widths)
    sequences, text = paths(parents), _TEXT // BLOCK
    own = -(-len(parents) // BLOCK)  # blocks behind the text, of a tree or a sequence
    runner = filled_runner(target, text + own * len(sequences))
    tables = [[*range(text), *range(text + own * at, text + own * (at + 1))] for at in range(len(sequences))]
    tree = [tree_rows(_TEXT, tables[0], parents)]
    pairs = zip(tables, sequences, strict=True)
    beams = [tree_rows(_TEXT, blocks, range(-1, len(path) - 1)) for blocks, path in pairs]
    return medians({"tree": lambda: runner.forward(tree), _BEAMS: lambda: runner.forward(beams)}, rounds)


def page(cells: Cells) -> list[str]:
    rows = []
    for key, cell in cells.items():
        name, kind = key.split(",")
        for way, found in _all(cell).items():
            rate, steps = 1 / found["seconds"], found["tokens_per_step"]
            speeds = f"{steps:.2f}", f"{1e3 * steps / rate:.1f}", f"{rate:.1f}", f"{_speed(cell, way):.2f}"
            same = "" if way == _BEAMS else f"{found['same']} of {found['texts']}"
            rows.append((_TARGETS[name], kind, _WAYS[way], *speeds, same))
    sequence, beams = _over(cells, "tree", "sequence"), _over(cells, "tree", _BEAMS)
    fastest = [max(_all(cell), key=partial(_speed, cell)) for cell in cells.values()]
    counted = ", ".join(f"{_WAYS[way]} in {fastest.count(way)}" for way in _WAYS if way in fastest)
    return [
        "One request at a time, greedy. Sequences and trees have eight levels (a head's five), and trees "
        "three branches at the third. The step with a sequence for each leaf is computed: the tree's, with "
        "the measured time of a pass over these sequences in place of that over the tree. A block head "
        "guesses a whole tree in one pass; the 1.5B has no trained one.",
        *table(
            " | texts | way | tokens per step | ms per step | tokens/s | over one token | same texts", rows
        ),
        f"The paper's tree has {sequence} of the speed of a sequence, and {beams} of that of a sequence for "
        f"each leaf. The fastest ways of {len(cells)} targets and texts: {counted}.",
    ]


def plot(cells: Cells, figure: Figure) -> None:
    axes = figure.subplots()
    ways = {_WAYS[way]: [_speed(cell, way) for cell in cells.values()] for way in _WAYS if way != PLAIN}
    bars(axes, [key.replace(",", ", ") for key in cells], ways)
    axes.axhline(1, linewidth=0.8, color=INK)
    axes.set(ylabel="speed over one token a step")


def verdict(cells: Cells) -> Verdict:
    enough = sum(_speed(cell, "tree", "sequence") >= _PAPER for cell in cells.values())
    against = f"a tree reaches {_PAPER} in {enough} of {len(cells)} cells" if enough < len(cells) else ""
    ours = f"{_over(cells, 'tree', 'sequence')}; sized by cost {_over(cells, 'cost', 'sequence')}"
    ours += f"; tree over a sequence a leaf {_over(cells, 'tree', _BEAMS)}"
    return Verdict(ours, f"tree over sequence {_PAPER} to 1.5", "reproduced", against)


def _all(cell: Figures) -> dict[str, Any]:
    """Return the figures of all ways in the order of the page, with those of sequences for each leaf."""
    tree, passes = cell["ways"]["tree"], cell["passes"]
    more = (passes[_BEAMS] - passes["tree"]) / tree["tokens_per_step"]
    found = {**cell["ways"], _BEAMS: {**tree, "seconds": tree["seconds"] + more}}
    return {way: found[way] for way in _WAYS}


def _speed(cell: Figures, way: str, over: str = PLAIN) -> float:
    found = _all(cell)
    return float(found[over]["seconds"] / found[way]["seconds"])


def _over(cells: Cells, way: str, other: str) -> str:
    return spread([_speed(cell, way, other) for cell in cells.values()], 2)
