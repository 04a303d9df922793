"""What a policy has learnt, on disk, so that the next process begins where this one ended.

One small JSON file for a target with its drafts on a device: rates of guesses, weights of logistics and how
often drafts' levels were right; no text, no token. It is written whole (files.py) every some steps and at the
end, so of two processes the later one's is there. A file that is cut short, changed, of another version or
holds a number that cannot be is not used: one line says why, and the policy begins as if there were none.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from specinfer.files import cache_dir, write_whole
from specinfer.speculate.policy.bounded import mapping
from specinfer.speculate.policy.draft_costs import DraftCosts, checked_draft
from specinfer.speculate.policy.estimator import Lasting

_LOG = logging.getLogger(__name__)

VERSION: Final = 4  # of the file; another one is when numbers mean something else
LARGEST: Final = 1 << 20  # bytes of a file
EVERY: Final = 2000  # steps, after which what was learnt is kept
LEAST: Final = 500  # outcomes that are worth keeping

Key = Mapping[str, Any]  # "target", "drafts", "device": what is learnt of, as JSON values


@dataclass(frozen=True, slots=True)
class Learned:
    """The parts of a policy that learn what guesses are worth."""

    estimator: Lasting  # of how likely guesses are
    drafts: Mapping[str, DraftCosts]  # by speculator

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        drafts = {name: costs.to_json() for name, costs in self.drafts.items()}
        return {**self.estimator.to_json(), "drafts": drafts}

    def recall(self, told: Mapping[str, Any]) -> None:
        """Take over what `to_json` gave; raises ValueError or KeyError, and then takes nothing."""
        of_drafts = mapping(told["drafts"])
        levels = {name: checked_draft(of_drafts.get(name, {})) for name in self.drafts}
        self.estimator.recall(told)
        for name, costs in self.drafts.items():
            costs.recall(levels[name])


@dataclass(frozen=True, slots=True)
class StoredPolicy:
    """A file of what was learnt, as it was found."""

    file: Path
    key: Key
    learned: Mapping[str, Any]


class PolicyMemory:
    """Recalls what was learnt under a key, and keeps what is learnt from then on."""

    def __init__(self, key: Key, learned: Learned, folder: Path | None = None) -> None:
        self._key = key
        self._learned = learned
        self._file = (folder or policies_dir()) / f"{_digest(key)[:16]}.json"
        self._steps = 0
        self._kept = 0  # outcomes that the file knows of
        self._failed = False  # to write, which was logged

    def recall(self) -> None:
        """Take over what the file holds, where there is one that can be used."""
        try:
            stored = read_policy(self._file)
            if stored.key != self._key:  # two keys of one name, or a file that was moved
                raise ValueError("it is of other models")
            self._learned.recall(stored.learned)
            self._kept = self._learned.estimator.outcomes
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError, KeyError) as error:
            _LOG.warning(
                "what speculation had learnt is not used, it begins anew: %s: %s; `specinfer policy reset` "
                "removes it",
                self._file,
                _reason(error),
            )

    def stepped(self) -> None:
        """A step is over: every some steps what was learnt is kept."""
        self._steps += 1
        if self._steps % EVERY == 0:
            self.keep()

    def keep(self) -> None:
        """Write what was learnt, if it is worth it."""
        outcomes = self._learned.estimator.outcomes
        if outcomes - self._kept < LEAST:  # a test, or a short answer
            return
        self._kept = outcomes
        if not write_policy(self._file, self._key, self._learned.to_json()) and not self._failed:
            self._failed = True
            _LOG.warning(
                "what speculation learns cannot be written to %s, and ends with this process; "
                "set SPECINFER_CACHE to a folder that can be written",
                self._file,
            )


def policies_dir() -> Path:
    """Where the files lie."""
    return cache_dir() / "policies"


def write_policy(file: Path, key: Key, learned: Mapping[str, Any]) -> bool:
    """Write a file whole; returns whether that could be done."""
    told = {"version": VERSION, "key": key, "learned": learned}
    return write_whole(file, json.dumps({**told, "checksum": _digest(told)}, indent=1) + "\n")


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
    found = mapping(parsed)
    if found.get("version") != VERSION:
        raise ValueError(f"it is of version {found.get('version')!r:.20}, not {VERSION}")
    told = {name: found.get(name) for name in ("version", "key", "learned")}
    if found.get("checksum") != _digest(told):
        raise ValueError("its checksum is wrong")
    return StoredPolicy(file, mapping(told["key"]), mapping(told["learned"]))


def stored_policies(folder: Path | None = None) -> list[tuple[Path, StoredPolicy | None, str]]:
    """All files, each with what it holds, or with None and why it cannot be used."""
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
    if isinstance(error, OSError):
        return error.strerror or "it cannot be read"
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)
