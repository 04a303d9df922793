"""The knowledge of a policy on disk, so that the next process begins where this one ended.

One small JSON file for a target with its drafts on a device: curves of guesses, counts of drafts' levels, and
the time of plain steps; no text, no token. It is written whole (files.py) every some steps and at the end, so
of two processes the later one's is there. A file that is cut short, changed, of another version or holds an
impossible number is not used: one line says why, and the policy begins as if there were none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from specinfer.files import cache_dir, write_whole
from specinfer.speculate.policy.chances import FARTHEST, HEATS, STEEPEST_SLOPE, Chances, Curve
from specinfer.speculate.policy.guard import KEPT, PLAIN_FIRST, Guard, PlainSteps

_LOG = logging.getLogger(__name__)

VERSION: Final = 6  # of the file; another one is when numbers mean something else
LARGEST: Final = 1 << 20  # bytes of a file
EVERY: Final = 2000  # steps, after which the file is written
LEAST: Final = 500  # outcomes that are worth writing
_MOST_NAMES: Final = 256
_MOST_OUTCOMES: Final = 1 << 53
_MOST_TRIES: Final = 1e4  # of a level, that full batches can come to
_ROUNDING: Final = 1e-12  # of the tries
_SLOWEST: Final = 1e6  # times; no step takes so long

Key = Mapping[str, Any]  # "target", "drafts", "device": JSON values


@dataclass(frozen=True, slots=True)
class StoredPolicy:
    """A file, as it was found."""

    file: Path
    key: Key
    learned: Mapping[str, Any]


class PolicyMemory:
    """Recalls the knowledge of a key into `chances` and `guard`, and keeps theirs from then on."""

    def __init__(self, key: Key, chances: Chances, guard: Guard, folder: Path | None = None) -> None:
        self._key = key
        self._chances, self._guard = chances, guard
        self._file = (folder or policies_dir()) / f"{_digest(key)[:16]}.json"
        self._steps = 0
        self._kept = 0  # outcomes that the file has
        self._failed = False  # to write, which was logged

    def recall(self) -> None:
        """Take over the file's knowledge, where there is one that can be used."""
        try:
            stored = read_policy(self._file)
            if stored.key != self._key:  # two keys of one name, or a file that was moved
                raise ValueError("it is of other models")
            recall(stored.learned, self._chances, self._guard)
            self._kept = self._chances.outcomes
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError, KeyError) as error:
            _LOG.warning(
                "the knowledge of earlier runs is not used, speculation begins anew: %s: %s; "
                "`specinfer policy reset` removes it",
                self._file,
                _reason(error),
            )

    def stepped(self) -> None:
        """A step is over: every EVERY steps the file is written."""
        self._steps += 1
        if self._steps % EVERY == 0:
            self.keep()

    def keep(self) -> None:
        """Write the file, if that is worth it."""
        outcomes = self._chances.outcomes
        if outcomes - self._kept < LEAST:  # a test, or a short answer
            return
        self._kept = outcomes
        if not write_policy(self._file, self._key, told(self._chances, self._guard)) and not self._failed:
            self._failed = True
            _LOG.warning(
                "the knowledge of speculation cannot be written to %s, and ends with this process; "
                "set SPECINFER_CACHE to a folder that can be written",
                self._file,
            )


def told(chances: Chances, guard: Guard) -> dict[str, Any]:
    """The knowledge as JSON values."""
    return {
        "outcomes": chances.outcomes,
        "curves": {
            name: [[curve.offset, curve.slope] for curve in curves] for name, curves in chances.curves.items()
        },
        "drafts": {
            name: {"all": levels.all.to_json(), "alike": [alike.to_json() for alike in levels.alike]}
            for name, levels in chances.levels.items()
        },
        "plain": {
            str(size): [*map(list, plain.seen)] for size, plain in guard.plain_steps.items() if plain.seen
        },
    }


def recall(learned: Mapping[str, Any], chances: Chances, guard: Guard | None = None) -> None:
    """Take over the result of `told`; takes nothing and raises ValueError or KeyError for other values."""
    curves = {_name(name): _curves(one) for name, one in _mapping(learned["curves"], _MOST_NAMES).items()}
    stored = _mapping(learned["drafts"], _MOST_NAMES)
    drafts = {name: checked_levels(stored[name]) for name in chances.levels if name in stored}
    plain = {
        _whole(int(size), 0, 64): [
            (_real(slow, 1 / _SLOWEST, _SLOWEST), _real(multiple, 1 / _SLOWEST, _SLOWEST))
            for slow, multiple in (_list(one, 2, 2) for one in _list(seen, 1, KEPT))
        ]
        for size, seen in _mapping(learned["plain"], 64).items()
    }
    outcomes = _whole(learned["outcomes"], 0, _MOST_OUTCOMES)
    chances.recall(curves)
    for name, (of_all, alike) in drafts.items():
        chances.levels[name].all.recall(of_all)
        for heat, levels in zip(chances.levels[name].alike, alike, strict=True):
            heat.recall(levels)
    chances.outcomes = outcomes
    if guard is not None:
        for size, multiples in plain.items():
            guard.plain_steps[size] = PlainSteps(deque(multiples, maxlen=KEPT), count=PLAIN_FIRST)


