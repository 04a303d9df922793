"""The gate: what was tuned takes the place of an older draft only where it is better beyond doubt.

Both are measured along the same held-out answers, of what is asked now, and at the same costs. It is better
where its tokens a second are more by more than the standard error of the difference, answer by answer.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import ModelError, TuneError
from specinfer.heads.checkpoint import HeadFolder
from specinfer.hub.pool import is_pool, member_folders, read_pool
from specinfer.models.fingerprint import is_of
from specinfer.tune.draft import Draft, Target
from specinfer.tune.read_draft import open_draft, read_draft

BEFORE: Final = ".before"  # behind a folder's name: what it was until it was replaced


@dataclass(frozen=True, slots=True)
class Verdict:
    """Two drafts along the same answers, in tokens a second."""

    new: float
    old: float
    gain: float  # the mean of the differences, answer by answer
    error: float  # its standard error
    answers: int

    @classmethod
    def of(cls, new_S: NDArray[np.float64], old_S: NDArray[np.float64]) -> Verdict:
        """Compare the speeds at the same answers."""
        gains = new_S - old_S
        count = len(gains)
        error = float(gains.std(ddof=1)) / math.sqrt(count) if count > 1 else math.inf
        return cls(float(new_S.mean()), float(old_S.mean()), float(gains.mean()), error, count)

    @property
    def better(self) -> bool:
        """Whether the new one takes the old one's place."""
        return self.gain > self.error

    def told(self, folder: Path) -> str:
        """Why it did or did not, in a line."""
        done, than = ("is replaced", "more") if self.better else ("stays", "not more")
        return (
            f"{folder} {done}: on {self.answers} held-out answers the new one makes {self.new:.2f} tokens/s "
            f"and the old one {self.old:.2f}; the difference, {self.gain:.2f}, is {than} than its standard "
            f"error, {self.error:.2f}"
        )


class Incumbent:
    """The draft that may be replaced: a head, a small model or a pool of these."""

    def __init__(self, folder: Path, target: Target) -> None:
        """Raises TuneError where there is nothing to be replaced, ModelError and its kind where it cannot be
        used with this target.
        """
        if not folder.is_dir():
            before = folder.with_name(folder.name + BEFORE)
            hint = f"; {before} is there: rename it" if before.is_dir() else "; give --out alone"
            raise TuneError(f"there is no folder {folder} whose draft could be replaced{hint}")
        self.folder = folder
        self.members = [folder]
        self._target = target
        if is_pool(folder):
            pool = read_pool(folder)
            if not is_of(pool.fingerprint, target.model):
                raise ModelError(f"the pool {folder} was tuned for {pool.target}; name that model")
            self.members = member_folders(folder, pool)
        elif not (folder / "config.json").is_file():
            raise TuneError(f"{folder} holds no draft and no pool that could be replaced; give --out alone")
        for member in self.members:
            open_draft(member, target)  # before anything is trained

    def taps(self) -> tuple[int, ...]:
        """The layers whose inputs its heads read."""
        return tuple(sorted({tap for member in self.members for tap in taps_of(member, self._target)}))

    def drafts(self, depth: int) -> list[Draft]:
        """Its drafts; `depth` as `read_draft`."""
        return [read_draft(member, self._target, depth) for member in self.members]


def taps_of(folder: Path, target: Target) -> tuple[int, ...]:
    """The layers whose inputs a draft reads: none, where it is a model."""
    draft = open_draft(folder, target)
    return draft.config.taps if isinstance(draft, HeadFolder) else ()


def replace_folder(new: Path, old: Path) -> None:
    """Put what `new` holds, but for its work, in the place of `old`, which is kept as OLD.before.

    Whoever reads the folder finds the old draft or the new one whole, or for an instant none. Raises OSError.
    """
    before = old.with_name(old.name + BEFORE)
    fresh = Path(tempfile.mkdtemp(dir=old.parent, prefix=f"{old.name}.", suffix=".partial"))
    try:
        for entry in new.iterdir():
            if entry.name == "work":
                continue
            if entry.is_dir():
                shutil.copytree(entry, fresh / entry.name)
            else:
                shutil.copy2(entry, fresh / entry.name)
        fresh.chmod(old.stat().st_mode & 0o777)
        if before.exists():
            shutil.rmtree(before)
        os.rename(old, before)
        os.rename(fresh, old)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
