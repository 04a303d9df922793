"""Which differences between two texts are failures: all where identical texts are promised."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specinfer.check.difference import Verdict
from specinfer.check.identity import check_repetition, compare_texts
from specinfer.llm import LLM
from specinfer.progress import NoProgress
from specinfer.request import Answer, FinishReason, RequestOutput, SpeculationFigures, Timing
from specinfer.sampling_params import SamplingParams
from tests.engines import Tiny, runner_of, write_tiny

GREEDY = SamplingParams(temperature=0)
LOGITS = [16.0, 16.25, 3.0]  # in bfloat16 a tie between 0 and 1; 2 is far from both
SAME, EXPLAINED, UNEXPLAINED = (1, 1), (1, 0), (1, 2)  # beside (1, 1)


class Fixed:
    """A target on some device that always gives the same logits."""

    def __init__(self, device: str) -> None:
        self.model = SimpleNamespace(dtype=torch.bfloat16, device=torch.device(device))

    def logits_after(self, texts: Sequence[Sequence[int]]) -> Any:
        return np.stack([np.array(LOGITS, dtype=np.float32)] * len(texts))


def answer(tokens: Sequence[int], text: str = "", drafted: int = 3, cached: int = 0) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt_token_ids=(9, 8),
        answer=Answer([text], tokens),
        finish_reason=FinishReason.LENGTH,
        seed=0,
        figures=SpeculationFigures(drafted_tokens=drafted, accepted_tokens=min(drafted, 1)),
        timing=Timing(0.0, None, None),
        cached_tokens=cached,
    )


def compared(device: str, *texts: Sequence[int]) -> Verdict:
    """Return the verdict on these texts, each expected to be (1, 1)."""
    target: Any = Fixed(device)
    return compare_texts("n", target, GREEDY, [answer(SAME)] * len(texts), [answer(text) for text in texts])


@pytest.mark.parametrize(
    ("device", "texts", "passes"),
    [
        ("cpu", [SAME, SAME], True),
        ("cpu", [SAME, EXPLAINED], False),
        ("cpu", [SAME, UNEXPLAINED], False),
        ("cpu", [EXPLAINED, UNEXPLAINED], False),
        ("cuda", [SAME, SAME], True),
        ("cuda", [SAME, EXPLAINED], True),
        ("cuda", [SAME, UNEXPLAINED], False),
        ("cuda", [EXPLAINED, UNEXPLAINED], False),
    ],
)
def test_rounding_excuses_a_difference_only_where_identical_texts_are_not_promised(
    device: str, texts: list[tuple[int, ...]], passes: bool
) -> None:
    found = compared(device, *texts)
    assert found.passed is passes
    assert found.decided
    assert found.details["identical"] == texts.count(SAME)
    assert found.details["explained"] == texts.count(EXPLAINED)
    assert found.details["promised"] == ("identical" if device == "cpu" else "rounding")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_same_tokens_in_other_words_fail_everywhere(device: str) -> None:
    target: Any = Fixed(device)
    found = compare_texts("n", target, GREEDY, [answer(SAME, "a")], [answer(SAME, "b")])
    assert not found.passed
    assert "1 differ in text but not in tokens, text 1 first" in found.words


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_where_nothing_was_guessed_nothing_was_tested(device: str) -> None:
    target: Any = Fixed(device)
    found = compare_texts("n", target, GREEDY, [answer(SAME)], [answer(SAME, drafted=0)])
    assert not found.passed
    assert "nothing was guessed, so nothing was tested" in found.words


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
    assert cached == [0, 16, 0, 16]  # whole blocks, and never the prompt's last token
    assert found.details["cached_tokens"] == 32
    assert "the second time behind 32 of 54 prompt tokens from the cache" in found.words


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
