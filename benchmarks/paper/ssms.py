"""Larger SSMs or more of them: boosted pools at equal memory and time, and merged speculators."""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.paper.lab import Lab, answer
from benchmarks.paper.question import Cells, Figure, Figures, Verdict
from benchmarks.study import shown, table
from specinfer.config import EngineConfig
from specinfer.errors import UserError
from specinfer.files import cache_dir
from specinfer.hub import resolve
from specinfer.models.open_model import open_model
from specinfer.tree.token_tree import Expansion
from specinfer.tune.dataset import Corpus
from specinfer.tune.draft import Target
from specinfer.tune.evaluation import held_out_texts, rank_tokens, read_draft
from specinfer.tune.prompts import read_prompts
from specinfer.tune.small_model import SsmKind
from specinfer.tune.tuning import TuneConfig, Tuning, member_name

ASKS: Final = "Larger SSMs, or more of them: one, three or five?"
_DEPTH: Final = 5  # guesses of a chain
_MERGED: Final = {  # speculators of the target; the small model has another vocabulary
    "lookups": ("lookup",),
    "small": ("draft1",),
    "large": ("draft2",),
    "small and large": ("draft1", "draft2"),
    "all three": ("lookup", "draft1", "draft2"),
}
_OLDER: Final = ("short", "warm", "blocks", "long", "longer")


def keys(lab: Lab) -> list[str]:
    shapes = lab.pick(full=["5,2", "1,2", "1,10"], quick=[], toy=["2,1", "1,2"])  # SSMs, and layers of each
    older = lab.pick(full=_OLDER, quick=(), toy=())
    every = {"older": older, "trained": shapes, "merged": _MERGED}
    return [f"{kind},{one}" for kind, each in every.items() for one in each]


def measure(lab: Lab, key: str) -> Figures:
    kind, _, one = key.partition(",")
    if kind == "older":
        raise UserError("it is from an older page")
    return _merged(lab, one) if kind == "merged" else _trained(lab, *map(int, one.split(",")))


def _merged(lab: Lab, name: str) -> Figures:
    count, limit = lab.pick(full=(3, 48), quick=(4, 24), toy=(1, 8))
    questions = [text for dataset in lab.datasets() for text in lab.questions(dataset, count)]
    chains: dict[str, Any] = {"expansion": Expansion((1,) * _DEPTH), "lookup": True}
    chains |= {"lookup_depth": _DEPTH, "lookup_nodes": 1 + _DEPTH}
    with lab.llm(lab.target, [lab.small, lab.draft], **chains) as llm:
        own = {"speculators": _MERGED[name]}
        figures = answer(llm, questions, temperature=0.0, max_tokens=limit, speculation=own)
    nodes = figures.drafted_tokens / max(1, figures.steps)
    return {"tokens_per_step": figures.tokens_per_step, "nodes_per_step": nodes, "steps": figures.steps}


def _trained(lab: Lab, members: int, layers: int) -> Figures:
    """Train SSMs, which share the CPU time, and count their right guesses along held-out answers."""
    lab.elsewhere(lab.small)
    minutes, collecting = lab.pick(full=(2.5, 3.0), quick=(0.0, 0.0), toy=(0.02, 0.05))
    options = {"quantization": "int8", "max_context": 1024, "threads": 1, "lookup": False}
    engine, kind = EngineConfig.from_options(lab.small, options), SsmKind(layers=layers, depth=_DEPTH)
    tuning = partial(TuneConfig, target=engine, kind=kind, max_tokens=192)
    work = cache_dir() / "paper" / lab.size / Path(lab.small).stem
    if not (corpus := Corpus(work / "corpus" / "work" / "shards")).tokens:
        files = lab.pick(full=["dolly_train", "alpaca_train"], quick=[], toy=["alpaca"])
        prompts = read_prompts([lab.prompts / f"{file}.jsonl" for file in files])
        shutil.rmtree(work, ignore_errors=True)
        config = tuning(out=work / "corpus", minutes=3 * collecting, collect_minutes=collecting)
        Tuning(config).collect(prompts)
        corpus = Corpus(corpus.folder)
    out = work / f"{members}-{layers}"
    shutil.rmtree(out, ignore_errors=True)
    (out / "work").mkdir(parents=True)
    (out / "work" / "shards").symlink_to(corpus.folder.resolve())
    # Collecting counts as a part of the minutes, and at least a third remains for training.
    total = min(minutes + corpus.seconds / 60, 3 * minutes)
    config = tuning(out=out, minutes=total, collect_minutes=0.0, members=members)
    selection = Tuning(config, clock=time.process_time).train([]).selection
    target = Target(of_small := resolve(lab.small), open_model(of_small))
    folders = [out / member_name(number) for number in range(members)] if members > 1 else [out]
    ranks = [rank_tokens(read_draft(folder, target, _DEPTH), held_out_texts(corpus)) for folder in folders]
    chains = torch.stack([one.accepted((1,) * _DEPTH) for one in ranks]).double()
    name = f"{members} SSMs, discounted, warm" if members > 1 else f"1 SSM, {layers} layers"
    found = {
        "own": (1 + chains.mean(1)).tolist(),
        "pool": (1 + chains.cummax(0).values.mean(1)).tolist(),
        "wide": 1 + float(ranks[0].accepted((3, *(1,) * (_DEPTH - 1))).double().mean()),
        "speed": [selection.ratio(pool) for pool in selection.pools],
    }
    return {"minutes": minutes, "tokens": corpus.tokens, "places": chains.shape[1], "rows": {name: found}}


