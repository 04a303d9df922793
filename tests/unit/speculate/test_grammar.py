"""Text that a grammar forces, as chains of guesses; each byte is a token."""

from __future__ import annotations

from typing import Any

from specinfer import SamplingParams
from specinfer.grammar.grammar import GrammarCompiler
from specinfer.plan import PlanEntry
from specinfer.processors.pipeline import Processors
from specinfer.speculate.grammar import GrammarSpeculator
from specinfer.tree import DrawRule
from tests import plans
from tests.engines import Tiny, tiny_of
from tests.plans import plan

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
