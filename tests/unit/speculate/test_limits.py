"""Speculators that may guess for a request, and their node budgets."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from specinfer import SamplingParams
from specinfer.errors import RequestError
from specinfer.grammar.grammar import GrammarCompiler
from specinfer.plan import PlanEntry, StepPlan
from specinfer.processors.pipeline import Processors
from specinfer.request import Request
from specinfer.speculate.drafts.draft_model import DraftModel
from specinfer.speculate.drafts.growth import Shape
from specinfer.speculate.grammar import GrammarSpeculator
from specinfer.speculate.limits import SpeculationLimits
from specinfer.speculate.lookups.prediction import BRANCHES, SIDE_DEPTH
from specinfer.speculate.speculator import Outcome, Speculator
from specinfer.speculate.table import build_speculators
from specinfer.speculation_config import SpeculationConfig
from specinfer.tree import DrawRule, TokenTree
from tests import plans
from tests.engines import Tiny, tiny_of
from tests.plans import plan

CONFIG = SpeculationConfig(
    drafts=("a", "b"),
    lookup=True,
    lookup_nodes=10,
    expansion=(2, 1),  # type: ignore[arg-type]
    lookup_depth=5,
    max_nodes=100,
)
DRAFT, LOOKUP, FORCED, PREDICTION = 4, 9, 5, 5 + (BRANCHES - 1) * SIDE_DEPTH


class Named(Speculator):
    """A caller's own speculator, which says nothing about its size."""

    def __init__(self, name: str) -> None:
        self.name = name

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        raise AssertionError("no speculator may be called")

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        pass


def drafts(config: SpeculationConfig) -> list[DraftModel]:
    names = ["draft1", "draft2"] if config.drafts else []
    runner: Any = SimpleNamespace(block_size=4, max_context=99, states=None, cache=None, shortlist=None)
    return [DraftModel(n, runner, Shape.of(config), max_rows=8) for n in names]


def limits(config: SpeculationConfig = CONFIG, extra: tuple[str, ...] = ()) -> SpeculationLimits:
    return SpeculationLimits(config, [*build_speculators(config), *drafts(config), *map(Named, extra)])


def request(speculation: Any = None, prediction: tuple[int, ...] = (), **params: Any) -> Request:
    return Request("r", (1,), SamplingParams(speculation=speculation, **params), 0, prediction)


EVERYBODY = ("lookup", "draft1", "draft2")


def test_speculators_and_the_nodes_they_could_use() -> None:
    for asked, speculators, nodes in (
        (request(), EVERYBODY, 1 + 2 * DRAFT + LOOKUP),
        (request(False), (), 1),
        (request({"enabled": False, "speculators": ["lookup"]}), (), 1),
        (request({"speculators": ["lookup"]}), ("lookup",), 1 + LOOKUP),
        # In the engine's order, whatever the request's.
        (request({"speculators": ["draft2", "lookup"]}), ("lookup", "draft2"), 1 + DRAFT + LOOKUP),
        (request({"max_nodes": 7}), EVERYBODY, 7),
        (request({"max_nodes": 1}), EVERYBODY, 1),
        (request({"expansion": "1,1,1", "speculators": "draft1"}), ("draft1",), 1 + 3),
        (request({"expansion": "9,9,9", "speculators": "draft1"}), ("draft1",), 100),
        # Speculators that read the request's fields count only if these exist.
        (request(choice=["a"]), ("grammar", *EVERYBODY), 1 + FORCED + 2 * DRAFT + LOOKUP),
        (request({"speculators": ["grammar"]}), (), 1),
        (request({"speculators": ["grammar"]}, choice=["a"]), ("grammar",), 1 + FORCED),
        (request({"speculators": ["prediction"]}, (5, 6)), ("prediction",), 1 + PREDICTION),
        (request(False, (5, 6), choice=["a"]), (), 1),
    ):
        assert limits().of(asked) == (speculators, nodes), asked


