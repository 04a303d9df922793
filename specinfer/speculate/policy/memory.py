"""PolicyMemory: a policy's learned state on disk, so that the next process starts with it.

There is one small JSON file for a target with its drafts on a device. It has the curves of guesses, the
counts of drafts' levels, and the time of plain steps; no text and no token. It is written atomically
(files.py) every `EVERY` steps and at the end, so of two processes the later one's remains. A file that is
truncated, changed, of another version or has an impossible number is not used: one log line gives the reason,
and the policy starts without it.
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
from specinfer.speculate.policy.acceptance import MAX_OFFSET, MAX_SLOPE, TEMPERATURES, AcceptanceRates, Curve
from specinfer.speculate.policy.guard import KEPT, PLAIN_FIRST, Guard, PlainSteps

_LOG = logging.getLogger(__name__)

VERSION: Final = 6  # version of the file; incremented when its numbers change their meaning
MAX_BYTES: Final = 1 << 20  # maximum size of a file
EVERY: Final = 2000  # steps between writes
MIN_OUTCOMES: Final = 500  # new outcomes needed for a write
_MAX_NAMES: Final = 256
_MAX_OUTCOMES: Final = 1 << 53
_MAX_TRIES: Final = 1e4  # maximum tries of a level; full batches stay below
_ROUNDING: Final = 1e-12  # relative to the tries
_SLOWEST: Final = 1e6  # largest multiple of a plain step

Key = Mapping[str, Any]  # "target", "drafts", "device": JSON values


@dataclass(frozen=True, slots=True)
class StoredPolicy:
    """Contents of a file."""

    file: Path
    key: Key
    learned: Mapping[str, Any]


class PolicyMemory:
    """Loads the state of a key into `acceptance` and `guard`, and writes theirs from then on."""

    def __init__(
        self, key: Key, acceptance: AcceptanceRates, guard: Guard, folder: Path | None = None
    ) -> None:
        self._key = key
        self._acceptance, self._guard = acceptance, guard
        self._file = (folder or policies_dir()) / f"{_digest(key)[:16]}.json"
        self._steps = 0
        self._kept = 0  # outcomes in the file
        self._failed = False  # True once a failed write was logged

    def recall(self) -> None:
        """Load the file if there is a valid one; otherwise log why it is not used."""
        try:
            stored = read_policy(self._file)
            if stored.key != self._key:  # a collision of names, or a file that was moved
                raise ValueError("it is of other models")
            recall(stored.learned, self._acceptance, self._guard)
            self._kept = self._acceptance.outcomes
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError, KeyError) as error:
            _LOG.warning(
                "the file of learned costs and rates is not used, speculation starts without it: %s: %s; "
                "`specinfer policy reset` removes it",
                self._file,
                _reason(error),
            )

    def stepped(self) -> None:
        """Count a step; writes the file once in EVERY steps."""
        self._steps += 1
        if self._steps % EVERY == 0:
            self.keep()

    def keep(self) -> None:
        """Write the file if there are MIN_OUTCOMES new outcomes."""
        outcomes = self._acceptance.outcomes
        if outcomes - self._kept < MIN_OUTCOMES:  # a test, or a short answer
            return
        self._kept = outcomes
        learned = learned_values(self._acceptance, self._guard)
        if not write_policy(self._file, self._key, learned) and not self._failed:
            self._failed = True
            _LOG.warning(
                "the knowledge of speculation cannot be written to %s, and ends with this process; "
                "set SPECINFER_CACHE to a writable folder",
                self._file,
            )


def learned_values(acceptance: AcceptanceRates, guard: Guard) -> dict[str, Any]:
    """Return the learned state as JSON values."""
    return {
        "outcomes": acceptance.outcomes,
        "curves": {
            name: [[curve.offset, curve.slope] for curve in curves]
            for name, curves in acceptance.curves.items()
        },
        "drafts": {
            name: {"all": levels.all.to_json(), "alike": [alike.to_json() for alike in levels.alike]}
            for name, levels in acceptance.levels.items()
        },
        "plain": {
            str(size): [*map(list, plain.seen)] for size, plain in guard.plain_steps.items() if plain.seen
        },
    }


def recall(learned: Mapping[str, Any], acceptance: AcceptanceRates, guard: Guard | None = None) -> None:
    """Load the result of `learned_values`; raises ValueError or KeyError for others, and loads nothing."""
    curves = {_name(name): _curves(one) for name, one in _mapping(learned["curves"], _MAX_NAMES).items()}
    stored = _mapping(learned["drafts"], _MAX_NAMES)
    drafts = {name: checked_levels(stored[name]) for name in acceptance.levels if name in stored}
    plain = {
        _whole(int(size), 0, 64): [
            (_real(slow, 1 / _SLOWEST, _SLOWEST), _real(multiple, 1 / _SLOWEST, _SLOWEST))
            for slow, multiple in (_list(one, 2, 2) for one in _list(seen, 1, KEPT))
        ]
        for size, seen in _mapping(learned["plain"], 64).items()
    }
    outcomes = _whole(learned["outcomes"], 0, _MAX_OUTCOMES)
    acceptance.recall(curves)
    for name, (of_all, alike) in drafts.items():
        acceptance.levels[name].all.recall(of_all)
        for counts, levels in zip(acceptance.levels[name].alike, alike, strict=True):
            counts.recall(levels)
    acceptance.outcomes = outcomes
    if guard is not None:
        for size, multiples in plain.items():
            guard.plain_steps[size] = PlainSteps(deque(multiples, maxlen=KEPT), count=PLAIN_FIRST)


def checked_levels(value: object) -> tuple[list[list[float]], list[list[list[float]]]]:
    """Return a draft's level counts, of all requests and by temperature; raises ValueError if invalid."""
    found = _mapping(value, 2)
    return _levels(found["all"]), [
        _levels(one) for one in _list(found["alike"], len(TEMPERATURES) + 1, len(TEMPERATURES) + 1)
    ]


