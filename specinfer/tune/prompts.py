"""Prompts for collecting a target's answers.

A prompt is identified by a hash, its *key*. The key determines whether the prompt is held out and the
temperature of its answer, and together with the run's seed its place in the order. All of these are the same
in every run, wherever the prompt is in its file.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from specinfer.errors import DatasetError
from specinfer.report.dataset import built_in, conversation_of, json_object, read_rows

HELD_OUT: Final = 16  # one prompt in this many is held out
_TEMPERATURES: Final = (0.0, 0.7, 1.0)  # for answers to learn from
# even, so seed times this plus one is odd, and the map is a bijection
_SHUFFLE: Final = 0x9E37_79B9_7F4A_7C14
_TRAFFIC: Final = 'each line must be a completion that the server logged, with "prompt_token_ids"'


@dataclass(frozen=True, slots=True)
class TuningPrompt:
    """One prompt: a user's text, or token ids from a server's log."""

    key: int  # 63 bits
    content: str | tuple[int, ...]
    held_out: bool

    @property
    def temperature(self) -> float:
        """Temperature of the answer; 0 for held-out prompts."""
        return temperature_of(self.key, held_out=self.held_out)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Distinct prompts ordered by key, and the faults of skipped lines."""

    prompts: tuple[TuningPrompt, ...]
    faults: tuple[str, ...] = ()


def temperature_of(key: int, *, held_out: bool) -> float:
    """Temperature for the prompt with this key."""
    return 0.0 if held_out else _TEMPERATURES[key // HELD_OUT % len(_TEMPERATURES)]


def shuffle_key(key: int, seed: int) -> int:
    """Shuffle a key to 62 bits; a bijection for each seed below 2^60. Seed 0 keeps the order of keys."""
    return (key >> 1) * (1 + seed * _SHUFFLE) % 2**62


def built_in_prompts() -> Prompts:
    """The prompts that ship with specinfer."""
    return _prompts([conversation.turns[0] for conversation in built_in().conversations], ())


def read_prompts(files: Sequence[Path]) -> Prompts:
    """The first turns of the conversations in JSON-lines files, in the format of report/dataset.py.

    Unreadable lines are skipped and listed in `faults`. Raises DatasetError if a file cannot be read, or if
    fewer than two prompts are found.
    """
    read = [read_rows(file, conversation_of) for file in files]
    return _at_least_two(
        files,
        _prompts(
            [one.turns[0] for rows, _ in read for one in rows], [f for _, faults in read for f in faults]
        ),
    )


def read_traffic(file: Path, vocab: int) -> Prompts:
    """The distinct prompts of a server's log (`--log-traffic`).

    Raises as `read_prompts`. Lines with tokens outside the target's `vocab` are skipped.
    """

    def ids_of(line: bytes, number: int, where: str) -> tuple[int, ...]:
        ids = json_object(line, where, _TRAFFIC).get("prompt_token_ids")
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise DatasetError(f"{where}: prompt_token_ids is missing or not a list of integers; {_TRAFFIC}")
        if not 0 <= min(ids) <= max(ids) < vocab:
            raise DatasetError(
                f"{where}: tokens must be below the target's {vocab}; name the model that served this log"
            )
        return tuple(ids)

    rows, faults = read_rows(file, ids_of)
    return _at_least_two([file], _prompts(rows, faults))


def _at_least_two(files: Sequence[Path], prompts: Prompts) -> Prompts:
    if len(prompts.prompts) < 2:
        named = ", ".join(str(file) for file in files)
        wrong = f"; the first skipped line: {prompts.faults[0]}" if prompts.faults else ""
        raise DatasetError(
            f"{named}: {len(prompts.prompts)} usable prompts; needed: 2, one to learn from and one to "
            f"measure with{wrong}"
        )
    return prompts


def _prompts(contents: Iterable[str | tuple[int, ...]], faults: Sequence[str]) -> Prompts:
    found = {key: TuningPrompt(key, one, key % HELD_OUT == 0) for one in contents for key in [_key(one)]}
    prompts = sorted(found.values(), key=lambda one: one.key // HELD_OUT)
    # Among a few prompts the hash may hold out none or all; then one is moved, so that both sets are
    # non-empty.
    if prompts and not any(one.held_out for one in prompts):
        prompts[0] = replace(prompts[0], held_out=True)
    elif all(one.held_out for one in prompts):
        prompts[1:] = [replace(one, held_out=False) for one in prompts[1:]]
    return Prompts(tuple(prompts), tuple(faults))


def _key(content: str | tuple[int, ...]) -> int:
    data = content if isinstance(content, str) else json.dumps(content)
    return int.from_bytes(hashlib.sha256(data.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1
