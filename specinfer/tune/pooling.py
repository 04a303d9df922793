"""What trained members are worth here: a pool of those that pay, and what cards and reports say of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from specinfer.config import EngineConfig
from specinfer.engine.build import Curves
from specinfer.engine.drafts import draft_names
from specinfer.files import NewFile
from specinfer.hub.pool import Member, Pool, write_pool
from specinfer.models.fingerprint import fingerprint
from specinfer.progress import Progress
from specinfer.runtime.cost_curve import CostCurve
from specinfer.tune.card import Material, learnt_from, licence_section
from specinfer.tune.draft import Draft, Target
from specinfer.tune.held_out import Along, Figures, figures_of
from specinfer.tune.licence import front_matter
from specinfer.tune.selection import Candidate, Speed, quickest, selected
from specinfer.version import VERSION

Costs = Callable[[EngineConfig, Sequence[Path], Progress], Curves]
_MS: Final = 1e3
_WORTH: Final = "\n## What it is worth\n"  # a section of a single draft's card, the last one


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A member that was written."""

    folder: Path
    draft: Draft
    along: Along  # held-out answers


def candidates_of(members: Sequence[Trained], costs: Curves) -> list[Candidate]:
    """Members with what their passes cost, which are named as an engine names its drafts."""
    names = draft_names(tuple(str(member.folder) for member in members))
    return [
        Candidate(member.folder.name, member.along, costs.drafts[name], member.draft.one_pass)
        for member, name in zip(members, names, strict=True)
    ]


class Selection:
    """What selecting among candidates found."""

    def __init__(self, candidates: Sequence[Candidate], target: CostCurve) -> None:
        self.candidates = candidates
        self.pools = selected(candidates, target)  # by their size, from one member on
        self._target = target

    @property
    def best(self) -> Speed:
        """The pool that is kept."""
        return quickest(self.pools)

    @property
    def pays(self) -> bool:
        """Whether that makes more tokens a second than no draft."""
        return self.ratio(self.best) > 1

    @property
    def plain_seconds(self) -> float:
        """Of a step without any draft."""
        return self._target.expected(1)

    @property
    def plain_tokens_per_second(self) -> float:
        """Without any draft."""
        return 1 / self.plain_seconds

    @property
    def dropped(self) -> list[str]:
        """The members that do not pay."""
        return [one.name for number, one in enumerate(self.candidates) if number not in self.best.members]

    def names(self, pool: Speed) -> str:
        """Its members, in the order they were chosen."""
        return ", ".join(self.candidates[number].name for number in pool.members)

    def lines(self) -> list[str]:
        """For a person: what passes cost, what each size is worth, and what is left out."""
        told = [
            f"a pass of the target takes {_MS * self.plain_seconds:.2f} ms for one token: "
            f"{self.plain_tokens_per_second:.1f} tokens/s without a draft"
        ]
        told += [
            f"{self.names(pool)}: {pool.tokens_per_step:.3f} tokens a step of "
            f"{_MS * pool.step_seconds:.2f} ms, {_MS * self.guessing_seconds(pool):.2f} ms of it to guess, "
            f"{pool.tokens_per_second:.1f} tokens/s ({self.ratio(pool):.3f} of no speculation)"
            for pool in self.pools
        ]
        told += [f"{name} does not pay and is left out of the pool" for name in self.dropped]
        if not self.pays:
            told.append("no draft pays on this machine: no speculation is quicker")
        return told

    def verdict(self) -> str:
        """Whether what is kept pays, to stand behind its name."""
        does = "pays" if self.pays else "does not pay"
        return (
            f"{does} on this machine ({self.best.tokens_per_second:.1f} tokens/s expected with it, "
            f"{self.plain_tokens_per_second:.1f} without: {self.ratio(self.best):.2f} times)"
        )

    def guessing_seconds(self, pool: Speed) -> float:
        """Of its members' passes in a step."""
        shapes = zip(pool.members, pool.widths, strict=True)
        return sum(self.candidates[number].seconds(widths) for number, widths in shapes)

    def ratio(self, pool: Speed) -> float:
        """Its speed over that of no draft."""
        return pool.tokens_per_second / self.plain_tokens_per_second


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What came of a tuning."""

    figures: Figures  # of what was kept
    selection: Selection


def add_worth(folder: Path, selection: Selection) -> None:
    """Put what a single draft is worth at the end of its card, in place of what is said there already.

    Raises OSError.
    """
    readme = folder / "README.md"
    before = readme.read_text(encoding="utf-8").partition(_WORTH)[0]
    with NewFile(readme, mode=0o644) as new:
        new.write(f"{before}{_WORTH}{_worth(selection)}".encode())
        new.keep()


def make_pool(
    out: Path, target: Target, members: Sequence[Trained], kind: str, selection: Selection, material: Material
) -> None:
    """Write the pool of the selected members into the folder that theirs are in; raises OSError."""
    best = selection.best
    listed = [
        Member(
            members[number].folder.name,
            kind,
            {"tokens_per_pass": figures_of(members[number].along).tokens_per_pass},
        )
        for number in best.members
    ]
    figures = {
        "tokens_per_step": best.tokens_per_step,
        "step_milliseconds": _MS * best.step_seconds,
        "tokens_per_second": best.tokens_per_second,
        "plain_tokens_per_second": selection.plain_tokens_per_second,
    }
    with NewFile(out / "README.md", mode=0o644) as new:
        new.write(_card(selection, members, kind, material).encode())
        new.keep()
    write_pool(out, Pool(target.name, fingerprint(target.model), tuple(listed), figures))


def _worth(selection: Selection) -> str:
    best = selection.best
    [widths] = best.widths
    return f"""