def checked_levels(value: object) -> tuple[list[list[float]], list[list[list[float]]]]:
    """The level counts of a draft, of all requests and by temperature; raises ValueError for others."""
    found = _mapping(value, 2)
    return _levels(found["all"]), [
        _levels(one) for one in _list(found["alike"], len(HEATS) + 1, len(HEATS) + 1)
    ]


def policies_dir() -> Path:
    """The folder of the files."""
    return cache_dir() / "policies"


def write_policy(file: Path, key: Key, learned: Mapping[str, Any]) -> bool:
    """Write a file whole; returns whether that could be done."""
    content = {"version": VERSION, "key": key, "learned": learned}
    return write_whole(file, json.dumps({**content, "checksum": _digest(content)}, indent=1) + "\n")


def read_policy(file: Path) -> StoredPolicy:
    """A file's contents; raises OSError, and ValueError that says why it cannot be used."""
    with file.open("rb") as opened:
        data = opened.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ValueError(f"it has more than {LARGEST} bytes")
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError("it is no whole JSON file") from error
    found = _mapping(parsed, 100)
    if found.get("version") != VERSION:
        raise ValueError(f"it is of version {found.get('version')!r:.20}, not {VERSION}")
    content = {name: found.get(name) for name in ("version", "key", "learned")}
    if found.get("checksum") != _digest(content):
        raise ValueError("its checksum is wrong")
    return StoredPolicy(file, _mapping(content["key"], 100), _mapping(content["learned"], 100))


def stored_policies(folder: Path | None = None) -> list[tuple[Path, StoredPolicy | None, str]]:
    """All files, each with its contents, or with None and why it cannot be used."""
    found = list[tuple[Path, StoredPolicy | None, str]]()
    for file in sorted((folder or policies_dir()).glob("*.json")):
        try:
            found.append((file, read_policy(file), ""))
        except (OSError, ValueError) as error:
            found.append((file, None, _reason(error)))
    return found


def _curves(value: object) -> tuple[Curve, Curve]:
    """A speculator's curves, of others than first choices and of these."""
    others, firsts = _list(value, 2, 2)
    return _curve(others), _curve(firsts)


def _curve(value: object) -> Curve:
    """A curve of a speculator's guesses."""
    offset, slope = _list(value, 2, 2)
    return Curve(_real(offset, -FARTHEST, FARTHEST), _real(slope, 0.0, STEEPEST_SLOPE))


def _levels(value: object) -> list[list[float]]:
    """The counts of levels: first guesses and others that were right, and the tries."""
    found = list[list[float]]()
    for firsts, others, tries in (_list(one, 3, 3) for one in _list(value, 0, 1000)):
        of = _real(tries, 0.0, _MOST_TRIES)
        first = _real(firsts, 0.0, of)
        left = of - first  # each count fades by itself, so where nothing missed `others` may round higher
        found.append([first, min(_real(others, 0.0, left + _ROUNDING * of), left), of])
    return found


def _real(value: object, least: float, most: float) -> float:
    """A number between `least` and `most`; raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"expected a number in [{least:g}, {most:g}], got {value!r:.40}")
    if not least <= value <= most:
        raise ValueError(f"expected a number in [{least:g}, {most:g}], got {value:g}")
    return float(value)


def _whole(value: object, least: int, most: int) -> int:
    """An integer between `least` and `most`; raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"expected an integer in [{least}, {most}], got {value!r:.40}")
    return value


def _name(value: object) -> str:
    """The name of a speculator; raises ValueError for anything else."""
    if not isinstance(value, str) or not 0 < len(value) <= 200:
        raise ValueError(f"expected a speculator's name, got {value!r:.40}")
    return value


def _mapping(value: object, most: int) -> Mapping[str, Any]:
    """An object of JSON with at most so many members; raises ValueError for anything else."""
    if not isinstance(value, dict) or len(value) > most:
        raise ValueError(f"expected an object of at most {most} members, got {value!r:.40}")
    return value


def _list(value: object, least: int, most: int) -> Sequence[Any]:
    """A list of `least` to `most` values; raises ValueError for anything else."""
    if not isinstance(value, list) or not least <= len(value) <= most:
        raise ValueError(f"expected a list of {least} to {most} values, got {value!r:.40}")
    return value


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or "it cannot be read"
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)
