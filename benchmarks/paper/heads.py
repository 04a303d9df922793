"""The guesses of draft heads, by kind, and their worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import add
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.paper.lab import DATASETS, Lab, answer
from benchmarks.paper.plots import bars
from benchmarks.paper.question import Cells, Figure, Figures, Verdict
from benchmarks.study import shown, table, without_speculation
from specinfer import EngineConfig
from specinfer.kernels.disk import seconds
from specinfer.tune.draft import Kind
from specinfer.tune.head_draft import BlockKind, EagleKind, MtpKind
from specinfer.tune.prompts import built_in_prompts, read_prompts
from specinfer.tune.tuning import TuneConfig, Tuning

ASKS: Final = "What do draft heads guess, by kind?"
_PACKAGE: Final = "package"
_KINDS: Final[Mapping[str, Callable[[], Kind]]] = {"block": BlockKind, "eagle": EagleKind, "mtp": MtpKind}
_TRAINING: Final = ("dolly_train", "gsm8k_train")


def keys(lab: Lab) -> Sequence[str]:
    return lab.pick(full=[_PACKAGE, *_KINDS], quick=[_PACKAGE], toy=[*_KINDS])


def measure(lab: Lab, key: str) -> Figures:
    found, taken = dict[str, list[float]](), [0.0, 0.0]
    with (
        _head(lab, key) as (draft, minutes),
        lab.llm(lab.small, [draft], draft_quantization="int8", max_batch_size=1) as fixed,
        fixed.variant(tree_size="cost") as sized,
        without_speculation(fixed) as plain,
    ):
        for name in (None, *lab.datasets()):  # None warms up
            questions = lab.questions(name or "Alpaca", lab.pick(full=4, quick=4, toy=1))
            ask = partial(answer, questions=questions, max_tokens=lab.pick(full=64, quick=32, toy=4))
            times = [seconds(partial(ask, llm, temperature=0.0)) for llm in (plain, sized)]
            if name is not None:
                taken = [*map(add, taken, times)]
                found[name] = [ask(fixed, temperature=law).tokens_per_step for law in (0.0, 1.0)]
    lab.elsewhere(lab.small, draft)
    return {"minutes": minutes, "tokens_per_step": found, "gain": taken[0] / taken[1]}


@contextmanager
def _head(lab: Lab, key: str) -> Iterator[tuple[str, float]]:
    """Return a head's name or folder, and its minutes of training here."""
    if key == _PACKAGE:
        yield "smollm2-135m-head", 0.0
        return
    lab.close()  # the tuning opens the model itself
    prompts, minutes = built_in_prompts(), lab.pick(full=2.5, quick=0.5, toy=0.05)
    if lab.size != "toy":
        prompts = read_prompts([lab.prompts / f"{name}.jsonl" for name in _TRAINING])
    with TemporaryDirectory() as folder:
        target = EngineConfig.from_options(lab.small, {"max_context": 1024, "lookup": False})
        out = Path(folder) / key
        tuning = Tuning(TuneConfig(target=target, out=out, minutes=minutes, kind=_KINDS[key]()))
        tuning.run(prompts, _TRAINING)
        yield str(out), minutes


def page(cells: Cells) -> list[str]:
    rows = []
    for key, cell in cells.items():
        rates = (cell["tokens_per_step"].get(name, []) for name in DATASETS)
        rows.append((_named(key, cell), *(" / ".join(shown(of)) for of in rates), f"{cell['gain']:.2f}"))
    best = max(cells, key=lambda key: _mean(cells[key]))
    return [
        "Draft heads of SmolLM2-135M, one request at a time. Tokens per step in trees of 1,1,3,1,1, greedy / "
        "at temperature 1; the last column is the greedy speed over no speculation with trees sized by cost.",
        *table(f"head | {' | '.join(DATASETS)} | times", rows),
        f"The head {_named(best, cells[best])} makes most of a step: {_mean(cells[best]):.2f} tokens. "
        "Kinds that learn here have the same prompts and minutes; a third of them collects answers. A block "
        "head begins as the target's last layer, the others begin with random numbers.",
    ]


def plot(cells: Cells, figure: Figure) -> None:
    axes = figure.subplots()
    names = [name for name in DATASETS if any(name in cell["tokens_per_step"] for cell in cells.values())]
    found = {_named(key, cell): cell["tokens_per_step"] for key, cell in cells.items()}
    bars(axes, names, {head: [of.get(name, [0])[0] for name in names] for head, of in found.items()})
    axes.set(ylabel="tokens per step, greedy")


def verdict(cells: Cells) -> Verdict:
    said = (f"{key} {_mean(cell):.2f} ({cell['gain']:.2f} times as fast)" for key, cell in cells.items())
    return Verdict(f"tokens per step, greedy: {', '.join(said)}")


def _named(key: str, cell: Figures) -> str:
    return "of the package" if key == _PACKAGE else f"{key} of {cell['minutes']:g} minutes"


def _mean(cell: Figures) -> float:
    return fmean(greedy for greedy, _ in cell["tokens_per_step"].values())
