"""First difference of two texts, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specinfer import LLM
from specinfer.check.difference import PlainTarget, TextPromise, find_difference, text_promise
from specinfer.check.difference import first_difference as first
from specinfer.request import Answer, RequestOutput, SpeculationFigures, Timing
from specinfer.sampling_params import SamplingParams
from specinfer.tree.draw import Verifier
from tests.adapters import merge, write_adapter
from tests.engines import ENGINE
from tests.tiny_models import write_tiny_llama

GREEDY = SamplingParams(temperature=0)
IDENTICAL, ROUNDING, LAW = TextPromise.IDENTICAL, TextPromise.ROUNDING, TextPromise.LAW


class Fixed:
    """A target that always gives the same logits, and remembers after what."""

    def __init__(self, logits: Sequence[float], device: str = "cpu") -> None:
        self.model = SimpleNamespace(dtype=torch.bfloat16, device=torch.device(device))
        self.logits = np.array(logits, dtype=np.float32)
        self.asked: list[list[int]] = []

    def logits_after(self, text: Sequence[int]) -> Any:
        self.asked.append(list(text))
        return self.logits


def answer(*tokens: int, seed: int = 0, text: str = "", drafted: int = 3) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt_token_ids=(9, 8),
        answer=Answer([text], tokens),
        finish_reason=None,
        seed=seed,
        figures=SpeculationFigures(drafted_tokens=drafted, accepted_tokens=min(drafted, 1)),
        timing=Timing(0.0, None, None),
        new_text="",
    )


def difference(logits: Sequence[float], *texts: Sequence[int], temperature: float = 0, seed: int = 0) -> Any:
    """Return what is found between the text that is expected and another."""
    target: Any = Fixed(logits)
    expected, got = (answer(*tokens, seed=seed) for tokens in texts)
    return find_difference(target, SamplingParams(temperature=temperature), expected, got)


def test_the_first_difference() -> None:
    assert first([1, 2], (1, 2)) is None
    assert [first([1, 2, 3], [1, 5, 3]), first([1, 2, 3], [1, 2]), first([], [4])] == [1, 2, 0]


def test_the_target_is_asked_after_what_the_texts_share() -> None:
    target: Any = Fixed([0.0, 1.0, 2.0])
    assert find_difference(target, GREEDY, answer(1, 2), answer(1, 2)) is None
    assert target.asked == []
    find_difference(target, GREEDY, answer(1, 2, 0), answer(1, 0, 0))
    assert target.asked == [[9, 8, 1]]


def test_two_bfloat16_steps_are_rounding_and_more_is_not() -> None:
    # Between 16 and 32 neighbours in bfloat16 are 1/8 apart.
    near = difference([16.0, 16.25, 3.0], [1], [0])
    assert (near.index, near.expected, near.got, near.gap, near.tolerance) == (0, 1, 0, 0.25, 0.25)
    assert near.explained
    far = difference([16.0, 16.375, 3.0], [1], [0])
    assert far.gap == 0.375
    assert not far.explained


def test_a_text_that_ends_early_is_never_rounding() -> None:
    found = difference([1.0, 1.0], [0, 0], [0])
    assert (found.index, found.expected, found.got, found.gap) == (1, 0, None, None)
    assert not found.explained
    assert "one text has ended" in str(found)


def test_with_a_seed_the_noise_is_part_of_the_preference() -> None:
    found = [difference([2.0, 2.0, 2.0], [0], [1], temperature=0.5, seed=seed) for seed in range(50)]
    assert not any(d.explained for d in found if abs(d.gap) > 4 * d.tolerance)
    gaps = np.array([d.gap for d in found])
    assert (gaps > 0).any()
    assert (gaps < 0).any()
    # A logit that makes up for the gap makes a tie, and a tie is explained, unless token 2 wins anyway.
    tied = [
        difference([2.0 - float(d.gap), 2.0, -50.0], [0], [1], temperature=0.5, seed=seed)
        for seed, d in enumerate(found)
    ]
    assert [round(d.gap, 5) for d in tied] == pytest.approx([0.0] * 50, abs=1e-5)
    assert all(d.explained for d in tied)


def test_the_target_with_an_adapter_is_the_merged_model(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "base", tokenizer=True)
    adapter = write_adapter(tmp_path / "one", tmp_path / "base", rank=4, alpha=8)
    merge(tmp_path / "base", adapter, tmp_path / "merged", scale=2)
    found = []
    for model, options in (("base", {"lora": {"one": adapter}}), ("merged", {}), ("base", {})):
        with LLM(tmp_path / model, **ENGINE, **options) as llm:
            models = llm.models
            models.adapters.default = "one" if options else None
            target = PlainTarget(models.target, models.adapters)
            found.append([target.logits_after([4]), target.logits_along([1, 2, 3], 2)])
    for adapted, merged, plain in zip(*found, strict=True):
        np.testing.assert_allclose(adapted, merged, atol=1e-3)
        assert np.abs(adapted - plain).max() > 0.1


def test_what_is_promised_where() -> None:
    cases: list[tuple[str, Verifier, float, TextPromise]] = [
        ("cpu", "coupled", 0.0, IDENTICAL),
        ("cpu", "coupled", 1.0, IDENTICAL),
        ("cpu", "mss", 0.0, IDENTICAL),
        ("cpu", "mss", 1.0, LAW),
        ("cuda", "coupled", 0.0, ROUNDING),
        ("cuda:1", "coupled", 1.0, ROUNDING),
        ("cuda", "mss", 0.0, ROUNDING),
        ("cuda", "mss", 1.0, LAW),
    ]
    for device, verifier, temperature, promised in cases:
        found = text_promise(SamplingParams(temperature=temperature), verifier, torch.device(device))
        assert found is promised, (device, verifier, temperature)
