"""Lookup speculation on texts a person can read: each letter is a token."""

from __future__ import annotations

from typing import Any

import pytest

from specinfer.sampling_params import SamplingParams
from specinfer.speculate.lookups.lookup import LookupOptions, LookupSpeculator
from specinfer.tree.draw import Verifier
from tests.engines import Tiny
from tests.kernels import library_or_skip
from tests.letters import letters, spelled
from tests.lone_speculator import answer as answer_in_engine
from tests.lone_speculator import expected
from tests.plans import entry, outcome, plan


def salted(key: str | None) -> SamplingParams:
    return SamplingParams(cache_salt=key)


def guess(
    speculator: LookupSpeculator, text: str, *, request_id: str = "r", salt: str | None = None, **limits: int
) -> list[str]:
    """The branches for a request whose prompt is `text`."""
    asked = entry(letters(text), request_id=request_id, params=salted(salt), **limits)
    [tree] = speculator.propose(plan(asked))
    assert tree.token_ids[0] == ord(text[-1]), "the root is the last token"
    return spelled(tree)


def answer(
    speculator: LookupSpeculator,
    prompt: str,
    output: str,
    *,
    salt: str | None = None,
    request_id: str = "past",
) -> None:
    """A request comes, says `output`, and ends."""
    speculator.propose(plan(entry(letters(prompt), request_id=request_id, params=salted(salt))))
    speculator.observe([outcome(*letters(output), request_id=request_id, finished=True)])


def lookup(*, verifier: str = "coupled", **options: Any) -> LookupSpeculator:
    lookup_options = LookupOptions(**{"max_depth": 3, "min_probability": 0.0, "depth_factor": 4.0, **options})
    return LookupSpeculator(library_or_skip(), lookup_options, verifier=verifier)


def test_an_answer_is_guessed_again_for_a_later_request() -> None:
    speculator = lookup(max_depth=5)
    answer(speculator, "say:", "world")
    assert guess(speculator, "say:") == ["world"]  # the prompt's end is kept before the answer
    assert guess(speculator, "do wor", request_id="2") == ["ld"]


def test_a_running_answer_is_not_shared_a_finished_or_aborted_one_is() -> None:
    speculator = lookup()
    speculator.propose(plan(entry(letters("q:"), request_id="1")))
    speculator.observe([outcome(*letters("abc"), request_id="1")])
    assert guess(speculator, "xab", request_id="2") == []
    speculator.observe([outcome(request_id="1", finished=True)])
    assert guess(speculator, "xab", request_id="3") == ["c"]


def test_cache_keys_do_not_see_each_other() -> None:
    speculator = lookup()
    answer(speculator, "q:", "ab1", salt="mine")
    answer(speculator, "q:", "ab2", salt="yours")
    answer(speculator, "q:", "ab3")
    assert guess(speculator, "ab", salt="mine", request_id="1") == ["1"]
    assert guess(speculator, "ab", salt="yours", request_id="2") == ["2"]
    assert guess(speculator, "ab", request_id="3") == ["3"]
    assert guess(speculator, "ab", salt="None", request_id="4") == []


def test_without_memory_the_own_text_is_still_looked_at() -> None:
    speculator = lookup(memory=0)
    answer(speculator, ":", "xyz")
    assert guess(speculator, "x", request_id="1") == []
    assert guess(speculator, "xyz-x", request_id="2") == ["yz-"]


def test_of_a_request_it_was_never_asked_about_nothing_is_learnt() -> None:
    speculator = lookup()
    speculator.observe([outcome(*letters("abc"), finished=True)])
    assert guess(speculator, "ab") == []


@pytest.mark.parametrize("verifier", list(Verifier))
def test_in_an_engine_an_answer_asked_for_again_takes_the_fewest_steps(
    tiny: Tiny, verifier: Verifier
) -> None:
    speculator = lookup(min_probability=0.05)
    first, again = (
        answer_in_engine(tiny, speculator, verifier, request_id=request_id)
        for request_id in ("first", "again")
    )
    assert list(first.token_ids) == list(again.token_ids) == expected(tiny)
    assert again.figures.accepted_by == {"lookup": again.figures.accepted_tokens}
    assert first.figures.tokens_per_step < again.figures.tokens_per_step
    assert again.figures.tokens_per_step > 3.5  # at most 4 are possible, and the last step is cut short


def test_a_prompt_is_read_in_step_with_the_target() -> None:
    speculator, text = lookup(), letters("one two three one two ")
    for end in (6, 12):
        assert speculator.propose(plan(entry(text, start=end - 6, end=end, max_nodes=0))) == []
        [running] = speculator._running.values()
        assert running.text.num_tokens == end
    [tree], [whole] = (s.propose(plan(entry(text))) for s in (speculator, lookup()))
    assert (tree.token_ids, tree.parents) == (whole.token_ids, whole.parents)
    assert tree.num_nodes > 3


def test_earlier_answers_are_not_looked_at_where_they_tell_what_is_drawn() -> None:
    for params, verifier, found in (
        ({"seed": 1}, "coupled", ["ld"]),
        ({"seed": 1}, "mss", []),
        ({}, "mss", ["ld"]),
        ({"seed": 1, "temperature": 0.0}, "mss", ["ld"]),
        ({"seed": 1, "speculation": {"verifier": "mss"}}, "coupled", []),
        ({"seed": 1, "speculation": {"verifier": "coupled"}}, "mss", ["ld"]),
    ):
        speculator = lookup(verifier=verifier)
        answer(speculator, "say:", "world")
        asked = entry(letters("do wor"), params=SamplingParams(**params))
        assert spelled(speculator.propose(plan(asked))[0]) == found, (params, verifier)
        own = entry(letters("ab-ab"), request_id="own", params=SamplingParams(**params))
        assert spelled(speculator.propose(plan(own))[0]) == ["-ab"], "its own text is its own"
