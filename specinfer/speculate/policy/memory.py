"""PolicyMemory: a policy's learned state on disk, so that the next process starts with it.

There is one small JSON file for a target with its drafts on a device. It has the curves of guesses, the
counts of drafts' levels, and the time of plain steps; no text and no token. It is written atomically
(files.py) every `EVERY` steps and at the end, so of two processes the later one's remains. Its version and
checksum are checked, so its values are those that this code has written. Any other file is not used: one log
line gives the reason, and the policy starts without it.
"""

import hashlib
import json
import logging
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from specinfer.files import cache_dir, write_whole
from specinfer.speculate.policy.acceptance import AcceptanceRates, Curve
from specinfer.speculate.policy.guard import KEPT, PLAIN_FIRST, Guard, PlainSteps

_LOG = logging.getLogger(__name__)

VERSION: Final = 7  # version of the file; incremented when its numbers change their meaning
EVERY: Final = 2000  # steps between writes
MIN_OUTCOMES: Final = 500  # new outcomes needed for a write

Key = Mapping[str, Any]  # "target", "drafts", "device": JSON values


class StoredPolicy(NamedTuple):
    """Contents of a file."""

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
        except (OSError, ValueError) as error:
            _LOG.warning(
                "the file of learned costs and rates is not used, speculation starts without it: %s: %s; "
                "`specinfer cache clear policies` removes all of them",
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
    curves = {name: [[one.offset, one.slope] for one in both] for name, both in acceptance.curves.items()}
    counts = {name: levels.counts.tolist() for name, levels in acceptance.levels.items()}
    drafts = {name: {"all": together, "alike": alike} for name, (together, *alike) in counts.items()}
    plain = {str(size): [*one.multiples] for size, one in guard.plain_steps.items() if one.multiples}
    return {"outcomes": acceptance.outcomes, "curves": curves, "drafts": drafts, "plain": plain}


def recall(learned: Mapping[str, Any], acceptance: AcceptanceRates, guard: Guard | None = None) -> None:
    """Load the result of `learned_values`, for at most as many levels as there are, before learning."""
    for name, (others, firsts) in learned["curves"].items():
        acceptance.curves[name] = Curve(*others), Curve(*firsts)
    for name, levels in acceptance.levels.items():
        if (stored := learned["drafts"].get(name)) is not None:
            for counts, kept in zip(levels.counts, (stored["all"], *stored["alike"]), strict=True):
                counts[: len(kept)] = kept[: levels.depth]
    acceptance.outcomes = learned["outcomes"]
    if guard is not None:
        for size, multiples in learned["plain"].items():
            guard.plain_steps[int(size)] = PlainSteps(deque(multiples, maxlen=KEPT), count=PLAIN_FIRST)


def policies_dir() -> Path:
    """Return the folder of the files."""
    return cache_dir() / "policies"


def write_policy(file: Path, key: Key, learned: Mapping[str, Any]) -> bool:
    """Write a file atomically; returns False if the disk refuses it."""
    content = {"version": VERSION, "key": key, "learned": learned}
    return write_whole(file, json.dumps({**content, "checksum": _digest(content)}, indent=1) + "\n")


def read_policy(file: Path) -> StoredPolicy:
    """Return a file's contents; raises OSError, or ValueError with the reason why it is invalid."""
    try:
        found = json.loads(file.read_bytes())
        content = {name: found[name] for name in ("version", "key", "learned")}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("it is not a complete JSON file") from error
    if content["version"] != VERSION:
        raise ValueError(f"it has version {content['version']!r:.20}, expected {VERSION}")
    if found.get("checksum") != _digest(content):
        raise ValueError("its checksum is wrong")
    return StoredPolicy(content["key"], content["learned"])


def stored_policies(folder: Path | None = None) -> list[tuple[Path, StoredPolicy | None, str]]:
    """Return all files, each with its contents, or with None and the reason why it is invalid."""
    found = list[tuple[Path, StoredPolicy | None, str]]()
    for file in sorted((folder or policies_dir()).glob("*.json")):
        try:
            found.append((file, read_policy(file), ""))
        except (OSError, ValueError) as error:
            found.append((file, None, _reason(error)))
    return found


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _reason(error: Exception) -> str:
    return str(error.strerror or "it cannot be read") if isinstance(error, OSError) else str(error)
