"""Compares single drafts and boosted pools by kind, size and members at equal training time.

    python -m benchmarks.drafts.boosting --model TARGET --prompts PROMPTS.jsonl --work DIR --minutes 5

Answers are collected once, into DIR/corpus. Every row trains on them for the same CPU time, which its members
share. Held-out proposals are counted, so a busy machine changes only the number of training steps, which the
page reports. After training, passes are timed, which needs a quiet machine, and the best trees of the drafts
are computed as a tuning selects members. Ctrl-C is safe at any time: training resumes, and finished
measurements are kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.study import REQUIRED, Study, parser, row, run
from specinfer.config import EngineConfig
from specinfer.hub import resolve
from specinfer.models.open_model import open_model
from specinfer.progress import NoProgress, ProgressBar
from specinfer.tune.dataset import Corpus
from specinfer.tune.draft import Kind, Target
from specinfer.tune.evaluation import TokenRanks, held_out_texts, rank_tokens, read_draft
from specinfer.tune.head_draft import BlockKind, EagleKind
from specinfer.tune.prompts import read_prompts
from specinfer.tune.selection import MeasuredDraft, Selection, candidates_of, measured_costs
from specinfer.tune.small_model import SsmKind
from specinfer.tune.training import read_checkpoint
from specinfer.tune.tuning import TuneConfig, Tuning, member_name

_VERSION = 5  # version of the cells; others are refused
_TIMED = "timed"  # suffix of the cells with pass times


@dataclass(frozen=True)
class Variant:
    """A pool or a single draft."""

    kind: Kind
    members: int = 1


def variants(layers: int, depth: int, members: int) -> dict[str, Variant]:
    """Return the compared variants; one small model has `layers` layers, one has as many as a whole pool."""
    ssm, block = SsmKind(layers=layers, depth=depth), BlockKind(depth=depth)
    return {
        "1 ssm": Variant(ssm),
        f"1 ssm of {members * layers} layers": Variant(SsmKind(layers=members * layers, depth=depth)),
        f"{members} ssm": Variant(ssm, members),
        "1 block": Variant(block),
        f"{members} block": Variant(block, members),
        "1 eagle": Variant(EagleKind(depth=depth)),
    }


def main() -> None:
    known = parser(__doc__, model=REQUIRED)
    known.add_argument("--prompts", type=Path, action="append", required=True, metavar="FILE.jsonl")
    known.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder of answers and drafts")
    known.add_argument("--minutes", type=float, default=5.0, help="CPU minutes for each pool (default 5)")
    known.add_argument("--collect-minutes", type=float, default=20.0, help="(default 20)")
    known.add_argument("--members", type=int, default=3, help="members of a pool (default 3)")
    known.add_argument("--layers", type=int, default=2, help="layers of a small model (default 2)")
    known.add_argument("--depth", type=int, default=5, help="tokens proposed in a row (default 5)")
    known.add_argument("--max-answer", type=int, default=192, help="tokens (default 192)")
    args = known.parse_args()

    engine = EngineConfig.from_options(
        args.model, {"quantization": "int8", "max_context": 1024, "threads": 1, "lookup": False}
    )
    corpus = collected(engine, args)
    settings = {
        "model": Path(args.model).name,
        "version": _VERSION,
        "minutes": args.minutes,
        "tokens": corpus.tokens,
        "texts": [corpus.count(held_out=held_out) for held_out in (False, True)],
        "members": args.members,
        "layers": args.layers,
        "depth": args.depth,
    }
    study = Study("boosting", args.out, settings)
    compared = variants(args.layers, args.depth, args.members)
    folders = {name: args.work / name.replace(" ", "-") for name in compared}
    for name, variant in compared.items():
        if name not in study.cells:
            train(engine, variant, folders[name], corpus, args.minutes)
            study.keep(name, measured(Members(engine, variant, folders[name], args.depth)))
            study.write(page(study))
    for name, variant in compared.items():
        if (timed := f"{name}: {_TIMED}") not in study.cells:
            study.keep(timed, reckoned(engine, Members(engine, variant, folders[name], args.depth)))
            study.write(page(study))


def collected(engine: EngineConfig, args: Any) -> Corpus:
    """Return the answers of the work folder, collected if missing, with the hidden states that a head
    reads.
    """
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
    """Train a variant for `minutes` of CPU time, summed over all runs."""
    (out / "work").mkdir(parents=True, exist_ok=True)
    shards = out / "work" / "shards"
    if not shards.exists():
        shards.symlink_to(corpus.folder.resolve())
    # Collecting uses a part of a tuning's minutes; at least a third remains for training.
    taken = corpus.seconds / 60
    config = TuneConfig(
        target=engine,
        out=out,
        minutes=minutes + taken if 2 * minutes >= taken else 3 * minutes,
        collect_minutes=0.0,
        kind=variant.kind,
        members=variant.members,
        resume=(out / "work" / "tuning.json").exists(),
    )
    Tuning(config, clock=time.process_time, say=lambda line: print(line, flush=True)).train([])


class Members:
    """The drafts of a row, run along held-out answers."""

    def __init__(self, engine: EngineConfig, variant: Variant, out: Path, depth: int) -> None:
        files = resolve(engine.model)
        target = Target(files, open_model(files))
        texts = held_out_texts(Corpus(out / "work" / "shards"))
        names = [member_name(number) for number in range(variant.members)] if variant.members > 1 else [""]
        self.depth = depth
        self.checkpoints = [out / "work" / f"{name or 'checkpoint'}.safetensors" for name in names]
        self.trained = list[MeasuredDraft]()
        for name in names:
            draft = read_draft(out / name, target, depth)
            self.trained.append(MeasuredDraft(out / name, draft, rank_tokens(draft, texts)))


def measured(members: Members) -> dict[str, Any]:
    """Return counts of correct proposals of a row's drafts."""
    all_ranks = [one.ranks for one in members.trained]
    widths = (1,) * members.depth
    return {
        "steps": [read_checkpoint(path).state.steps for path in members.checkpoints],
        "places": len(all_ranks[0].token_ranks_PL),
        "own": [accepted([one], widths) for one in all_ranks],
        "pool": [accepted(all_ranks[:count], widths) for count in range(1, len(all_ranks) + 1)],
        "wide": accepted(all_ranks[:1], (3, *widths[1:])),
    }


