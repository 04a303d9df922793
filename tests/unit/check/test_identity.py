"""Which differences between two texts are failures: all where identical texts are promised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specinfer.check.difference import Verdict
from specinfer.check.identity import check_repetition, compare_texts
from specinfer.llm import LLM
from specinfer.progress import NoProgress
from specinfer.request import RequestOutput
from specinfer.sampling_params import SamplingParams
from tests.engines import Tiny, runner_of, write_tiny
from tests.unit.check.test_difference import GREEDY, Fixed, answer

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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=64, max_context=128)


LONG = [[5, 6, 7, 8] * 6, list(range(20, 50))]


def repeated(llm: LLM, prompts: Sequence[Sequence[int]], temperature: float = 0.0) -> Verdict:
    params = SamplingParams(temperature=temperature, max_tokens=12)
    return check_repetition("same request twice", params, prompts, llm, progress=NoProgress())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_is_answered_alike_behind_its_own_cached_prefix(
    tiny: Tiny, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_cached_prefix_that_is_not_the_requests_own_fails(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
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
