"""The sampling parameters that a model's authors recommend, for requests that say nothing of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from specinfer.errors import ModelFileError
from specinfer.hub.model_files import ModelFiles, read_json

_FILE: Final = "generation_config.json"
# Under the names of SamplingParams: the key of a GGUF file, what is allowed, and how that is said.
_KNOWN: Final[Mapping[str, tuple[str, Callable[[float], bool], str]]] = {
    "temperature": ("temp", lambda t: t >= 0, "a number >= 0"),
    "top_k": ("top_k", lambda k: k == int(k) and k >= -1, "an integer >= 0"),
    "top_p": ("top_p", lambda p: 0 < p <= 1, "a number in (0, 1]"),
    "min_p": ("min_p", lambda p: 0 <= p <= 1, "a number in [0, 1]"),
    "repetition_penalty": ("penalty_repeat", lambda x: 0.001 <= x <= 1000, "a number in [0.001, 1000]"),
}


def sampling_defaults(files: ModelFiles) -> dict[str, float]:
    """Values of SamplingParams by name, as a folder's generation_config.json or a GGUF file has them.

    Empty where the model says nothing. `do_sample: false` is temperature 0. Raises ModelFileError on a value
    that no sampler takes.
    """
    if files.header is not None:
        source, greedy = f"{files.path}: general.sampling, ", False
        given = {
            name: files.header.metadata.get(f"general.sampling.{key}") for name, (key, *_) in _KNOWN.items()
        }
    elif (file := files.path / _FILE).is_file():
        found = read_json(file)
        source, greedy = f"{file}: ", found.get("do_sample") is False
        given = {name: found.get(name) for name in _KNOWN}
    else:
        return {}
    if greedy:  # whatever else it says of chances
        given = {"temperature": 0.0, "repetition_penalty": given["repetition_penalty"]}
    return {name: _checked(source, name, value) for name, value in given.items() if value is not None}


def _checked(source: str, name: str, value: Any) -> float:
    _, ok, allowed = _KNOWN[name]
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1 << 53
    if not number or not math.isfinite(value) or not ok(value):
        raise ModelFileError(
            f"{source}{name} is {repr(value)[:80]}; allowed: {allowed}. Mend it, or leave it aside with "
            "generation_config none"
        )
    return max(0, int(value)) if name == "top_k" else float(value)