Its trees along the same answers, at what passes took on the machine that tuned it:

| | |
|---|---|
| tokens a step | {best.tokens_per_step:.3f}, of trees with {_shown(widths)} guesses a level |
| a step | {_MS * best.step_seconds:.2f} ms, {_MS * selection.guessing_seconds(best):.2f} ms of it to guess |
| a step without it | {_MS * selection.plain_seconds:.2f} ms, for one token |
| over no speculation | {selection.ratio(best):.3f} |

It {selection.verdict()}.
"""


def _table(selection: Selection) -> str:
    """What each size is worth."""
    rows = [
        f"| {selection.names(pool)} | {pool.tokens_per_step:.3f} | {_MS * pool.step_seconds:.2f} | "
        f"{selection.ratio(pool):.3f} | {' '.join(_shown(widths) for widths in pool.widths)} |"
        for pool in selection.pools
    ]
    header = (
        "| members | tokens a step | ms a step | over no speculation | guesses a level, member by member |"
    )
    return "\n".join((header, "|---|---|---|---|---|", *rows))


def _card(selection: Selection, members: Sequence[Trained], kind: str, material: Material) -> str:
    left = ", ".join(selection.dropped)
    verdict = f"Left out, as they do not pay: {left}." if left else "Every member pays and is in the pool."
    places = len(members[0].along.texts_P)
    return f"""---
tags: [speculative-decoding, draft-pool]
{front_matter(material.licence)}
---

# A pool of drafts for {material.target}

{len(selection.best.members)} of {len(members)} drafts of kind {kind}, tuned together. They change no text.

    specinfer generate --model {material.target} --draft THIS_FOLDER "..."

They learnt from {learnt_from(material)}.

Trees of these members, merged, along {material.held_out} held-out greedy answers ({places} places), at what
passes took on the machine that tuned them:

{_table(selection)}

{verdict} Each member's folder has a card of its own. The pool {selection.verdict()}.
Made {datetime.now(UTC):%Y-%m-%d} by specinfer {VERSION}.
{licence_section(material, members[0].draft.described().of_target)}"""


def _shown(widths: Sequence[int]) -> str:
    return f"<{','.join(str(width) for width in widths)}>"
