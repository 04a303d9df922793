"""Table 3 of the paper: multi-step sampling against naive sampling, on the same trees."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from statistics import fmean
from typing import Final

from benchmarks.paper.lab import DATASETS, Lab
from benchmarks.paper.laws import RULES, dense, mss_tokens, naive_tokens, rates, softmax
from benchmarks.paper.plots import lines
from benchmarks.paper.question import Cells, Figure, Figures, Outcome, Verdict
from benchmarks.paper.table1 import PAIRS
from benchmarks.study import ask, shown, table, total_figures
from specinfer import RequestOutput, SamplingParams
from specinfer.engine.steps import TreeEvent
from specinfer.models.language_model import LanguageModel
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner, as_rows
from specinfer.tree.draw import DrawRule
from specinfer.tree.token_tree import Expansion

ASKS: Final = "How much does multi-step sampling gain over naive sampling?"
# The engine's rule for each draw.
_RULES: Final = {"iid": "mss", "without_replacement": "mss", "top_k": "coupled", "coupled": "coupled"}
_COLUMNS: Final = (  # draw, and the figure of its cell
    *(("iid", "naive tokens"), ("iid", "mss tokens"), ("iid", "engine")),
    *(("without_replacement", "mss tokens"), ("without_replacement", "engine")),
    *(("top_k", "naive tokens"), ("top_k", "engine"), ("coupled", "engine")),
)
_EXACT: Final = ("mss tokens", "naive tokens")
_WIDTH: Final = 5
_ROOM: Final = 128  # nodes of a tree, at most


def keys(lab: Lab) -> list[str]:
    pairs = lab.pick(full=[*PAIRS], quick=[*PAIRS], toy=["pair"])
    names = lab.pick(full=lab.datasets(), quick=["Alpaca"], toy=["Alpaca"])
    return [f"{pair},{name},{draw}" for pair in pairs for name in names for draw in _RULES]


def measure(lab: Lab, key: str) -> Figures:
    pair, name, draw = key.split(",")
    shape = Expansion((1, 1, _WIDTH, 1, 1, 1, 1, 1))
    outputs: list[RequestOutput] = []
    found: dict[str, list[Sequence[float]]] = {}
    questions = lab.questions(name, lab.pick(full={"pair": 3, "head": 8}[pair], quick=2, toy=1))
    with lab.llm(*lab.pair(pair), verifier=_RULES[draw], draw=draw, expansion=shape) as llm:
        for seed, question in enumerate(questions):  # one at a time: a draw's law takes a megabyte
            events: list[TreeEvent] = []
            llm.on_tree = events.append
            tokens = lab.pick(full=48, quick=16, toy=6)
            outputs += ask(llm, [question], SamplingParams(temperature=1.0, seed=seed, max_tokens=tokens))
            if draw != "coupled":  # a coupled tree depends on the noise that verifies it
                for rule, values in _exact(llm.models.target, outputs[-1], events).items():
                    found.setdefault(rule, []).extend(values)
    figures = total_figures(outputs)
    means = {rule: [fmean(each) for each in zip(*rows, strict=True)] for rule, rows in found.items()}
    return {"engine": figures.tokens_per_step, "steps": figures.steps, "exact": means}


def _exact(
    model: LanguageModel, output: RequestOutput, events: Sequence[TreeEvent]
) -> dict[str, list[Sequence[float]]]:
    """Return, for each tree of an answer, the mean tokens of a step by rule, and the rates at its root."""
    text, cached = list(output.prompt_token_ids), 0
    places = len(text) + len(output.token_ids) + _ROOM
    runner = ModelRunner(model, num_blocks=1, block_size=places)
    found: dict[str, list[Sequence[float]]] = {}
    for tree, acceptance in ((event.tree, event.acceptance) for event in events):
        if tree.num_nodes > 1:
            tokens = [*text[cached:], *tree.token_ids[1:]]
            root = len(text) - 1 - cached
            logits = as_rows(runner.forward([Rows(tokens, cached, [0], root, tree.parents)]))
            laws = {node: softmax(logits[node]) for node in {*tree.parents[1:]}}
            made = {"naive tokens": [naive_tokens(tree, laws.__getitem__)]}
            if (first := tree.draws[0]).rule.is_sampled:
                made["mss tokens"] = [mss_tokens(tree, laws.__getitem__)]
            if first.rule is DrawRule.IID:
                made |= {rule: rates(laws[0], dense(first), rule, _WIDTH) for rule in RULES}
            for rule, values in made.items():
                found.setdefault(rule, []).append(values)
            cached = len(text)
        text += acceptance.tokens(tree)
    return found


def page(cells: Cells) -> list[str]:
    rows: list[Sequence[object]] = [("paper", "", "", "1.26 to 1.28", *[""] * 6)]
    for pair, name in [(pair, name) for pair in PAIRS for name in DATASETS]:
        naive, mss, *others = (_figure(cells, f"{pair},{name},{draw}", of) for draw, of in _COLUMNS)
        if not all(map(isnan, (naive, mss, *others))):
            rows.append((f"{PAIRS[pair]}, {name}", *shown((naive, mss, mss / naive, *others))))
    means = {pair: _rates(cells, pair) for pair in PAIRS}
    exact = [
        (f"{PAIRS[pair]}, {RULES[rule]}", *shown(each))
        for pair, rules in means.items()
        for rule, each in rules.items()
    ]
    one = means["pair"] or means["head"]
    return [
        "Tokens per step, sampled (T = 1), with trees of eight levels (the head's: five) and five branches "
        "at the third. An exact figure is the mean over the trees of the run: both models' laws at each node "
        "give the probability that a rule accepts the node. A figure of the engine counts what it accepted.",
        *table(
            "models, data set | naive, exact | `mss`, exact | ratio | `mss`, engine | `mss` without "
            "replacement, exact | engine | the draft's likeliest, exact | engine | `coupled`, engine",
            rows,
        ),
        "Exact probability that one of k guesses is accepted, from the laws at the roots:",
        *table("models, rule | k = 1 | 2 | 3 | 4 | 5", exact),
        f"Multi-step sampling yields {_gains(cells)} times the tokens of naive sampling on the same "
        "trees. Naive sampling accepts one draw with the probability sum(p q), multi-step sampling "
        f"with sum(min(p, q)): {one['naive'][0]:.2f} and {one['mss'][0]:.2f} here."
        if one
        else "",
    ]


def plot(cells: Cells, figure: Figure) -> None:
    ratios, guesses = figure.subplots(1, 2)
    ratios.axhspan(1.26, 1.28, alpha=0.4, label="paper")
    for pair, words in PAIRS.items():
        both = [[_figure(cells, key, of) for of in _EXACT] for key in _iid(cells, pair)]
        lines(ratios, {words: {mss: mss / naive for mss, naive in both}}, linestyle="")
    for rule, mean in _rates(cells, "pair").items():
        lines(guesses, {RULES[rule].replace(", ", ",\n"): dict(enumerate(mean, 1))})
    ratios.set(xlabel="tokens per step of mss", ylabel="mss over naive")
    guesses.set(xlabel="guesses for one token", ylabel="probability of acceptance", ylim=(0, 1))


def verdict(cells: Cells) -> Verdict:
    found = _ratios(cells).values()
    outcome: Outcome = "surpassed" if min(found, default=nan) > 1.28 else "reproduced"
    against = "" if min(found, default=nan) >= 1.26 else "where a draft is sure, one draw is enough for both"
    return Verdict(f"{_gains(cells)} times", "1.26 to 1.28 times naive sampling", outcome, against)


def _figure(cells: Cells, key: str, of: str) -> float:
    """Return the engine's tokens per step, or the exact ones of a rule; nan without the cell."""
    cell = cells.get(key, {"engine": nan, "exact": {}})
    return float(cell["engine"] if of == "engine" else cell["exact"].get(of, [nan])[0])


def _iid(cells: Cells, pair: str) -> list[str]:
    return [key for key in cells if key.startswith(f"{pair},") and key.endswith(",iid")]


def _ratios(cells: Cells) -> dict[str, float]:
    """Return by models the ratio of `mss` to naive sampling, over the data sets."""
    found: dict[str, float] = {}
    for pair, words in PAIRS.items():
        mss, naive = (sum(_figure(cells, key, of) for key in _iid(cells, pair)) for of in _EXACT)
        found |= {words: mss / naive} if naive else {}
    return found


def _gains(cells: Cells) -> str:
    return " and ".join(f"{ratio:.2f} ({words})" for words, ratio in _ratios(cells).items())


def _rates(cells: Cells, pair: str) -> dict[str, list[float]]:
    """Return by rule the mean rates of k = 1, 2, ... over the data sets."""
    found = [cells[key]["exact"] for key in _iid(cells, pair)]
    columns = {rule: zip(*(exact[rule] for exact in found), strict=True) for rule in RULES if found}
    return {rule: [fmean(each) for each in column] for rule, column in columns.items()}