def test_an_engine_without_speculators_still_guesses_from_what_requests_bring() -> None:
    ours = limits(SpeculationConfig(lookup=False))
    assert ours.of(request()) == ((), 1)
    assert ours.of(request(prediction=(5,), regex="a"))[0] == ("grammar", "prediction")


@pytest.mark.parametrize(
    ("speculation", "line"),
    [
        (
            {"speculators": ["lookup", "eagle"]},
            "speculation.speculators names 'eagle'; this engine has grammar, prediction, lookup, draft1, "
            "draft2",
        ),
        ({"max_nodes": 101}, "speculation.max_nodes is 101; the engine allows at most 100: lower it"),
    ],
)
def test_what_the_engine_does_not_have_is_refused(speculation: Any, line: str) -> None:
    with pytest.raises(RequestError) as caught:
        limits().of(request(speculation))
    assert str(caught.value) == line


# Forms.


VOCAB, EOS, ROOT = 128, 5, 63


tiny = tiny_of(vocab_size=VOCAB, max_context=96, eos_token_id=EOS, spread=0.25)


def entry(
    tiny: Tiny, output: str = "", *, max_nodes: int = 64, max_depth: int = 50, **params: Any
) -> PlanEntry:
    asked = SamplingParams(**params)
    form = asked.structured_output
    processors = Processors(
        asked,
        [ROOT],
        vocab=VOCAB,
        ending=[EOS],
        grammar=None if form is None else GrammarCompiler(tiny.tokenizer, VOCAB).compile(form).state(),
    )
    processors.commit(output.encode())
    return plans.entry(
        [ROOT], output.encode(), params=asked, processors=processors, max_nodes=max_nodes, max_depth=max_depth
    )


def test_forced_text_is_one_chain(tiny: Tiny) -> None:
    for asked, guess in (
        ({"regex": "yes|no"}, ""),  # there is a choice
        ({"regex": "yes|no", "output": "y"}, "es"),
        ({"choice": ["abcdx", "abcdy"]}, "abcd"),
        ({"choice": ["abcdx", "abcdy"], "output": "abcd"}, ""),
        ({"choice": ["abcdefghijk"]}, "abcdefgh"),  # as deep as the speculator goes
        ({"choice": ["abcdefghijk"], "max_depth": 3}, "abc"),
        ({"choice": ["abcdefghijk"], "max_nodes": 3}, "ab"),
        ({"choice": ["abcdefghijk"], "max_nodes": 1}, ""),
        ({"choice": ["abcdefghijk"], "max_depth": 0}, ""),
        ({}, ""),  # no form, nothing forced
    ):
        asked_entry = entry(tiny, **asked)
        (tree,) = GrammarSpeculator(depth=8).propose(plan(asked_entry))
        tree.check_integrity()
        assert tree.token_ids == (asked_entry.token_ids[-1], *guess.encode()), asked
        assert tree.parents == tuple(range(-1, len(guess))), asked
        assert {(draw.speculator, draw.rule) for draw in tree.draws} <= {("grammar", DrawRule.POINT_MASS)}
        assert len(tree.draws) == len(guess), asked


def test_without_processors_nothing_is_guessed() -> None:
    (tree,) = GrammarSpeculator(depth=8).propose(plan(plans.entry([ROOT])))
    assert tree.token_ids == (ROOT,)


def test_each_entry_gets_its_own_and_asking_moves_nothing(tiny: Tiny) -> None:
    speculator = GrammarSpeculator(depth=8)
    entries = [entry(tiny, choice=["abc"]), entry(tiny), entry(tiny, "x", choice=["xyz"])]
    guesses = [bytes(tree.token_ids[1:]) for tree in speculator.propose(plan(*entries))]
    assert guesses == [b"abc", b"", b"yz"]
    speculator.observe([])
    assert [bytes(tree.token_ids[1:]) for tree in speculator.propose(plan(*entries))] == guesses
