"""The check passes an honest engine, and fails one for each way to break the promise."""

import json
from typing import Any

import pytest

from specinfer import SamplingParams
from specinfer.check.promise import Effort, check_bookkeeping, check_promise
from specinfer.engine import engine
from specinfer.speculate.drafts import draft as drafting
from specinfer.speculate.lookups.lookup import LookupSpeculator
from specinfer.tree import DrawRule
from specinfer.verify.coupled import Acceptance
from specinfer.verify.target_law import most_likely, target_law
from tests.engines import Tiny, engine_of, tiny_of
from tests.flights import accept_everything, each_tree

pytestmark = pytest.mark.slow  # several engines, thousands of tokens each

PROMPTS = [[7, 8, 9, 7, 8, 9, 7], list(range(30, 60)), [100] * 6, [1, 2, 1, 2, 1]]
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
EFFORT = Effort(max_tokens=20, samples=40, num_single=2)
IDENTITY = [
    f"{sampling}, {how}"
    for sampling in ("greedy", "T=1", "T=0.7, top_p=0.9")
    for how in ("with and without speculation", "in a batch and alone")
]
TWICE = [f"{sampling}, same request twice" for sampling in ("greedy", "T=1")]
LAWS = [f"law, {v}, {s}" for v in ("coupled", "mss") for s in ("T=1", "T=0.8, top_p=0.95")]


tiny = tiny_of(vocab_size=256, max_context=160)


def verdicts(tiny: Tiny, *, last: str | None = None, **options: Any) -> dict[str, bool]:
    """Return the results of an engine's checks, up to the one called `last`."""
    llm = tiny.llm(**{"drafts": ["similar"], "lookup": True, "max_batch_size": 16, **options})
    found = []
    for verdict in check_promise(llm, PROMPTS, EFFORT):
        found.append(verdict)
        if verdict.name == last:
            break
    for verdict in found:
        json.dumps(verdict.to_json())
        mark = "pass" if verdict.passed else "FAIL" if verdict.decided else "open"
        assert str(verdict).startswith(f"{mark}  ")
    return {verdict.name: verdict.passed for verdict in found}


@pytest.mark.parametrize(
    "options",
    [{"drafts": ["similar", "stranger"], "expansion": (2, 2), "draw": "top_k"}, {"drafts": []}],
    ids=["two drafts, top-k, and lookups", "lookups"],
)
def test_an_honest_engine_passes(tiny: Tiny, options: dict[str, Any]) -> None:
    assert verdicts(tiny, **options) == dict.fromkeys([*IDENTITY, *TWICE, *LAWS, "bookkeeping"], True)


def test_a_verifier_that_accepts_everything_fails(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "verify_trees", each_tree(accept_everything))
    found = verdicts(tiny, drafts=["stranger"])
    assert not any(found[name] for name in IDENTITY if "without speculation" in name)
    assert not any(found[name] for name in LAWS)
    assert found["bookkeeping"]


def test_a_draw_called_what_it_is_not_fails_in_laws(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    # The classic mistake: the draft's most likely tokens, verified as if they had been sampled.
    honest = drafting.draw_children

    def most_likely_called_samples(flight: Any, sites: Any, *more: Any) -> None:
        if any(site.rule is not DrawRule.WITHOUT_REPLACEMENT for site in sites):
            honest(flight, sites, *more)
            return
        for row, site in enumerate(sites):
            law = target_law(flight.row(row), site.params).dense()
            for token in most_likely(flight.row(row), site.width).tolist():
                if law[token] > 0:
                    site.builder.add(site.node, token, site.speculator, site.rule, law)

    monkeypatch.setattr(drafting, "draw_children", most_likely_called_samples)
    found = verdicts(tiny, lookup=False)
    assert [name for name, passed in found.items() if not passed] == LAWS[2:]


def test_a_text_that_depends_on_the_batch_fails(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = engine.verify_trees

    def seeded_by_the_request_id(laws: Any, verifier: Any, flight: Any) -> list[Any]:
        return [
            Acceptance(verdict.path, 0) if one.request.request_id.endswith("-0") else verdict
            for one, verdict in zip(laws, verify(laws, verifier, flight), strict=True)
        ]

    monkeypatch.setattr(engine, "verify_trees", seeded_by_the_request_id)
    # Without speculation text 0 is spoilt alike; alone it is spoilt no longer.
    name = "greedy, in a batch and alone"
    assert not verdicts(tiny, last=name)[name]


def test_an_engine_in_which_nobody_guesses_tests_nothing(tiny: Tiny) -> None:
    found = verdicts(tiny, max_nodes=1)
    assert not any(found[name] for name in [*IDENTITY, *TWICE, *LAWS])


def test_a_lost_block_and_a_request_left_behind_are_found(tiny: Tiny) -> None:
    llm = tiny.llm(lookup=True)
    assert check_bookkeeping([llm]).passed
    [left_behind] = llm.intake.prompts([[1, 2, 3]])
    llm.loop.submit(left_behind, lambda output: None)
    left = check_bookkeeping([tiny.llm(), llm])
    assert not left.passed
    assert "engine 2 has work left" in left.words
    llm.loop.cancel(left_behind)
    blocks: list[int] = []
    assert engine_of(llm)._scheduler._pool.extend(blocks, 1)
    lost = check_bookkeeping([llm])
    assert not lost.passed
    assert "an invariant is broken" in lost.words


def test_a_speculator_that_fails_once_fails_the_check(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts are right all the same."""
    works, failed = LookupSpeculator.observe, list[bool]()

    def once(self: Any, *given: Any) -> Any:
        if not failed:
            failed.append(True)
            raise MemoryError
        return works(self, *given)

    monkeypatch.setattr(LookupSpeculator, "observe", once)
    llm = tiny.llm(lookup=True)
    assert [out.finish_reason for out in llm.generate(PROMPTS, PARAMS)] == ["length"] * len(PROMPTS)
    verdict = check_bookkeeping([llm])
    assert not verdict.passed
    assert verdict.words == "engine 1 went on after errors in its log: lookup 1 times"
