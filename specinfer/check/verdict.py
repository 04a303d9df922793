"""What is promised of a text that is made again, and what a check found, in words and figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from specinfer.sampling_params import SamplingParams
from specinfer.tree.draw import Verifier


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one promise held."""

    name: str
    passed: bool
    words: str  # what was seen, for a person
    details: dict[str, Any] = field(default_factory=dict)  # plain JSON values
    decided: bool = True  # False: too little was seen to say

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        known = {"name": self.name, "passed": self.passed, "decided": self.decided, "words": self.words}
        return {**known, **self.details}

    def __str__(self) -> str:
        mark = "pass" if self.passed else "FAIL" if self.decided else "open"
        return f"{mark}  {self.name}: {self.words}"


class TextPromise(StrEnum):
    """What a second answer to one request with one seed has in common with the first."""

    IDENTICAL = "identical"  # every token; a difference is a failure, however small its cause
    ROUNDING = "rounding"  # every token, but where two choices are within rounding of the logits
    LAW = "law"  # the law both are sampled from, and no token


def text_promise(params: SamplingParams, verifier: Verifier, device: torch.device) -> TextPromise:
    """What is promised of texts sampled with `params`, whose target computes on `device`.

    On a CPU a row's logits do not depend on the rows beside it, to the last bit; on GPUs nothing is promised
    of rounding. Sampling with mss reads the tree, so another tree is another text of the same law.
    """
    if verifier == "mss" and not params.greedy:
        return TextPromise.LAW
    return TextPromise.IDENTICAL if device.type == "cpu" else TextPromise.ROUNDING
