"""Selection of the members that pay, by tokens/s of their merged trees along held-out answers.

A step verifies one tree in which the members' trees are merged. It costs a target pass over its nodes and the
members' passes, as measured on this machine (runtime/cost_curve.py). All members have trees of one shape, a
few guesses per level, which is chosen with the number of members: a policy's choice per step is made here
once for all steps. Each member of a pool learned the tokens that those before it miss, so the first ones
are kept, as many as make the most tokens/s.

A guess is right if it equals the next token. Right guesses of several members are one node. Whether their
wrong guesses coincide is unknown, so these are counted separately.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specinfer.config import EngineConfig
from specinfer.engine.costs import Curves, measure_curves
from specinfer.engine.drafts import draft_names
from specinfer.engine.models import load_models
from specinfer.files import write_text
from specinfer.hub.model_files import write_pool
from specinfer.progress import Progress
from specinfer.runtime.cost_curve import CostCurve
from specinfer.tune.card import TrainingMaterial, describe_material, front_matter, licence_section
from specinfer.tune.draft import TrainableDraft
from specinfer.tune.evaluation import Figures, TokenRanks
from specinfer.version import VERSION

_MIN_ROWS: Final = 256  # minimum rows of the largest measured pass
Widths = tuple[int, ...]  # guesses per node, level by level
_FIRST: Final = ((1, 1), (2, 1), (3, 1), (2, 2))  # first two levels; deeper levels have one guess each
_READ: Final = 2  # tokens that a draft usually reads in a step
Costs = Callable[[EngineConfig, Sequence[Path], Progress], Curves]
_MS: Final = 1e3
_SPEED_SECTION: Final = "\n## What it is worth\n"  # the last section of a card


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredDraft:
    """A member in its folder."""

    folder: Path
    draft: TrainableDraft
    ranks: TokenRanks  # held-out answers


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A member with its ranks along held-out answers and the cost of its passes."""

    name: str
    ranks: TokenRanks
    curve: CostCurve
    one_pass: bool  # predicts all levels in one pass; else one pass per level

    def seconds(self, widths: Widths) -> float:
        """Time of its passes in a step of one text."""
        rows = [_READ] if self.one_pass else [_READ, *level_sizes(widths)[:-1]]
        return float(self.curve.seconds(rows).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Speed:
    """Speed of some members along held-out answers, with trees of one shape."""

    names: tuple[str, ...]  # of the members
    widths: Widths
    tokens_P: NDArray[np.float64]  # per step, at each position
    seconds_P: NDArray[np.float64]
    drafting_seconds: float  # the time of the members' passes in a step

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens."""
        return float(self.tokens_P.mean())

    @property
    def step_seconds(self) -> float:
        """Mean time of a step."""
        return float(self.seconds_P.mean())

    @property
    def tokens_per_second(self) -> float:
        """Mean tokens over mean time, over all positions."""
        return self.tokens_per_step / self.step_seconds


def level_sizes(widths: Widths) -> list[int]:
    """Number of nodes on each level of a tree."""
    return [int(size) for size in np.cumprod(widths)]


def speed_of(members: Sequence[Candidate], target: CostCurve, widths: Widths) -> Speed:
    """Speed of these members, each with a tree of this shape, as far as it has levels."""
    shapes = [widths[: member.ranks.token_ranks_PL.shape[1]] for member in members]
    accepted_MP = np.stack(
        [member.ranks.accepted(shape).numpy() for member, shape in zip(members, shapes, strict=True)]
    )
    nodes_P = np.full(accepted_MP.shape[1], 1 + sum(sum(level_sizes(shape)) for shape in shapes))
    for level in range(1, 1 + len(widths)):
        nodes_P -= np.maximum((accepted_MP >= level).sum(axis=0) - 1, 0)
    drafting = sum(member.seconds(shape) for member, shape in zip(members, shapes, strict=True))
    names = tuple(member.name for member in members)
    return Speed(names, widths, 1.0 + accepted_MP.max(axis=0), target.seconds(nodes_P) + drafting, drafting)


def best_shape(members: Sequence[Candidate], target: CostCurve) -> Speed:
    """The speed of these members with trees of the best shape."""
    depth = max(member.ranks.token_ranks_PL.shape[1] for member in members)
    shapes = dict.fromkeys(
        (*first, *[1] * (levels - 2))[:levels] for levels in range(1, depth + 1) for first in _FIRST
    )
    return max((speed_of(members, target, one) for one in shapes), key=lambda speed: speed.tokens_per_second)


def candidates_of(members: Sequence[MeasuredDraft], costs: Curves) -> list[Candidate]:
    """Members with the costs of their passes, looked up by the engine's names of drafts."""
    names = draft_names(tuple(str(member.folder) for member in members))
    return [
        Candidate(member.folder.name, member.ranks, costs.drafts[name], member.draft.one_pass)
        for member, name in zip(members, names, strict=True)
    ]


class Selection:
    """Result of selecting among candidates; the first ones are kept."""

    def __init__(self, candidates: Sequence[Candidate], target: CostCurve) -> None:
        # By size, from one member on.
        self.pools = [best_shape(candidates[: count + 1], target) for count in range(len(candidates))]
        self.best = max(self.pools, key=lambda pool: pool.tokens_per_second)  # of equal ones the smallest
        self.dropped = [one.name for one in candidates[len(self.best.names) :]]
        self.plain_seconds = target.expected(1)  # time of a step without a draft

    @property
    def pays(self) -> bool:
        """True if the best pool makes more tokens/s than no draft."""
        return self.ratio(self.best) > 1

    def lines(self) -> list[str]:
        """Report lines: pass costs, the speed of each pool size, and the members left out."""
        lines = [
            f"a pass of the target takes {_MS * self.plain_seconds:.2f} ms for one token: "
            f"{1 / self.plain_seconds:.1f} tokens/s without a draft"
        ]
        lines += [
            f"{', '.join(pool.names)}: {pool.tokens_per_step:.3f} tokens per step of "
            f"{_MS * pool.step_seconds:.2f} ms, {_MS * pool.drafting_seconds:.2f} ms for drafting, "
            f"{pool.tokens_per_second:.1f} tokens/s ({self.ratio(pool):.3f} times no speculation), with "
            f"trees of <{','.join(map(str, pool.widths))}> guesses per node"
            for pool in self.pools
        ]
        lines += [f"{name} does not pay and is left out of the pool" for name in self.dropped]
        if not self.pays:
            lines.append("no draft pays on this machine: decoding without speculation is faster")
        return lines

    def verdict(self) -> str:
        """Whether the best pool pays, as a predicate after its name."""
        does = "pays" if self.pays else "does not pay"
        return (
            f"{does} on this machine ({self.best.tokens_per_second:.1f} tokens/s expected with it, "
            f"{1 / self.plain_seconds:.1f} without: {self.ratio(self.best):.2f} times)"
        )

    def ratio(self, pool: Speed) -> float:
        """Its speed over the speed without a draft."""
        return pool.tokens_per_second * self.plain_seconds


@dataclass(frozen=True, slots=True, eq=False)
class TuneResult:
    """Result of a tuning."""

    figures: Figures  # for the kept draft or pool
    selection: Selection


def add_speed_section(folder: Path, selection: Selection) -> None:
    """Write the measured speed at the end of a card, replacing an earlier section; raises OSError."""
    readme = folder / "README.md"
    before = readme.read_text(encoding="utf-8").partition(_SPEED_SECTION)[0]
    measured = "\n".join(f"- {line}" for line in selection.lines())
    write_text(
        readme,
        f"{before}{_SPEED_SECTION}\nAlong the same answers, with pass times of the machine that tuned it:\n\n"
        f"{measured}\n\nIt {selection.verdict()}.\n",
    )


def make_pool(
    out: Path, members: Sequence[MeasuredDraft], kind: str, selection: Selection, material: TrainingMaterial
) -> None:
    """Write the pool of the selected members into the folder above theirs; raises OSError."""
    text = f"""---
tags: [speculative-decoding, draft-pool]
{front_matter(material.licence)}
---

# A pool of drafts for {material.target}

{len(selection.best.names)} of {len(members)} drafts of kind {kind}, tuned together. They change no text.

    specinfer generate --model {material.target} --draft THIS_FOLDER "..."

They were trained on {describe_material(material)}; {material.held_out} greedy answers were held out. Each
member's folder has a card of its own. Made {datetime.now(UTC):%Y-%m-%d} by specinfer {VERSION}.
{licence_section(material, members[0].draft.description().of_target)}"""
    write_text(out / "README.md", text)
    add_speed_section(out, selection)
    write_pool(out, selection.best.names)


def measured_costs(config: EngineConfig, drafts: Sequence[Path], progress: Progress) -> Curves:
    """Measured costs of the config's target and of these drafts; drafts use the target's quantization.

    For a target in its file's blocks, which trained drafts do not have, it is chosen for each draft.
    Keys are the engine's names of the drafts, in order. Raises as `load_models`.
    """
    speculation = replace(
        config.speculation,
        drafts=tuple(str(draft) for draft in drafts),
        draft_quantization="auto" if config.quantization == "gguf" else config.quantization,
    )
    wanted = replace(config, speculation=speculation)
    return measure_curves(wanted, load_models(wanted, progress), _MIN_ROWS, progress)
