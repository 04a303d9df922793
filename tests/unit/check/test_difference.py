"""First difference of two texts, whether rounding explains it, and whether it is a failure."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specinfer import LLM
from specinfer.check.difference import PlainTarget, TextPromise, Verdict, find_difference, text_promise
from specinfer.check.difference import first_difference as first
from specinfer.check.identity import check_repetition, compare_texts
from specinfer.progress import NoProgress
from specinfer.request import Answer, RequestOutput, SpeculationFigures, Timing
from specinfer.sampling_params import SamplingParams
from specinfer.tree.draw import Verifier
from tests.adapters import merge, write_adapter
from tests.engines import ENGINE, Tiny, runner_of, tiny_of
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
    figures = SpeculationFigures(drafted_tokens=drafted, accepted_tokens=min(drafted, 1))
    timing = Timing(0.0, None, None)
    return RequestOutput("r", (9, 8), Answer([text], tokens), None, seed, figures, timing, new_text="")


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
    logits = [[2.0 - float(d.gap), 2.0, -50.0] for d in found]
    tied = [difference(row, [0], [1], temperature=0.5, seed=seed) for seed, row in enumerate(logits)]
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
    verifiers: tuple[Verifier, ...] = ("coupled", "mss")
    for device, usual in (("cpu", IDENTICAL), ("cuda", ROUNDING), ("cuda:1", ROUNDING)):
        for verifier, temperature in product(verifiers, (0.0, 1.0)):
            promised = LAW if (verifier, temperature) == ("mss", 1.0) else usual
            found = text_promise(SamplingParams(temperature=temperature), verifier, torch.device(device))
            assert found is promised, (device, verifier, temperature)


LOGITS = [16.0, 16.25, 3.0]  # in bfloat16 a tie between 0 and 1; 2 is far from both
SAME, EXPLAINED, UNEXPLAINED = (1, 1), (1, 0), (1, 2)  # beside (1, 1)


def compared(device: str, *texts: Sequence[int]) -> Verdict:
    """Return the verdict on these texts, each expected to be (1, 1)."""
    target: Any = Fixed(LOGITS, device)
    return compare_texts("n", target, GREEDY, [answer(*SAME)] * len(texts), [answer(*one) for one in texts])


def test_rounding_excuses_a_difference_only_where_identical_texts_are_not_promised() -> None:
    for texts, passing in (
        ([SAME, SAME], ("cpu", "cuda")),
        ([SAME, EXPLAINED], ("cuda",)),
        ([SAME, UNEXPLAINED], ()),
        ([EXPLAINED, UNEXPLAINED], ()),
    ):
        for device, promised in (("cpu", "identical"), ("cuda", "rounding")):
            found, counts = compared(device, *texts), (texts.count(SAME), texts.count(EXPLAINED))
            assert (found.passed, found.decided) == (device in passing, True), (device, texts)
            assert (found.details["identical"], found.details["explained"]) == counts, (device, texts)
            assert found.details["promised"] == promised


def test_other_words_for_the_same_tokens_and_texts_without_guesses_fail_everywhere() -> None:
    for device in ("cpu", "cuda"):
        for got, words in (
            (answer(*SAME, text="b"), "1 differ in text but not in tokens, text 1 first"),
            (answer(*SAME, drafted=0), "nothing was guessed, so nothing was tested"),
        ):
            target: Any = Fixed(LOGITS, device)
            found = compare_texts("n", target, GREEDY, [answer(*SAME)], [got])
            assert not found.passed, (device, words)
            assert words in found.words, device


# ---- the same request twice ----


tiny = tiny_of(vocab_size=64, max_context=128)


LONG = [[5, 6, 7, 8] * 6, list(range(20, 50))]


def repeated(llm: LLM, prompts: Sequence[Sequence[int]], temperature: float = 0.0) -> Verdict:
    params = SamplingParams(temperature=temperature, max_tokens=12)
    return check_repetition("same request twice", params, prompts, llm, progress=NoProgress())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cached_prefix_is_harmless(tiny: Tiny, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny.llm(drafts=["similar"], lookup=True)
    llm.generate(LONG, SamplingParams(temperature=0, max_tokens=4))  # cached blocks are not read
    cached: list[int] = []
    answered = llm.generate

    def listened_to(*args: Any, **options: Any) -> list[RequestOutput]:
        outputs = answered(*args, **options)
        cached.extend(output.cached_tokens for output in outputs)
        return outputs

    monkeypatch.setattr(llm, "generate", listened_to)
    found = repeated(llm, LONG, temperature)
    assert found.passed, found.words
    assert cached == [0, 23, 0, 29]  # never the prompt's last token
    assert found.details["cached_tokens"] == 52
    assert "the second time behind 52 of 54 prompt tokens from the cache" in found.words


def test_a_cached_prefix_of_another_request_fails(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny.llm(drafts=["similar"], lookup=True)
    answered = llm.generate

    def spoilt(*args: Any, **options: Any) -> list[RequestOutput]:
        outputs = answered(*args, **options)
        for keys in runner_of(llm).cache.keys:
            keys.neg_()
        return outputs

    monkeypatch.setattr(llm, "generate", spoilt)
    found = repeated(llm, LONG)
    assert not found.passed
    assert found.decided
    assert "differ, rounding explains" in found.words
