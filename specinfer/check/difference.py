"""First difference between two answers to one request, and whether rounding explains it.

The target's choice is a function of its logits, the seed and the position. If logits depend on the rows
computed beside them, two runs may compute logits that differ in their last bits. A difference is *explained*
if such an error suffices to choose either token. To check this, the logits are computed again by the plainest
path, one token's logit is raised by `tolerance`, and the choice is repeated. Each of the two tokens must win
when its logit is raised. `text_promise` decides whether an explained difference passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.models.adapters.adapter_cache import AdapterCache
from specinfer.models.language_model import LanguageModel
from specinfer.request import RequestOutput
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner, as_rows
from specinfer.sampling_params import SamplingParams
from specinfer.tree.draw import Verifier
from specinfer.verify.coupled import coupled_choice
from specinfer.verify.noise import exponentials
from specinfer.verify.target_law import target_law

ULPS = 2  # bfloat16 ULPs at the size of the logits: one for each of the two runs
FLOAT32_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one check."""

    name: str
    passed: bool
    words: str  # the observation, as text for users
    details: dict[str, Any] = field(default_factory=dict)  # plain JSON values
    decided: bool = True  # False: too few observations to decide

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        known = {"name": self.name, "passed": self.passed, "decided": self.decided, "words": self.words}
        return {**known, **self.details}

    def __str__(self) -> str:
        mark = "pass" if self.passed else "FAIL" if self.decided else "open"
        return f"{mark}  {self.name}: {self.words}"


class TextPromise(StrEnum):
    """Required agreement of two answers to one request with one seed."""

    IDENTICAL = "identical"  # all tokens are equal; every difference fails
    ROUNDING = "rounding"  # all tokens are equal, except where rounding of the logits explains a difference
    LAW = "law"  # both are sampled from one law; tokens may differ


def text_promise(params: SamplingParams, verifier: Verifier, device: torch.device) -> TextPromise:
    """Return the promise for texts sampled with `params` by a target on `device`.

    On a CPU a row's logits have the same bits whichever rows are computed beside it. On a GPU rounding may
    differ. Sampling with mss depends on the tree, so another tree gives another text of the same law.
    """
    if verifier == "mss" and not params.greedy:
        return TextPromise.LAW
    return TextPromise.IDENTICAL if device.type == "cpu" else TextPromise.ROUNDING


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which two answers to one request differ."""

    index: int  # index among the output tokens
    expected: int | None  # without speculation; None if that text has ended
    got: int | None
    # logits by which the target prefers `expected`, noise included; None if a text has ended
    gap: float | None
    tolerance: float  # largest change of a logit by rounding
    explained: bool

    def __str__(self) -> str:
        if self.gap is None:
            return f"at output token {self.index} one text has ended"
        return (
            f"at output token {self.index}: {self.expected} became {self.got}; the target prefers the first "
            f"by {self.gap:.4g}, rounding is up to {self.tolerance:.4g}"
        )


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Return the index of the first token that differs, or None if the sequences are equal."""
    if tuple(expected) == tuple(got):
        return None
    pairs = zip(expected, got, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(got)))


def find_difference(
    target: PlainTarget, params: SamplingParams, expected: RequestOutput, got: RequestOutput
) -> Difference | None:
    """Return the first difference of `got` from `expected`, or None if their tokens are equal.

    Both must answer the same prompt with the same seed and `params`. Runs the target once over the common
    text.
    """
    assert expected.prompt_token_ids == got.prompt_token_ids, "answers to one prompt are compared"
    assert expected.seed == got.seed, "answers with one seed are compared"
    index = first_difference(expected.token_ids, got.token_ids)
    if index is None:
        return None
    text = [*expected.prompt_token_ids, *expected.token_ids[:index]]
    logits = target.logits_after(text)
    tolerance = rounding(logits, target.model.dtype)
    own = expected.token_ids[index] if index < len(expected.token_ids) else None
    other = got.token_ids[index] if index < len(got.token_ids) else None
    if own is None or other is None:
        return Difference(index, own, other, None, tolerance, explained=False)

    def wins(token: int) -> bool:
        """Return whether the token is chosen once its logit is raised by the tolerance."""
        raised = logits.copy()
        raised[token] += np.float32(tolerance)
        return coupled_choice(target_law(raised, params), expected.seed, len(text)) == token

    gap = float(logits[own]) - float(logits[other])
    if not params.greedy:
        noise = -np.log(exponentials(expected.seed, len(text), np.array([own, other], dtype=np.int64)))
        gap += params.temperature * float(noise[0] - noise[1])
    return Difference(index, own, other, gap, tolerance, wins(own) and wins(other))


def rounding(logits: NDArray[np.float32], dtype: torch.dtype) -> float:
    """Return the largest rounding difference between two computations of the largest of `logits`."""
    if dtype != torch.bfloat16:
        return FLOAT32_TOLERANCE
    size = max(abs(float(logits.max())), 1.0)
    return float(ULPS * 2.0 ** (math.floor(math.log2(size)) - 7))


_MAX_ROWS = 512  # per pass


class PlainTarget:
    """Computes a model's logits after texts; keeps no state between calls.

    With `adapters` all rows have their default adapter.
    """

    def __init__(self, model: LanguageModel, adapters: AdapterCache | None = None) -> None:
        self.model = model
        self._adapters = adapters
        self._adapter = None if adapters is None else adapters.default

    def logits_after(self, text: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits after a text that is not empty, [vocab]."""
        logits: NDArray[np.float32] = self.logits_along(text, len(text))[0]
        return logits

    def logits_along(self, text: Sequence[int], start: int) -> NDArray[np.float32]:
        """Return the logits after text[:start], text[:start + 1], ... and the whole text.

        Shape [len(text) - start + 1, vocab]; 1 <= start <= len(text).
        """
        assert 1 <= start <= len(text), (start, len(text))
        runner = ModelRunner(self.model, num_blocks=1, block_size=len(text), adapters=self._adapters)
        found: list[NDArray[np.float32]] = []
        for first in range(0, len(text), _MAX_ROWS):
            chunk = text[first : first + _MAX_ROWS]
            logits_from = min(max(start - 1 - first, 0), len(chunk))
            logits = runner.forward([Rows(chunk, first, [0], logits_from, adapter=self._adapter)])
            if logits_from < len(chunk):
                found.append(as_rows(logits))
        return np.concatenate(found)