def policies_dir() -> Path:
    """Return the folder of the files."""
    return cache_dir() / "policies"


def write_policy(file: Path, key: Key, learned: Mapping[str, Any]) -> bool:
    """Write a file atomically; returns False if the disk refuses it."""
    content = {"version": VERSION, "key": key, "learned": learned}
    return write_whole(file, json.dumps({**content, "checksum": _digest(content)}, indent=1) + "\n")


def read_policy(file: Path) -> StoredPolicy:
    """Return a file's contents; raises OSError, or ValueError with the reason why it is invalid."""
    with file.open("rb") as opened:
        data = opened.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError("it is not a complete JSON file") from error
    found = _mapping(parsed, 100)
    if found.get("version") != VERSION:
        raise ValueError(f"it has version {found.get('version')!r:.20}, expected {VERSION}")
    content = {name: found.get(name) for name in ("version", "key", "learned")}
    if found.get("checksum") != _digest(content):
        raise ValueError("its checksum is wrong")
    return StoredPolicy(file, _mapping(content["key"], 100), _mapping(content["learned"], 100))


def stored_policies(folder: Path | None = None) -> list[tuple[Path, StoredPolicy | None, str]]:
    """Return all files, each with its contents, or with None and the reason why it is invalid."""
    found = list[tuple[Path, StoredPolicy | None, str]]()
    for file in sorted((folder or policies_dir()).glob("*.json")):
        try:
            found.append((file, read_policy(file), ""))
        except (OSError, ValueError) as error:
            found.append((file, None, _reason(error)))
    return found


def _curves(value: object) -> tuple[Curve, Curve]:
    """Return a speculator's curves, of other choices and of first choices."""
    others, firsts = _list(value, 2, 2)
    return _curve(others), _curve(firsts)


def _curve(value: object) -> Curve:
    """Return one curve."""
    offset, slope = _list(value, 2, 2)
    return Curve(_real(offset, -MAX_OFFSET, MAX_OFFSET), _real(slope, 0.0, MAX_SLOPE))


def _levels(value: object) -> list[list[float]]:
    """Return the counts of levels: right first guesses, right other guesses, and tries."""
    found = list[list[float]]()
    for firsts, others, tries in (_list(one, 3, 3) for one in _list(value, 0, 1000)):
        of = _real(tries, 0.0, _MAX_TRIES)
        first = _real(firsts, 0.0, of)
        left = of - first  # counts are rounded separately, so `others` may exceed this slightly
        found.append([first, min(_real(others, 0.0, left + _ROUNDING * of), left), of])
    return found


def _real(value: object, low: float, high: float) -> float:
    """Return a number in [low, high]; raises ValueError for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"expected a number in [{low:g}, {high:g}], got {value!r:.40}")
    if not low <= value <= high:
        raise ValueError(f"expected a number in [{low:g}, {high:g}], got {value:g}")
    return float(value)


def _whole(value: object, low: int, high: int) -> int:
    """Return an integer in [low, high]; raises ValueError for other values."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"expected an integer in [{low}, {high}], got {value!r:.40}")
    return value


def _name(value: object) -> str:
    """Return the name of a speculator; raises ValueError for other values."""
    if not isinstance(value, str) or not 0 < len(value) <= 200:
        raise ValueError(f"expected a speculator's name, got {value!r:.40}")
    return value


def _mapping(value: object, max_length: int) -> Mapping[str, Any]:
    """Return a JSON object of at most `max_length` members; raises ValueError for other values."""
    if not isinstance(value, dict) or len(value) > max_length:
        raise ValueError(f"expected an object of at most {max_length} members, got {value!r:.40}")
    return value


def _list(value: object, low: int, high: int) -> Sequence[Any]:
    """Return a list of `low` to `high` values; raises ValueError for other values."""
    if not isinstance(value, list) or not low <= len(value) <= high:
        raise ValueError(f"expected a list of {low} to {high} values, got {value!r:.40}")
    return value


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or "it cannot be read"
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)
