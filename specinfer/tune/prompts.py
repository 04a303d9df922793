"""What a target is asked, so that it says something to learn from.

A prompt is known by a hash of it, its *key*. By that it is held out or not, its answer's temperature is
chosen, and with the run's seed the order of all is made: the same in every run, wherever the prompt stands in
its file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from specinfer.errors import DatasetError
from specinfer.report.dataset import built_in, conversation_of, json_object, read_rows

HELD_OUT: Final = 16  # of so many prompts one is held out
_TEMPERATURES: Final = (0.0, 0.7, 1.0)  # of answers to learn from
_SHUFFLE: Final = 0x9E37_79B9_7F4A_7C14  # even, so seed times this and one is odd: no two keys become one
_TRAFFIC: Final = 'each line must be a completion that the server logged, with "prompt_token_ids"'


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt: text of a user, or the ids that a server's model was given."""

    key: int  # 63 bits
    content: str | tuple[int, ...]
    held_out: bool

    @property
    def temperature(self) -> float:
        """Of its answer; what is held out is answered greedily."""
        return temperature_of(self.key, held_out=self.held_out)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Distinct prompts in the order of their keys, and what was wrong with the lines that were skipped."""

    asked: tuple[Asked, ...]
    faults: tuple[str, ...] = ()


def temperature_of(key: int, *, held_out: bool) -> float:
    """At which the prompt with this key is answered."""
    return 0.0 if held_out else _TEMPERATURES[key // HELD_OUT % len(_TEMPERATURES)]


def shuffled(key: int, seed: int) -> int:
    """A number of 62 bits for each key, others for each seed below 2^60; with seed 0 in the order of keys."""
    return (key >> 1) * (1 + seed * _SHUFFLE) % 2**62


def built_in_prompts() -> Prompts:
    """The prompts that come with specinfer."""
    return _prompts([conversation.turns[0] for conversation in built_in().conversations], ())


def read_prompts(files: Sequence[Path]) -> Prompts:
    """The first turns of the conversations in files of JSON lines, as report/dataset.py has them.

    Lines that cannot be read are skipped and named in `faults`. Raises DatasetError for a file that cannot be
    read, and where fewer than two prompts are found.
    """
    read = [read_rows(file, conversation_of) for file in files]
    return _at_least_two(
        files,
        _prompts(
            [one.turns[0] for rows, _ in read for one in rows], [f for _, faults in read for f in faults]
        ),
    )


def read_traffic(file: Path, vocab: int) -> Prompts:
    """The prompts of what a server logged (`--log-traffic`), each once however often it was asked.

    Raises as `read_prompts`; lines with tokens that a target of this `vocab` has not are skipped.
    """

    def ids_of(line: bytes, number: int, where: str) -> tuple[int, ...]:
        ids = json_object(line, where, _TRAFFIC).get("prompt_token_ids")
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise DatasetError(f"{where}: it has no prompt_token_ids; {_TRAFFIC}")
        if not 0 <= min(ids) <= max(ids) < vocab:
            raise DatasetError(
                f"{where}: it has tokens outside the target's {vocab}; name the model it is of"
            )
        return tuple(ids)

    rows, faults = read_rows(file, ids_of)
    return _at_least_two([file], _prompts(rows, faults))


def _at_least_two(files: Sequence[Path], prompts: Prompts) -> Prompts:
    if len(prompts.asked) < 2:
        named = ", ".join(str(file) for file in files)
        wrong = f"; the first line that was skipped: {prompts.faults[0]}" if prompts.faults else ""
        raise DatasetError(
            f"{named}: {len(prompts.asked)} prompts can be asked; needed: 2, one to learn from and one to "
            f"measure with{wrong}"
        )
    return prompts


def _prompts(contents: Iterable[str | tuple[int, ...]], faults: Sequence[str]) -> Prompts:
    found = {key: Asked(key, one, key % HELD_OUT == 0) for one in contents for key in [_key(one)]}
    asked = sorted(found.values(), key=lambda one: one.key // HELD_OUT)
    # A few prompts, none of which the hash holds out, are measured on one of them all the same; and none but
    # held-out ones are learnt from all but one.
    if asked and not any(one.held_out for one in asked):
        asked[0] = replace(asked[0], held_out=True)
    elif all(one.held_out for one in asked):
        asked[1:] = [replace(one, held_out=False) for one in asked[1:]]
    return Prompts(tuple(asked), tuple(faults))


def _key(content: str | tuple[int, ...]) -> int:
    data = content if isinstance(content, str) else json.dumps(content)
    return int.from_bytes(hashlib.sha256(data.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1
