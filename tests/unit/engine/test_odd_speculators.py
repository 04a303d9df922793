"""Speculators that say odd things of their guesses, or change: texts stay, time is kept, logs say why."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from specinfer import SamplingParams
from specinfer.engine.steps import TreeEvent
from specinfer.llm import LLM
from specinfer.plan import PlanEntry, StepPlan
from specinfer.runtime.cost_curve import CostCurve
from specinfer.speculate.speculator import Speculator
from specinfer.tree import TokenTree, TreeBuilder
from tests.engines import Tiny, assert_idle, slow_generate, write_tiny

VOCAB = 64
PROMPTS = [[1, 2, 3, 2], [9, 8, 7, 6]]
TOKENS = 150
LAWS = [
    SamplingParams(temperature=0, max_tokens=TOKENS),
    SamplingParams(temperature=1, seed=5, max_tokens=TOKENS),
]
COSTS = CostCurve((1, 101), (1.0, 11.0))  # seconds by rows: 300 without guesses, and a tenth for each
DEEP = 4  # tokens of every guess
CHANGE = 60  # tokens of the text, after which speculators change

OFF = "speculation is off for 64 steps, then tried again for 1% of the time: "
FAILED = "speculator 'odd' failed and pauses; later failures are not logged, and texts go on without it"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB, max_context=160)


@pytest.fixture(scope="module")
def answers(tiny: Tiny) -> dict[SamplingParams, list[list[int]]]:
    """The target's texts without speculation."""
    return {law: [slow_generate(tiny.target, prompt, law) for prompt in PROMPTS] for law in LAWS}


@pytest.fixture(autouse=True)
def _costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes take the times of COSTS instead of measured ones, so every run is the same."""
    monkeypatch.setattr("specinfer.engine.costs.cost_curve", lambda *_, **__: COSTS)


Saying = Callable[[Sequence[int]], Sequence[int]]  # following tokens -> guesses


def right(follow: Sequence[int]) -> Sequence[int]:
    return follow


def wrong(follow: Sequence[int]) -> Sequence[int]:
    return [(token + 1) % VOCAB for token in follow]


def nothing(follow: Sequence[int]) -> Sequence[int]:
    return ()


def broken(follow: Sequence[int]) -> Sequence[int]:
    raise ZeroDivisionError


class Knowing:
    """Has the texts; guesses `first` of the following tokens, and later `then` of them."""

    name = "odd"

    def __init__(
        self, texts: Sequence[Sequence[int]], first: Saying, then: Saying, confidence: float = 0.5
    ) -> None:
        self._texts, self._first, self._then, self._confidence = texts, first, then, confidence

    def _tree(self, entry: PlanEntry, depth: int) -> TokenTree:
        said = entry.token_ids[: entry.end]
        [text] = [text for text in self._texts if text[: len(said)] == said]
        say = self._first if len(said) < CHANGE else self._then
        builder = TreeBuilder(said[-1], entry.max_nodes)
        for node, token in enumerate(say(text[len(said) :][: min(depth, entry.max_depth)])):
            builder.add(node, token, self.name, confidence=self._confidence)
        return builder.build()


class Odd(Knowing, Speculator):
    """Proposes whole trees."""

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        return [self._tree(entry, DEEP) for entry in plan.tree_entries]


def beside(tiny: Tiny, speculator: Knowing) -> LLM:
    """An engine that answers one request at a time with this speculator."""
    options = {"tree_size": "cost", "clock": "curve", "max_batch_size": 1}
    return tiny.llm().variant(speculators=[speculator], **options)


def seconds_with(
    tiny: Tiny, answers: list[list[int]], law: SamplingParams, odd: type[Knowing], *how: object
) -> float:
    """Return the time by COSTS of both requests with such a speculator; checks their texts."""
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    speculator = odd(texts, *how)  # type: ignore[arg-type]
    rows = Counter[int]()

    def count(event: TreeEvent) -> None:
        rows[event.step] += event.tree.num_nodes

    with beside(tiny, speculator) as llm:
        llm.on_tree = count
        outputs = llm.generate(PROMPTS, law)
        assert_idle(llm)
    assert [list(output.token_ids) for output in outputs] == answers
    return sum(map(COSTS.expected, rows.values()))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("first", "then", "confidence", "most_seconds", "logged"),
    [
        (right, right, 0.5, 94, []),
        (wrong, wrong, 0.5, 318, [OFF]),
        (wrong, wrong, 1.0, 320, [OFF]),
        (wrong, right, 0.5, 210, []),
        (right, wrong, 0.5, 270, [OFF]),
        (nothing, nothing, 0.5, 300, []),
        (nothing, right, 0.5, 175, []),
        (right, nothing, 0.5, 227, []),
        (right, broken, 0.5, 267, [FAILED]),
        (broken, right, 0.5, 300, [FAILED]),
    ],
)
@pytest.mark.parametrize("law", LAWS)
def test_one_that_hits_or_misses_comes_or_goes_costs_no_text_and_little_time(
    tiny: Tiny,
    answers: dict[SamplingParams, list[list[int]]],
    caplog: pytest.LogCaptureFixture,
    law: SamplingParams,
    first: Saying,
    then: Saying,
    confidence: float,
    most_seconds: float,
    logged: list[str],
) -> None:
    with caplog.at_level(logging.INFO, "specinfer.speculate"):
        seconds = seconds_with(tiny, answers[law], law, Odd, first, then, confidence)
    assert seconds <= most_seconds  # the guard alone would allow 300 + 64, and some
    said = [record.getMessage() for record in caplog.records if record.name.startswith("specinfer.speculate")]
    assert [line[: len(start)] for line, start in zip(said, logged, strict=True)] == logged
