"""What would members on one trunk bring: extra rows of a block head's pass, with few weights of their own?

    python benchmarks/shared_trunk.py --model TARGET --head HEAD --corpus FOLDER --work DIR --minutes 8

FOLDER has the shards of answers that `specinfer tune` and benchmarks/boosting.py collect. The head is the
trunk, and learns nothing any more. A member has a vector that is added to what its rows begin with, parts of
a low rank beside the trunk's matrices (what rows begin with, queries, values, the MLP's way down), and a
table of its own for the token before. Members are trained one after the other, each for the same CPU time,
by a form of boosting; what is before them proposes its likeliest token. Held-out guesses are compared by
counting, chains of all against trees of the trunk alone with as many nodes, so a busy machine changes no
figure but how many steps were made. Nothing here is what an engine runs.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from boosting import accepted, conditional
from study import REQUIRED, Study, natural, parser, row, run
from torch import Tensor, nn
from torch.nn.utils import parametrize

from specinfer.heads.block import BlockHead
from specinfer.hub import resolve
from specinfer.models.weights import open_model
from specinfer.progress import NoProgress
from specinfer.tune.allocator import keep_freed_memory
from specinfer.tune.block_kind import BlockKind
from specinfer.tune.boosting import Boost, BoostConfig, lessons_of
from specinfer.tune.draft import Target
from specinfer.tune.head_draft import BlockHeadDraft
from specinfer.tune.held_out import Along, along, held_out_texts
from specinfer.tune.known_guesses import KnownGuesses
from specinfer.tune.known_head import known_head
from specinfer.tune.lessons import AllLessons
from specinfer.tune.new_head import scale_of
from specinfer.tune.shards import Corpus
from specinfer.tune.trainer import TrainConfig, Trainer

FORMS: Final[tuple[Boost, ...]] = ("discount", "residual", "none")
LOW_RANK: Final = ("entry", "q_proj", "v_proj", "down_proj")  # matrices that have a part of a member's own


def main() -> None:
    options = parser(__doc__, model=REQUIRED)
    options.add_argument("--head", required=True, metavar="HEAD", help="the trunk: a block head")
    options.add_argument("--corpus", type=Path, required=True, metavar="FOLDER", help="collected answers")
    options.add_argument("--work", type=Path, required=True, metavar="DIR", help="for what members propose")
    options.add_argument("--minutes", type=float, default=8.0, help="of a member, CPU time (default 8)")
    options.add_argument("--members", type=natural, default=2, help="beside the trunk (default 2)")
    options.add_argument("--rank", type=natural, default=16, help="of their matrices (default 16)")
    options.add_argument("--form", action="append", choices=FORMS, help="repeatable (default all)")
    args = options.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    files = resolve(args.model)
    target = Target(files, open_model(files))
    kind = BlockKind()
    taps = kind.taps(target.config)
    corpus = Corpus(args.corpus, [*range(len(taps))])
    scale_ND = scale_of(AllLessons(corpus))
    trunk = known_head(args.head, kind.config(target.config, taps), target.model, scale_ND)
    if not isinstance(trunk, BlockHead) or not trunk.config.reads_last or not trunk.config.markov_rank:
        raise SystemExit(f"got the head {args.head}; allowed: a block head of `specinfer tune` with pairs")
    settings = {
        "model": Path(args.model).name,
        "head": Path(args.head).name,
        "minutes": args.minutes,
        "rank": args.rank,
        "members": args.members,
        "version": 2,  # of what a cell tells
        "tokens": corpus.tokens,
    }
    study = Study("shared-trunk", args.out, settings)
    texts = held_out_texts(corpus)
    alone = BlockHeadDraft(trunk.eval(), scale_ND, kind.anchors)
    of_trunk = along(alone, texts)
    proposes = KnownGuesses(corpus, args.work / "trunk", resolve(args.head).path / "model.safetensors")
    proposes.complete(alone, 1, NoProgress())
    for form in args.form or FORMS:
        if form not in study.cells:
            found = members(alone, corpus, form, proposes, args)
            study.keep(form, measured(of_trunk, [along(one, texts) for one in found], found))
            print(f"{form}: {study.cells[form]}", flush=True)
            study.write(page(study.settings, study.cells))
    study.write(page(study.settings, study.cells))


class LowRank(nn.Module):
    """A matrix, and a part of a low rank that is nothing yet beside it."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        channels, inner = weight.shape
        self.a = nn.Parameter(torch.randn(rank, inner, generator=generator) * inner**-0.5)
        self.b = nn.Parameter(torch.zeros(channels, rank))

    def forward(self, weight: Tensor) -> Tensor:
        """[channels, inner]."""
        return weight + self.b @ self.a


