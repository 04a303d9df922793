"""Do texts with speculation equal those without, by engine?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

from benchmarks.paper.lab import Lab
from benchmarks.paper.question import Cells, Figure, Figures, Verdict
from benchmarks.peers.engines import ENGINES, OURS, Engine, Home
from benchmarks.peers.peers import Task, run_cell, tokens_per_step
from benchmarks.study import prompt_ids, table
from specinfer.errors import UserError
from specinfer.hub import resolve
from specinfer.kernels.machine import thread_count

ASKS: Final = "Do texts with speculation equal those without?"
_SETS: Final = ("alpaca", "humaneval")
_BY_NAME: Final[Mapping[str, Engine]] = {one.name: one for one in ENGINES}
_QUICK: Final = (  # one mode of each engine
    *(f"{OURS}-file+draft", "llama-server+draft", "ik_llama+draft"),
    *("openvino+lookup", "transformers+lookup", "vllm+ngram"),
)


def keys(lab: Lab) -> Sequence[str]:
    drafted = [one.name for one in ENGINES if one.draft or (one.script != OURS and one.name != one.plain)]
    return lab.pick(full=drafted, quick=_QUICK, toy=(f"{OURS}-bf16+draft",))


def measure(lab: Lab, key: str) -> Figures:
    lab.elsewhere(lab.target, lab.draft)
    engine, target = _BY_NAME[key], resolve(lab.target)
    count, tokens = lab.pick(full=(6, 64), quick=(2, 32), toy=(1, 8))
    prompts = prompt_ids(target, chain(*(lab.questions(name, count) for name in _SETS)))
    task = Task(target.path, resolve(lab.draft).path, prompts, tokens, 1, thread_count())
    plain, drafted = (run_cell(one, task, 0, Home(), 600) for one in (_BY_NAME[engine.plain], engine))
    if error := plain.get("error") or drafted.get("error"):
        raise UserError(error)
    pairs = zip(plain["answers"], drafted["answers"], strict=True)
    return {
        "texts": len(task.prompts),
        "same": sum(one["text"] == other["text"] for one, other in pairs),
        "tokens": task.max_tokens,
        "tokens_per_step": tokens_per_step(drafted),
    }


def page(cells: Cells) -> list[str]:
    rows = []
    for name, modes in _engines(cells).items():
        sizes = ["/".join(sorted({str(cells[mode][size]) for mode in modes})) for size in ("tokens", "texts")]
        said = (f"+{mode.partition('+')[2]} {cells[mode]['same']}" for mode in modes)
        rows.append((name, _BY_NAME[name].bits, *sizes, ", ".join(said)))
    return [
        "Greedy answers of an engine with speculation beside its own without, the same token ids for every "
        "engine. A `+` names the mode: `draft` is the 0.5B, the others look tokens up.",
        *table("engine | weights | tokens | texts | the same", rows),
        f"{_said(cells)}. "
        "[Losslessness](../losslessness.md) says how a pass over a tree rounds as single tokens do.",
    ]


def plot(cells: Cells, figure: Figure) -> None:
    axes, modes = figure.subplots(), [*cells][::-1]
    shares = [100 * cells[mode]["same"] / cells[mode]["texts"] for mode in modes]
    axes.barh(modes, shares, color=["C0" if _BY_NAME[mode].script == OURS else "C1" for mode in modes])
    axes.tick_params(axis="y", labelsize=6)
    axes.set(xlabel="texts with speculation that are those without, %", xlim=(0, 100))


def verdict(cells: Cells) -> Verdict:
    same, texts = _kept(cells, ours=True)
    against = "" if same == texts else f"{texts - same} texts differ"
    against = against if texts else "not measured"
    paper = "the tests of its code compare 30 tokens of one prompt"
    return Verdict(_said(cells), paper, "surpassed", against)


def _engines(cells: Cells) -> Mapping[str, Sequence[str]]:
    """Return the measured modes of each engine."""
    found: dict[str, list[str]] = {}
    for name in cells:
        found.setdefault(_BY_NAME[name].plain, []).append(name)
    return found


def _said(cells: Cells) -> str:
    kept = {who: _kept(cells, ours=who == OURS) for who in (OURS, "the other engines")}
    return ", ".join(f"{who} kept {same} of {texts} texts" for who, (same, texts) in kept.items() if texts)


def _kept(cells: Cells, *, ours: bool) -> tuple[int, int]:
    """Return how many texts are the same, and of how many."""
    chosen = [cell for name, cell in cells.items() if (_BY_NAME[name].script == OURS) == ours]
    return sum(cell["same"] for cell in chosen), sum(cell["texts"] for cell in chosen)
