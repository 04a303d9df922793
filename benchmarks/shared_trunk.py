"""What do members on one trunk bring, which are extra rows of a block head's pass?

    python benchmarks/shared_trunk.py --model TARGET --head HEAD --corpus FOLDER --work DIR --minutes 8

FOLDER has the shards of answers that `specinfer tune` and benchmarks/boosting.py collect. The head is the
trunk, and learns nothing any more. Members are those of `specinfer tune --on-trunk`, trained one after the
other, each for the same CPU time, by a form of boosting; what is before them proposes its likeliest token.
Held-out guesses are compared by counting, chains of all against trees of the trunk alone with as many nodes,
so a busy machine changes no figure but how many steps were made.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from boosting import accepted, conditional
from study import REQUIRED, Study, natural, parser, row, run

from specinfer.hub import resolve
from specinfer.models.weights import open_model
from specinfer.progress import NoProgress
from specinfer.tune.allocator import keep_freed_memory
from specinfer.tune.block_kind import BlockKind
from specinfer.tune.boosting import Boost, BoostConfig, lessons_of
from specinfer.tune.draft import Beginning, Draft, Target
from specinfer.tune.held_out import Along, along, held_out_texts
from specinfer.tune.known_guesses import KnownGuesses
from specinfer.tune.member_kind import MemberKind
from specinfer.tune.read_draft import read_draft
from specinfer.tune.shards import Corpus
from specinfer.tune.trainer import TrainConfig, Trainer

FORMS: Final[tuple[Boost, ...]] = ("discount", "residual", "none")


def main() -> None:
    options = parser(__doc__, model=REQUIRED)
    options.add_argument("--head", required=True, metavar="HEAD", help="the trunk: a block head")
    options.add_argument("--corpus", type=Path, required=True, metavar="FOLDER", help="collected answers")
    options.add_argument("--work", type=Path, required=True, metavar="DIR", help="for what members propose")
    options.add_argument("--minutes", type=float, default=8.0, help="of a member, CPU time (default 8)")
    options.add_argument("--members", type=natural, default=2, help="beside the trunk (default 2)")
    options.add_argument("--form", action="append", choices=FORMS, help="repeatable (default all)")
    args = options.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    files = resolve(args.model)
    target = Target(files, open_model(files))
    kind = BlockKind()
    taps = kind.taps(target.config)
    corpus = Corpus(args.corpus, [*range(len(taps))])
    folder = resolve(args.head).path
    alone = read_draft(folder, target, kind.depth)
    settings = {
        "model": Path(args.model).name,
        "head": Path(args.head).name,
        "minutes": args.minutes,
        "members": args.members,
        "version": 3,  # of what a cell tells
        "tokens": corpus.tokens,
    }
    study = Study("shared-trunk", args.out, settings)
    texts = held_out_texts(corpus)
    of_trunk = along(alone, texts)
    proposes = KnownGuesses(corpus, args.work / "trunk", folder / "model.safetensors")
    proposes.complete(alone, 1, NoProgress())
    for form in args.form or FORMS:
        if form not in study.cells:
            found = members(target, MemberKind(trunk=folder, kind=kind), corpus, form, proposes, args)
            study.keep(form, measured(of_trunk, [along(one, texts) for one in found]))
            print(f"{form}: {study.cells[form]}", flush=True)
            study.write(page(study.settings, study.cells))
    study.write(page(study.settings, study.cells))


def members(
    target: Target, kind: MemberKind, corpus: Corpus, form: Boost, proposes: KnownGuesses, args: Any
) -> list[Draft]:
    """Members on the trunk, each of which has learnt what is left by it and those before."""
    found: list[Draft] = []
    known = [proposes]
    for number in range(args.members):
        lessons = lessons_of(corpus, BoostConfig(form=form), known)
        beginning = Beginning(target, lessons, 101 * number + 1, lambda draft: 0.0, print)
        begun = kind.new(None, beginning)
        trainer = Trainer(begun, TrainConfig(seed=101 * number + 1))
        began, whole = time.process_time(), 60 * args.minutes
        while (spent := time.process_time() - began) < whole:
            trainer.step(lessons, 1 - spent / whole)
        print(f"{form} {number + 1}: {trainer.state.steps} steps, loss {trainer.state.loss:.3f}", flush=True)
        found.append(trainer.averaged())
        weights = sum(p.numel() for p in begun.module.parameters() if p.requires_grad)
        print(f"{weights / 1e6:.2f} million weights of its own", flush=True)
        if form != "none" and number + 1 < args.members:
            known.append(_proposals(corpus, args.work / f"{form}-{number}", found[-1]))
    return found


def _proposals(corpus: Corpus, folder: Path, draft: Draft) -> KnownGuesses:
    """What a member proposes where the next one learns."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "weights"
    torch.save(draft.module.state_dict(), weights)
    known = KnownGuesses(corpus, folder / "guesses", weights)
    known.complete(draft, 1, NoProgress())
    return known


def measured(trunk: Along, found: Sequence[Along]) -> dict[str, Any]:
    """What the trunk's guesses are worth alone and with its members, by counts."""
    chain = (1,) * trunk.ranks_PL.shape[1]
    pool = [trunk, *found]
    return {
        "places": len(trunk.texts_P),
        "own": [accepted([one], chain) for one in pool],
        "chains": [accepted(pool[:count], chain) for count in range(1, len(pool) + 1)],
        "trees": [accepted([trunk], (count, *chain[1:])) for count in range(1, len(pool) + 1)],
        "wider": [accepted([trunk], (2 * count, *chain[1:])) for count in range(1, len(pool) + 1)],
        "beside": [accepted(pool[:count], (2, *chain[1:])) for count in range(1, len(pool) + 1)],
        "second_choice": conditional(trunk, trunk, 2),
        "second_member": conditional(trunk, found[0], 1),
    }


def page(settings: Mapping[str, Any], cells: Mapping[str, Any]) -> list[str]:
    """Markdown: a row for each form."""
    counts = max((len(cell["own"]) for cell in cells.values()), default=1)
    return [
        f"# Members on one trunk: {settings['head']} for {settings['model']}",
        "",
        f"Each member is trained for {settings['minutes']:g} minutes of one thread's CPU time on "
        f"{settings['tokens']} tokens of answers. Tokens a pass of the target's on held-out greedy answers; "
        f"pools of 1 to {counts}, the trunk first. A pool of n chains has as "
        "many nodes as a tree of the trunk alone with n first guesses.",
        "",
        row(
            *("boosted by", "places", "members alone", "chains of all", "trees of the trunk alone"),
            *("two first guesses of each", "twice as many first guesses of the trunk alone"),
            "where the trunk is wrong: its second choice right",
            "the second member right",
        ),
        row(*["---"] * 9),
        *(
            row(
                *(form, cell["places"]),
                *(_told(cell[name]) for name in ("own", "chains", "trees", "beside", "wider")),
                *(f"{cell['second_choice']:.3f}", f"{cell['second_member']:.3f}"),
            )
            for form, cell in cells.items()
        ),
    ]


def _told(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


if __name__ == "__main__":
    run(main)
