"""Selection of the pool members that pay, by tokens/s of their merged trees along held-out answers.

A step verifies one tree in which the members' trees are merged. It costs a target pass over its nodes and the
members' passes, as measured on this machine (runtime/cost_curve.py). Each member's tree has a few guesses per
level, and these widths are chosen together with the members: a policy's choice per step is made here once for
all steps. Members are added greedily, best first, and those after the best pool size are dropped.

A guess is right if it equals the next token. Right guesses of several members are one node. Whether their
wrong guesses coincide is unknown, so these are counted separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from specinfer.hub.pool import Member, Pool, write_pool
from specinfer.models.fingerprint import fingerprint
from specinfer.progress import Progress
from specinfer.runtime.cost_curve import CostCurve
from specinfer.tune.card import TrainingMaterial, describe_material, front_matter, licence_section
from specinfer.tune.draft import Target, TrainableDraft
from specinfer.tune.evaluation import Figures, TokenRanks, figures_of
from specinfer.version import VERSION

_MIN_ROWS: Final = 256  # minimum rows of the largest measured pass
Widths = tuple[int, ...]  # guesses per node, level by level
_FIRST: Final = ((1, 1), (2, 1), (3, 1), (2, 2))  # first two levels; deeper levels have one guess each
_READ: Final = 2  # tokens that a draft usually reads in a step
_ROUNDS: Final = 3  # rounds of choosing each member's shape again
Costs = Callable[[EngineConfig, Sequence[Path], Progress], Curves]
_MS: Final = 1e3
_SPEED_SECTION: Final = "\n## What it is worth\n"  # the last section of a single draft's card


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A member with its ranks along held-out answers and the cost of its passes."""

    name: str
    ranks: TokenRanks
    curve: CostCurve
    one_pass: bool  # predicts all levels in one pass; else one pass per level

    def shapes(self) -> list[Widths]:
        """The tree shapes that are tried."""
        depth = self.ranks.token_ranks_PL.shape[1]
        return list(
            dict.fromkeys(
                (*first, *[1] * (levels - 2))[:levels] for levels in range(1, depth + 1) for first in _FIRST
            )
        )

    def seconds(self, widths: Widths) -> float:
        """Time of its passes in a step of one text."""
        rows = [_READ] if self.one_pass else [_READ, *level_sizes(widths)[:-1]]
        return float(self.curve.seconds(rows).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Speed:
    """Speed of some members along held-out answers, each with its tree shape."""

    members: tuple[int, ...]  # in the order they were chosen
    widths: tuple[Widths, ...]
    tokens_P: NDArray[np.float64]  # per step, at each position
    seconds_P: NDArray[np.float64]

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

    def of_texts(self, texts_P: NDArray[np.int64]) -> NDArray[np.float64]:
        """Tokens/s of each text that has a position."""
        count = int(texts_P.max()) + 1
        tokens = np.bincount(texts_P, self.tokens_P, count)
        seconds = np.bincount(texts_P, self.seconds_P, count)
        there = seconds > 0
        found: NDArray[np.float64] = tokens[there] / seconds[there]
        return found


def level_sizes(widths: Widths) -> list[int]:
    """Number of nodes on each level of a tree."""
    return [int(size) for size in np.cumprod(widths)]


def speed_of(candidates: Sequence[Candidate], target: CostCurve, shapes: Mapping[int, Widths]) -> Speed:
    """Speed of the members, keys of `shapes` that index `candidates`, with trees of these shapes."""
    places = len(candidates[0].ranks.texts_P)
    accepted = [_accepted(candidates[member], widths) for member, widths in shapes.items()]
    tokens_P = np.ones(places) + (np.max(accepted, axis=0) if accepted else 0.0)
    nodes_P = np.ones(places, dtype=np.int64)
    for widths in shapes.values():
        nodes_P += sum(level_sizes(widths))
    for level in range(1, 1 + max((len(widths) for widths in shapes.values()), default=0)):
        together_P = np.sum([accepted_P >= level for accepted_P in accepted], axis=0)
        nodes_P -= np.maximum(together_P - 1, 0)
    asked = sum(candidates[member].seconds(widths) for member, widths in shapes.items())
    return Speed(tuple(shapes), tuple(shapes.values()), tokens_P, target.seconds(nodes_P) + asked)


def best_shapes(candidates: Sequence[Candidate], target: CostCurve, members: Sequence[int]) -> Speed:
    """The fastest shapes of these members, by coordinate ascent over members."""
    shapes: dict[int, Widths] = {}
    best: Speed | None = None
    for _ in range(_ROUNDS):
        before = best
        for member in members:
            for widths in candidates[member].shapes():
                now = {**shapes, member: widths}
                tried = {one: now[one] for one in members if one in now}
                speed = speed_of(candidates, target, tried)
                if member not in shapes or best is None or speed.tokens_per_second > best.tokens_per_second:
                    shapes, best = tried, speed
        if best is before:
            break
    assert best is not None
    return best


def selected(candidates: Sequence[Candidate], target: CostCurve) -> list[Speed]:
    """The fastest pools of one member, of two, and so on; each extends the one before by a member."""
    chosen: list[int] = []
    found: list[Speed] = []
    while len(chosen) < len(candidates):
        left = [number for number in range(len(candidates)) if number not in chosen]
        tried = [best_shapes(candidates, target, [*chosen, number]) for number in left]
        best = max(range(len(left)), key=lambda i: (tried[i].tokens_per_second, -left[i]))
        chosen.append(left[best])
        found.append(tried[best])
    return found


def fastest(pools: Sequence[Speed]) -> Speed:
    """The pool with the most tokens/s; of equal ones the smaller."""
    return max(pools, key=lambda pool: pool.tokens_per_second)


def _accepted(candidate: Candidate, widths: Widths) -> NDArray[np.int64]:
    found: NDArray[np.int64] = candidate.ranks.accepted(widths).numpy()
    return found


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredDraft:
    """A member in its folder."""

    folder: Path
    draft: TrainableDraft
    ranks: TokenRanks  # held-out answers


def candidates_of(members: Sequence[MeasuredDraft], costs: Curves) -> list[Candidate]:
    """Members with the costs of their passes, looked up by the engine's names of drafts."""
    names = draft_names(tuple(str(member.folder) for member in members))
    return [
        Candidate(member.folder.name, member.ranks, costs.drafts[name], member.draft.one_pass)
        for member, name in zip(members, names, strict=True)
    ]


class Selection:
    """Result of selecting among candidates."""

    def __init__(self, candidates: Sequence[Candidate], target: CostCurve) -> None:
        self.candidates = candidates
        self.pools = selected(candidates, target)  # by size, from one member on
        self._target = target

    @property
    def best(self) -> Speed:
        """The pool that is kept."""
        return fastest(self.pools)

    @property
    def pays(self) -> bool:
        """True if the best pool makes more tokens/s than no draft."""
        return self.ratio(self.best) > 1

    @property
    def plain_seconds(self) -> float:
        """Time of a step without a draft."""
        return self._target.expected(1)

    @property
    def plain_tokens_per_second(self) -> float:
        """Tokens/s without a draft."""
        return 1 / self.plain_seconds

    @property
    def dropped(self) -> list[str]:
        """The members left out of the best pool."""
        return [one.name for number, one in enumerate(self.candidates) if number not in self.best.members]

    def names(self, pool: Speed) -> str:
        """Its members, in the order they were chosen."""
        return ", ".join(self.candidates[number].name for number in pool.members)

    def lines(self) -> list[str]:
        """Report lines: pass costs, the speed of each pool size, and the members left out."""
        lines = [
            f"a pass of the target takes {_MS * self.plain_seconds:.2f} ms for one token: "
            f"{self.plain_tokens_per_second:.1f} tokens/s without a draft"
        ]
        lines += [
            f"{self.names(pool)}: {pool.tokens_per_step:.3f} tokens per step of "
            f"{_MS * pool.step_seconds:.2f} ms, {_MS * self.guessing_seconds(pool):.2f} ms for drafting, "
            f"{pool.tokens_per_second:.1f} tokens/s ({self.ratio(pool):.3f} times no speculation)"
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
            f"{self.plain_tokens_per_second:.1f} without: {self.ratio(self.best):.2f} times)"
        )

    def guessing_seconds(self, pool: Speed) -> float:
        """Time of its members' passes in a step."""
        shapes = zip(pool.members, pool.widths, strict=True)
        return sum(self.candidates[number].seconds(widths) for number, widths in shapes)

    def ratio(self, pool: Speed) -> float:
        """Its speed over the speed without a draft."""
        return pool.tokens_per_second / self.plain_tokens_per_second


@dataclass(frozen=True, slots=True, eq=False)
class TuneResult:
    """Result of a tuning."""

    figures: Figures  # for the kept draft or pool
    selection: Selection


def add_speed_section(folder: Path, selection: Selection) -> None:
    """Write the measured speed of a single draft at the end of its card, replacing an earlier section.

    Raises OSError.
    """
    readme = folder / "README.md"
    before = readme.read_text(encoding="utf-8").partition(_SPEED_SECTION)[0]
    write_text(readme, f"{before}{_SPEED_SECTION}{_speed_section(selection)}")


def make_pool(
    out: Path,
    target: Target,
    members: Sequence[MeasuredDraft],
    kind: str,
    selection: Selection,
    material: TrainingMaterial,
) -> None:
    """Write the pool of the selected members into the folder above theirs; raises OSError."""
    best = selection.best
    listed = [
        Member(
            members[number].folder.name,
            kind,
            {"tokens_per_pass": figures_of(members[number].ranks).tokens_per_pass},
        )
        for number in best.members
    ]
    figures = {
        "tokens_per_step": best.tokens_per_step,
        "step_milliseconds": _MS * best.step_seconds,
        "tokens_per_second": best.tokens_per_second,
        "plain_tokens_per_second": selection.plain_tokens_per_second,
    }
    write_text(out / "README.md", _card(selection, members, kind, material))
    write_pool(out, Pool(target.name, fingerprint(target.model), tuple(listed), figures))


def _speed_section(selection: Selection) -> str:
    best = selection.best
    [widths] = best.widths
    return f"""
Its trees along the same answers, with pass times of the machine that tuned it:

| | |
|---|---|
| tokens per step | {best.tokens_per_step:.3f}, with trees of {_shown(widths)} guesses per node, by level |
| a step | {_MS * best.step_seconds:.2f} ms, {_MS * selection.guessing_seconds(best):.2f} ms for drafting |
| a step without it | {_MS * selection.plain_seconds:.2f} ms, for one token |
| speed over no speculation | {selection.ratio(best):.3f} |

It {selection.verdict()}.
"""


def _table(selection: Selection) -> str:
    """A table of the speed of each pool size."""
    rows = [
        f"| {selection.names(pool)} | {pool.tokens_per_step:.3f} | {_MS * pool.step_seconds:.2f} | "
        f"{selection.ratio(pool):.3f} | {' '.join(_shown(widths) for widths in pool.widths)} |"
        for pool in selection.pools
    ]
    header = (
        "| members | tokens per step | ms per step | speed over no speculation | guesses per node, by level |"
    )
    return "\n".join((header, "|---|---|---|---|---|", *rows))


def _card(
    selection: Selection, members: Sequence[MeasuredDraft], kind: str, material: TrainingMaterial
) -> str:
    left = ", ".join(selection.dropped)
    verdict = f"Left out, since they do not pay: {left}." if left else "Every member pays and is in the pool."
    places = len(members[0].ranks.texts_P)
    return f"""---
tags: [speculative-decoding, draft-pool]
{front_matter(material.licence)}
---

# A pool of drafts for {material.target}

{len(selection.best.members)} of {len(members)} drafts of kind {kind}, tuned together. They change no text.

    specinfer generate --model {material.target} --draft THIS_FOLDER "..."

They were trained on {describe_material(material)}.

Merged trees of these members, along {material.held_out} held-out greedy answers ({places} positions), with
pass times of the machine that tuned them:

{_table(selection)}

{verdict} Each member's folder has a card of its own. The pool {selection.verdict()}.
Made {datetime.now(UTC):%Y-%m-%d} by specinfer {VERSION}.
{licence_section(material, members[0].draft.description().of_target)}"""


def _shown(widths: Sequence[int]) -> str:
    return f"<{','.join(str(width) for width in widths)}>"


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
