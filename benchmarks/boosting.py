"""Pools of boosted drafts: what boosting, more members and another kind are worth at equal training time.

    python benchmarks/boosting.py --model TARGET --prompts PROMPTS.jsonl --work DIR --minutes 5

Answers are collected once, into DIR/corpus, and every pool learns from them for the same CPU time: its
members share it. Held-out guesses are compared by counting, so that a busy machine changes no figure but how
many steps were made in that time; these are told. Ctrl-C at any time: what was trained is gone on with, what
was measured stays.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from study import REQUIRED, Study, parser, row, run

from specinfer.config import EngineConfig
from specinfer.hub import resolve
from specinfer.models.weights import open_model
from specinfer.progress import ProgressBar
from specinfer.tune.block_kind import BlockKind
from specinfer.tune.boosting import Boost, BoostConfig
from specinfer.tune.checkpoint import read_checkpoint
from specinfer.tune.config import TuneConfig
from specinfer.tune.draft import Kind, Target
from specinfer.tune.held_out import Along, along, held_out_texts
from specinfer.tune.prompts import read_prompts
from specinfer.tune.read_draft import read_draft
from specinfer.tune.shards import Corpus
from specinfer.tune.ssm_kind import SsmKind
from specinfer.tune.tuning import Tuning, member_name


@dataclass(frozen=True)
class Variant:
    """One pool, or a single draft."""

    kind: Kind
    members: int = 1
    boost: Boost | None = None


def variants(layers: int, depth: int, members: int) -> dict[str, Variant]:
    """What is compared."""
    ssm = SsmKind(layers=layers, depth=depth)
    forms: tuple[Boost, ...] = ("none", "sequence", "token", "residual")
    pools = {f"{members} ssm, {form}": Variant(ssm, members, form) for form in forms}
    return {"1 ssm": Variant(ssm), "1 block": Variant(BlockKind(depth=depth)), **pools}


def main() -> None:
    known = parser(__doc__, model=REQUIRED)
    known.add_argument("--prompts", type=Path, action="append", required=True, metavar="FILE.jsonl")
    known.add_argument("--work", type=Path, required=True, metavar="DIR", help="answers and drafts")
    known.add_argument("--minutes", type=float, default=5.0, help="of CPU time, for each pool (default 5)")
    known.add_argument("--collect-minutes", type=float, default=20.0, help="(default 20)")
    known.add_argument("--members", type=int, default=3, help="of a pool (default 3)")
    known.add_argument("--layers", type=int, default=2, help="of a small model (default 2)")
    known.add_argument("--depth", type=int, default=5, help="tokens that are guessed on end (default 5)")
    known.add_argument("--max-answer", type=int, default=192, help="tokens (default 192)")
    args = known.parse_args()

    engine = EngineConfig.from_options(
        args.model, {"quantization": "int8", "max_context": 1024, "threads": 1}
    )
    corpus = collected(engine, args)
    settings = {
        "model": Path(args.model).name,
        "minutes": args.minutes,
        "tokens": corpus.tokens,
        "texts": [corpus.count(held_out=held_out) for held_out in (False, True)],
        "members": args.members,
        "layers": args.layers,
        "depth": args.depth,
    }
    study = Study("boosting", args.out, settings)
    for name, variant in variants(args.layers, args.depth, args.members).items():
        if name not in study.cells:
            out = args.work / name.replace(", ", "-").replace(" ", "-")
            train(engine, variant, out, corpus, args.minutes)
            study.keep(name, measured(engine, variant, out, args.depth))
            print(f"{name}: {study.cells[name]}", flush=True)
            study.write(page(study))


def collected(engine: EngineConfig, args: Any) -> Corpus:
    """The answers in the work folder, made where there are none; with the hidden states that a head reads."""
    out = args.work / "corpus"
    folder = out / "work" / "shards"
    if not list(folder.glob("*.safetensors")):
        config = TuneConfig(
            target=engine,
            out=out,
            minutes=3 * args.collect_minutes,
            collect_minutes=args.collect_minutes,
            max_tokens=args.max_answer,
            resume=(out / "work" / "tuning.json").exists(),
        )
        Tuning(config, say=print, progress=ProgressBar()).collect(read_prompts(args.prompts))
    return Corpus(folder)


def train(engine: EngineConfig, variant: Variant, out: Path, corpus: Corpus, minutes: float) -> None:
    """Train a variant for so many minutes of CPU time, over all runs."""
    (out / "work").mkdir(parents=True, exist_ok=True)
    shards = out / "work" / "shards"
    if not shards.exists():
        shards.symlink_to(corpus.folder.resolve())
    # What collecting took is part of a tuning's minutes, of which it trains in a third at least.
    taken = corpus.seconds / 60
    config = TuneConfig(
        target=engine,
        out=out,
        minutes=minutes + taken if 2 * minutes >= taken else 3 * minutes,
        collect_minutes=0.0,
        kind=variant.kind,
        members=variant.members,
        boost=None if variant.boost is None else BoostConfig(form=variant.boost),
        resume=(out / "work" / "tuning.json").exists(),
    )
    Tuning(config, clock=time.process_time, say=lambda line: print(line, flush=True)).train([])


def measured(engine: EngineConfig, variant: Variant, out: Path, depth: int) -> dict[str, Any]:
    """What the drafts of a folder guess along held-out answers, by counts."""
    files = resolve(engine.model)
    target = Target(files, open_model(files))
    taps = [*range(len(variant.kind.taps(target.config)))]
    texts = held_out_texts(Corpus(out / "work" / "shards", taps))
    names = [member_name(number) for number in range(variant.members)] if variant.members > 1 else [""]
    alongs = [along(read_draft(out / name, target, depth), texts) for name in names]
    states = [read_checkpoint(out / "work" / f"{name or 'checkpoint'}.safetensors").state for name in names]
    widths = (1,) * depth
    chains = [accepted(alongs[:count], widths) for count in range(1, len(alongs) + 1)]
    return {
        "steps": [state.steps for state in states],
        "blocks": [state.blocks for state in states],
        "places": len(alongs[0].texts_P),
        "own": [accepted([one], widths) for one in alongs],
        "pool": chains,
        "wide": accepted(alongs[:1], (3, *widths[1:])),
        "second_choice": conditional(alongs[0], alongs[0], 2),
        "second_member": conditional(alongs[0], alongs[1], 1) if len(alongs) > 1 else None,
    }


def accepted(alongs: Sequence[Along], widths: Sequence[int]) -> float:
    """Tokens a pass of trees of these widths, merged: the longest of what each member has right, and one."""
    longest = torch.stack([one.accepted(widths) for one in alongs]).amax(dim=0)
    return 1.0 + float(longest.double().mean())


def conditional(first: Along, other: Along, width: int) -> float:
    """How often the other's `width` likeliest hold the next token, where the first's likeliest is wrong."""
    wrong_P = first.ranks_PL[:, 0] > 0
    return float((other.ranks_PL[wrong_P, 0] < width).double().mean())


def page(study: Study) -> list[str]:
    settings, cells = study.settings, study.cells
    learnt, held_out = settings["texts"]
    places = max((cell["places"] for cell in cells.values()), default=0)
    return [
        f"# Boosted pools of drafts: {settings['model']}",
        "",
        f"Each row is trained for {settings['minutes']:g} minutes of one thread's CPU time in all, which its "
        f"members share, on the same {settings['tokens']} tokens of {learnt} answers; small models have "
        f"{settings['layers']} layers of the target's size. Measured at {places} places of {held_out} "
        "held-out greedy answers: tokens a pass of the target's, with chains of "
        f"{settings['depth']} guesses, one for each member.",
        "",
        "| | steps | members alone | pool of 1, 2, ... | first member alone, tree of "
        f"<3{',1' * (settings['depth'] - 1)}> | where the first choice is wrong: second choice right | "
        "second member right |",
        "|---|---|---|---|---|---|---|",
        *(row(name, *_cells(cell)) for name, cell in cells.items()),
        "",
        "A pool of three chains verifies as many nodes as that tree of the first member's. Where the second "
        "member is right less often than the first one's second choice, a node of the first is worth more.",
    ]


def _cells(cell: dict[str, Any]) -> list[str]:
    second = cell["second_member"]
    return [
        " ".join(str(steps) for steps in cell["steps"]),
        " ".join(f"{value:.3f}" for value in cell["own"]),
        " ".join(f"{value:.3f}" for value in cell["pool"]),
        f"{cell['wide']:.3f}",
        f"{cell['second_choice']:.3f}",
        "" if second is None else f"{second:.3f}",
    ]


if __name__ == "__main__":
    run(main)
