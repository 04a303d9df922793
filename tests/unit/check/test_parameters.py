"""Sampling parameters keep texts, and a processor that speculation sees differently is found."""

from collections.abc import Sequence

import numpy as np
import pytest

from specinfer.check import parameters
from specinfer.check.difference import PlainTarget, Verdict
from specinfer.check.parameters import MIN_TOKENS, ProcessedTarget, check_parameters, settings_for
from specinfer.check.promise import Effort
from specinfer.processors.changes import Penalties, RowChanges
from specinfer.sampling_params import SamplingParams
from tests.engines import Tiny, tiny_of

PROMPTS = [[7, 8, 9, 7, 8, 9, 7], list(range(30, 60))]


tiny = tiny_of(vocab_size=256, max_context=160, eos_token_id=0)


def check(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, Verdict]:
    """The verdicts on these settings."""
    everything = settings_for(tiny.tokenizer, 256)
    few = {name: everything[name] for name in names}
    monkeypatch.setattr(parameters, "settings_for", lambda *args: few)
    llm = tiny.llm(drafts=["target"])  # many of its guesses come true
    return {one.name: one for one in check_parameters(llm, PROMPTS, Effort(max_tokens=MIN_TOKENS))}


@pytest.mark.slow
def test_an_honest_engine_passes_under_every_setting(tiny: Tiny) -> None:
    llm = tiny.llm(drafts=["similar"], lookup=True)
    verdicts = list(check_parameters(llm, PROMPTS, Effort(max_tokens=MIN_TOKENS)))
    assert [verdict.name for verdict in verdicts] == [*settings_for(tiny.tokenizer, 256), "bookkeeping"]
    assert [str(verdict) for verdict in verdicts if not verdict.passed] == []


def test_texts_with_and_without_speculation_are_compared(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    found = check(tiny, monkeypatch, "presence_penalty", "choice")
    assert found.pop("bookkeeping").passed
    assert list(found) == ["presence_penalty", "choice"]
    for verdict in found.values():
        assert verdict.passed
        assert verdict.details["identical"] == verdict.details["texts"] == 2
        assert verdict.details["drafted_tokens"] > 0


def test_a_penalty_that_forgets_a_trees_path_is_found(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Penalties.changes

    def without_the_path(self: Penalties, path: Sequence[int]) -> RowChanges:
        return honest(self, ())

    monkeypatch.setattr(Penalties, "changes", without_the_path)
    found = check(tiny, monkeypatch, "repetition_penalty, greedy", "temperature 0")
    assert not found["repetition_penalty, greedy"].passed
    assert found["temperature 0"].passed


def test_logits_are_judged_as_parameters_leave_them(tiny: Tiny) -> None:
    llm, prompt, text = tiny.llm(), [5, 6, 7], [9, 9, 4]
    alone = PlainTarget(tiny.target).logits_after([*prompt, *text])
    banned = SamplingParams(bad_words=("\t\x04B",))  # token ids 9, 4, 66 in a row
    biased = SamplingParams(frequency_penalty=0.5, logit_bias={3: 2.0})
    expected = alone.copy()
    expected[[9, 4, 3]] += (-1.0, -0.5, 2.0)  # the prompt's tokens do not count
    processed = ProcessedTarget(llm, biased, prompt).logits_after([*prompt, *text])
    np.testing.assert_allclose(processed, expected, rtol=1e-6)
    barred = ProcessedTarget(llm, banned, prompt).logits_after([*prompt, *text])
    assert np.flatnonzero(np.isneginf(barred)).tolist() == [66]