class Member(BlockHead):
    """A trunk as one of its members runs it; what is the member's own learns."""

    def __init__(self, trunk: BlockHead, rank: int, seed: int) -> None:
        config = trunk.config
        super().__init__(config, trunk.ids.tolist())
        self.load_state_dict(trunk.state_dict())
        self.requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        self.vector = nn.Parameter(
            0.01 * torch.randn(config.block_size, config.body.hidden_size, generator=generator)
        )
        for name, module in [*self.named_modules()]:
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in LOW_RANK:
                part = LowRank(module.weight, rank, generator)
                parametrize.register_parametrization(module, "weight", part)
        self.markov_head.markov_w1.weight.requires_grad_(True)

    def _entered(self, context: Tensor, anchor_ids_BA: Tensor, anchors_BA: Tensor, size: int) -> Tensor:
        """As the trunk's, and the vector."""
        return super()._entered(context, anchor_ids_BA, anchors_BA, size) + self.vector[:size]


class MemberDraft(BlockHeadDraft):
    """A member as a draft that learns."""

    def copy(self) -> MemberDraft:
        """Another one with weights of its own, which are the same."""
        return MemberDraft(copy.deepcopy(self.head), self.scale_ND, self.anchors)


def members(
    trunk: BlockHeadDraft, corpus: Corpus, form: Boost, proposes: KnownGuesses, args: Any
) -> list[BlockHeadDraft]:
    """Members on the trunk, each of which has learnt what is left by it and those before."""
    found: list[BlockHeadDraft] = []
    known = [proposes]
    for number in range(args.members):
        lessons = lessons_of(corpus, BoostConfig(form=form), known)
        begun = MemberDraft(Member(trunk.head, args.rank, 101 * number + 1), trunk.scale_ND, trunk.anchors)
        trainer = Trainer(begun, TrainConfig(seed=101 * number + 1))
        began, whole = time.process_time(), 60 * args.minutes
        while (spent := time.process_time() - began) < whole:
            trainer.step(lessons, 1 - spent / whole)
        print(f"{form} {number + 1}: {trainer.state.steps} steps, loss {trainer.state.loss:.3f}", flush=True)
        found.append(cast(BlockHeadDraft, trainer.averaged()))
        if form != "none" and number + 1 < args.members:
            known.append(_proposals(corpus, args.work / f"{form}-{number}", found[-1]))
    return found


def _proposals(corpus: Corpus, folder: Path, draft: BlockHeadDraft) -> KnownGuesses:
    """What a member proposes where the next one learns."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "weights"
    torch.save(draft.module.state_dict(), weights)
    known = KnownGuesses(corpus, folder / "guesses", weights)
    known.complete(draft, 1, NoProgress())
    return known


def measured(trunk: Along, found: Sequence[Along], drafts: Sequence[BlockHeadDraft]) -> dict[str, Any]:
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
        "weights": sum(p.numel() for p in drafts[0].module.parameters() if p.requires_grad) / 1e6,
    }


def page(settings: Mapping[str, Any], cells: Mapping[str, Any]) -> list[str]:
    """Markdown: a row for each form."""
    counts = max((len(cell["own"]) for cell in cells.values()), default=1)
    return [
        f"# Members on one trunk: {settings['head']} for {settings['model']}",
        "",
        f"Each member is trained for {settings['minutes']:g} minutes of one thread's CPU time, matrices of "
        f"rank {settings['rank']}, on {settings['tokens']} tokens of answers. Tokens a pass of the target's "
        f"on held-out greedy answers; pools of 1 to {counts}, the trunk first. A pool of n chains has as "
        "many nodes as a tree of the trunk alone with n first guesses.",
        "",
        row(
            *("boosted by", "places", "members alone", "chains of all", "trees of the trunk alone"),
            *("two first guesses of each", "twice as many first guesses of the trunk alone"),
            "where the trunk is wrong: its second choice right",
            *("the second member right", "weights of a member, millions"),
        ),
        row(*["---"] * 10),
        *(
            row(
                *(form, cell["places"]),
                *(_told(cell[name]) for name in ("own", "chains", "trees", "beside", "wider")),
                *(f"{cell['second_choice']:.3f}", f"{cell['second_member']:.3f}", f"{cell['weights']:.2f}"),
            )
            for form, cell in cells.items()
        ),
    ]


def _told(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


if __name__ == "__main__":
    run(main)