def reckoned(engine: EngineConfig, members: Members) -> dict[str, Any]:
    """Return the best trees of each number of members at this machine's pass times, in int8."""
    costs = measured_costs(engine, [one.folder for one in members.trained], NoProgress())
    selection = Selection(candidates_of(members.trained, costs), costs.target)
    return {
        "ratios": [selection.ratio(pool) for pool in selection.pools],
        "tokens": [pool.tokens_per_step for pool in selection.pools],
        "milliseconds": [1e3 * pool.step_seconds for pool in selection.pools],
    }


def accepted(all_ranks: Sequence[TokenRanks], widths: Sequence[int]) -> float:
    """Return tokens per pass of merged trees of these widths: the longest correct chain of any member,
    plus one.
    """
    longest = torch.stack([one.accepted(widths) for one in all_ranks]).amax(dim=0)
    return 1.0 + float(longest.double().mean())


def page(study: Study) -> list[str]:
    settings, cells = study.settings, study.cells
    learnt, held_out = settings["texts"]
    rows = {name: cell for name, cell in cells.items() if not name.endswith(_TIMED)}
    timed = {name: cells[f"{name}: {_TIMED}"] for name in rows if f"{name}: {_TIMED}" in cells}
    places = max((cell["places"] for cell in rows.values()), default=0)
    return [
        f"# Boosted pools of drafts: {settings['model']}",
        "",
        f"Each row is trained for {settings['minutes']:g} minutes of one thread's CPU time in all, which its "
        f"members share, on the same {settings['tokens']} tokens of {learnt} answers; small models have "
        f"{settings['layers']} layers of the target's size where nothing else is said. Measured at {places} "
        f"places of {held_out} held-out greedy answers: tokens a pass of the target's, with chains of "
        f"{settings['depth']} guesses, one for each member.",
        "",
        "| | steps | members alone | pool of 1, 2, ... | first member alone, tree of "
        f"<3{',1' * (settings['depth'] - 1)}> |",
        "|" + "---|" * 5,
        *(
            row(name, " ".join(map(str, cell["steps"])), *map(_decimals, (cell["own"], cell["pool"])))
            + f" {cell['wide']:.3f} |"
            for name, cell in rows.items()
        ),
        "",
        "A pool of three chains verifies as many nodes as that tree of the first member's.",
        "",
        "## At what passes take here",
        "",
        "Target and drafts in int8, one request. Of every row the first 1, 2, ... members with the trees "
        "that make the most of them, as a tuning selects; over no speculation.",
        "",
        "| | over none | tokens a step | ms a step |",
        "|---|---|---|---|",
        *(
            row(name, *(_decimals(cell[key]) for key in ("ratios", "tokens", "milliseconds")))
            for name, cell in timed.items()
        ),
    ]


def _decimals(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


if __name__ == "__main__":
    run(main)