def _pools(cells: Cells) -> list[dict[str, Any]]:
    """Return the rows of trained SSMs of all cells."""
    pools = [(cell, *item) for cell in cells.values() for item in cell.get("rows", {}).items()]
    return [{**cell, "name": name, "speed": [], **pool} for cell, name, pool in pools]


def page(cells: Cells) -> list[str]:
    pools, merged, said = _pools(cells), _existing(cells), []
    rows = [
        (
            *(pool["name"], f"{pool['minutes']:g}", f"{pool['tokens']:,}"),
            *(" ".join(shown(pool[kind])) for kind in ("own", "pool")),
            *(f"{pool['wide']:.2f}", " ".join(shown(pool["speed"]))),
        )
        for pool in pools
    ]
    trained = [
        "SSMs of SmolLM2-135M with two of its layers, unless a row says more. The members of a row share "
        "the CPU time of its training. The figures are tokens a pass of the target at held-out greedy "
        "answers, with a chain of five guesses of each member. The speed over no speculation is that of "
        "the best trees, by the time of passes. Independent members ignore each other. Discounted ones "
        "learn laws in which tokens of earlier members count .3, and warm ones start from the weights of "
        "the one before. In the paper's way members learn from the texts that earlier ones miss.",
        *table(
            "SSMs | minutes | answers' tokens | each alone | the first 1, 2, ... together | the first alone, "
            "with three first guesses | speed of the first 1, 2, ...",
            rows,
        ),
    ]
    existing = [
        "Existing speculators of the target, a chain of five guesses of each, in greedy answers: "
        "lookups, a small model of another vocabulary, and a larger one.",
        *table(
            "speculators | tokens a step | nodes a step",
            ((name, f"{tokens:.2f}", f"{nodes:.1f}") for name, (tokens, nodes) in merged.items()),
        ),
    ]
    if merged:
        most = max(merged, key=lambda name: merged[name])
        said.append(f"The most tokens a step, {merged[most][0]:.2f}, come from {most}.")
    if threes := [pool for pool in pools if len(pool["pool"]) > 2]:
        better = sum(pool["pool"][2] > pool["wide"] for pool in threes)
        speeds = [pool["speed"] for pool in threes if pool["speed"]]
        said.append(
            f"In {better} of {len(threes)} pools three members make more tokens a pass than the first alone "
            "with three first guesses, which has as many nodes and a third of the SSMs' passes. Two or more "
            f"members are faster than the first alone in {sum(max(one) > one[0] for one in speeds)} of "
            f"{len(speeds)}."
        )
    return [*(trained if pools else []), *(existing if merged else []), *said]


def _existing(cells: Cells) -> dict[str, tuple[float, float]]:
    """Return tokens and nodes a step of merged speculators."""
    found = {name: cells.get(f"merged,{name}") for name in _MERGED}
    return {name: (one["tokens_per_step"], one["nodes_per_step"]) for name, one in found.items() if one}


def plot(cells: Cells, figure: Figure) -> None:
    trained, merged = figure.subplots(1, 2)
    for pool in _pools(cells):
        color, line = f"C{int('block' in pool['name'])}", ":" if "independent" in pool["name"] else "-"
        trained.plot(range(1, 1 + len(pool["pool"])), pool["pool"], color=color, linestyle=line, marker=".")
    trained.set_xticks(range(1, 6))
    trained.set(xlabel="SSMs (blue), block heads; dotted: independent", ylabel="tokens a pass")
    bars = _existing(cells)
    merged.barh([*bars], [tokens for tokens, _ in bars.values()])
    merged.set(xlabel="tokens a step, existing speculators")


def verdict(cells: Cells) -> Verdict:
    threes = [pool for pool in _pools(cells) if len(pool["pool"]) > 2]
    better = sum(pool["pool"][2] > pool["wide"] for pool in threes)
    said = [f"three beat one with as many nodes in {better} of {len(threes)} pools"] if threes else []
    if merged := _existing(cells):
        most = max(merged, key=lambda name: merged[name])
        said.append(f"{merged[most][0]:.2f} tokens a step with {most}")
    return Verdict(", ".join(said))
