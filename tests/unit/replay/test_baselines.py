"""The best fixed choice in hindsight, and the policy that knows the text."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from specinfer.errors import TraceTooSmallError
from specinfer.replay.baselines import FixedChoice, FixedSizePolicy, best_fixed, fixed_choices, play_fixed
from specinfer.replay.engine import PlayedStep
from specinfer.replay.oracle import OraclePolicy, PlannedGuess, count_correct, oracle, play_oracle
from specinfer.replay.replay import POLICIES, Phase, mixed, play, play_without, whole
from specinfer.replay.trace import Trace
from specinfer.runtime.cost_curve import CostCurve
from specinfer.speculation_config import SpeculationConfig
from specinfer.tree import TokenTree, TreeBuilder
from specinfer.tree.expansion import Expansion
from tests.engines import Tiny
from tests.unit.replay.conftest import recorded


@pytest.fixture
def trace(tiny: Tiny, made: list[Trace]) -> Trace:
    if not made:
        made.append(recorded(tiny.llm(drafts=("similar",), lookup=True, expansion=(2, 1, 1)), max_tokens=24))
    return made[0]


def speculated(builder: TreeBuilder, name: str, *path: int) -> None:
    node = 0
    for token in path:
        child = builder.add(node, token, name, confidence=0.5)
        assert child is not None
        node = child


def tree() -> TokenTree:
    """A draft that guesses 1 2 3 and 1 4, and lookups that guess 1 2 and 5."""
    builder = TreeBuilder(0)
    speculated(builder, "draft", 1, 2, 3)
    speculated(builder, "draft", 1, 4)
    speculated(builder, "lookup", 1, 2)
    speculated(builder, "lookup", 5)
    return builder.build()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ([0, 1, 2, 3, 9], {"draft": 3, "lookup": 2}),
        ([0, 1, 4, 4], {"draft": 2, "lookup": 1}),
        ([0, 5, 1], {"lookup": 1}),
        ([0, 1], {"draft": 1, "lookup": 1}),
        ([0, 8, 1], {}),
    ],
)
def test_how_far_each_is_right(text: list[int], found: dict[str, int]) -> None:
    assert count_correct(tree(), text, 1) == found


def test_a_cut_keeps_the_likeliest_nodes_and_their_parents() -> None:
    builder = TreeBuilder(0)
    a = builder.add(0, 1, "draft", confidence=0.3)
    builder.add(0, 2, "draft", confidence=0.6)
    assert a is not None
    builder.add(a, 3, "draft", confidence=0.9)
    builder.add(a, 4, "draft", confidence=1.0)
    [cut] = FixedSizePolicy(("draft",), 2, 4).choose_nodes([builder.build()])
    assert (cut.token_ids, cut.parents) == ((0, 1, 2, 4), (-1, 0, 0, 1))
    assert FixedSizePolicy(("draft",), 2, 9).choose_nodes([cut]) == [cut]


def test_the_best_fixed_choice_is_the_quickest_of_all(trace: Trace) -> None:
    parts, speculation = mixed([trace]), trace.speculation
    names = [("0-similar",), ("lookup",), ("0-similar", "lookup")]
    depths = {names[0]: range(1, 9), names[1]: (0,), names[2]: range(1, 9)}
    choices = [FixedChoice(who, *most) for who in names for most in product(depths[who], (2, 6))]
    assert list(fixed_choices(parts, speculation, (2, 6))) == choices
    best, played = best_fixed(parts, speculation, (2, 6))
    assert played is not None
    known = [choice for choice in choices if choice.depth <= 3]  # so deep it was recorded
    assert best in known
    assert played.seconds == min(play_fixed(parts, speculation, choice).seconds for choice in known)
    lonely = replace(trace, drafts={}, speculation=SpeculationConfig(lookup=False))
    assert best_fixed(mixed([lonely]), lonely.speculation) == (None, None)


def test_every_set_of_speculators_is_a_fixed_choice(trace: Trace) -> None:
    found = {choice.speculators for choice in fixed_choices(mixed([trace]), trace.speculation)}
    assert found == {("0-similar",), ("lookup",), ("0-similar", "lookup")}


def test_drafts_go_deeper_than_the_expansion_as_far_as_was_recorded(trace: Trace) -> None:
    parts, speculation = mixed([trace]), trace.speculation
    flat = replace(speculation, expansion=Expansion((2,)))
    deep = play_fixed(parts, flat, FixedChoice(("0-similar",), 3, 6))
    assert deep == play_fixed(parts, speculation, FixedChoice(("0-similar",), 3, 6))
    with pytest.raises(TraceTooSmallError):
        play_fixed(parts, speculation, FixedChoice(("0-similar",), 4, 6))
    with pytest.raises(TraceTooSmallError):  # work of an engine must not be left out
        best_fixed(parts, replace(speculation, expansion=Expansion((2, 1, 1, 1))), (6,))


def test_a_fixed_choice_is_made_in_every_step(trace: Trace) -> None:
    [choice] = [c for c in fixed_choices(mixed([trace]), trace.speculation, (3,)) if c.depth == 2][:1]
    played = play_fixed(mixed([trace]), trace.speculation, choice)
    steps: list[PlayedStep] = []
    policy = FixedSizePolicy(choice.speculators, choice.depth, choice.nodes)
    play(mixed([trace]), policy, speculation=replace(trace.speculation, lookup=False), on_step=steps.append)
    trees = [entry.tree for step in steps for entry in step.entries]
    nodes, drawn = [tree.num_nodes for tree in trees], {d.speculator for tree in trees for d in tree.draws}
    assert (max(nodes), drawn) == (3, {"0-similar"})
    assert 2 * played.steps <= played.draft_passes["0-similar"] <= 3 * played.passes


@pytest.mark.parametrize("batch", [1, 3])
def test_whoever_knows_the_text_is_quicker_than_all_others(trace: Trace, batch: int) -> None:
    parts, speculation = whole([trace], at_once=batch), trace.speculation
    paths: list[int] = []
    knowing = play(
        parts,
        oracle(parts, speculation),
        speculation=speculation,
        on_step=lambda step: paths.extend(len(entry.path) for entry in step.entries),
    )
    assert knowing == play_oracle(parts, speculation)
    assert knowing.tokens == sum(len(text.output) for text in trace.texts)
    assert knowing.nodes == sum(paths) > 0, "no node is verified in vain"
    others = [play(parts, make(trace, speculation), speculation=speculation) for make in POLICIES.values()]
    _, fixed = best_fixed(parts, speculation)
    assert fixed is not None
    assert knowing.seconds < min(one.seconds for one in (*others, fixed, play_without(parts)))


def test_the_plan_is_as_good_as_any_other(trace: Trace) -> None:
    """A short text, at whose first three places everything is tried that may be done there."""
    number = max(range(len(trace.texts)), key=lambda i: len(trace.texts[i].output))
    start, guesses = trace.starts[number], trace.drafts["0-similar"].guesses
    text = replace(trace.texts[number], output=trace.texts[number].output[:8])
    roots = replace(guesses, roots=guesses.roots[start : start + 8])
    draft = replace(trace.drafts["0-similar"], guesses=roots)
    parts = [Phase([(replace(trace, texts=(text,), drafts={"0-similar": draft}, stages={}), 0)])]
    planned = oracle(parts, trace.speculation)
    found = play(parts, planned, speculation=trace.speculation).seconds
    ways = [PlannedGuess(nodes=n) for n in range(3)] + [PlannedGuess("0-similar", n, n) for n in (1, 2, 3)]
    texts, [best] = [text.prompt + text.output], planned.choices
    first = sorted(best)[:3]
    tried = [
        OraclePolicy(texts, [{**best, **dict(zip(first, plan, strict=True))}])
        for plan in product(ways, repeat=3)
    ]
    seconds = [play(parts, policy, speculation=trace.speculation).seconds for policy in tried]
    assert max(seconds) > 1.2 * found
    # A plan does not know what a draft will have to read.
    assert found <= 1.01 * min(seconds)


def test_a_draft_that_does_not_earn_its_reading_is_not_read(trace: Trace) -> None:
    """A pass of many rows takes it longer than it could ever save."""
    draft = trace.drafts["0-similar"]
    slow = replace(draft, curve=CostCurve((1, 4, 5), (0.01, 0.01, 500.0)))
    parts = [Phase([(replace(trace, drafts={"0-similar": slow}), 0)])]
    quick = play_oracle([Phase([(trace, 0)])], trace.speculation)
    played = play_oracle(parts, trace.speculation)
    assert quick.draft_passes["0-similar"] > 0
    assert played.draft_passes["0-similar"] == 0
    assert quick.seconds < played.seconds <= play_without(parts).seconds
