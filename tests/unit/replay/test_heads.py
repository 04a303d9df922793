"""Traces of block heads: replay equals live engines, tree by tree and number by number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from specinfer.cli import cli
from specinfer.config import EngineConfig
from specinfer.engine.models import Models
from specinfer.errors import ConfigError, RequestError, TraceTooSmallError
from specinfer.heads.checkpoint import HeadFolder, load_head
from specinfer.heads.config import BlockRows
from specinfer.heads.kinds import AnyHeadModel
from specinfer.kernels.choice import choose_kernels, draft_kernels
from specinfer.llm import LLM
from specinfer.models.open_model import open_model
from specinfer.replay.baselines import FixedChoice, best_fixed, fixed_choices, play_fixed
from specinfer.replay.drafts import regrow
from specinfer.replay.engine import PlayedStep
from specinfer.replay.guess_trie import NO_SITE
from specinfer.replay.oracle import play_oracle
from specinfer.replay.replay import POLICIES, Played, play, play_without, speculation_of, whole
from specinfer.replay.trace import Trace, read_trace, write_trace
from specinfer.speculate.drafts.one_pass import MAX_NODES
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from tests.engines import CPU, ENGINE, Tiny, write_tiny
from tests.heads import block_config, write_any
from tests.unit.replay.conftest import PROMPTS, recorded
from tests.unit.replay.test_replay import Step, contents, live

CONFIGS = {
    "like the shipped one": block_config(reads_last=True),
    "the target's output layer": block_config(own_head=False),
    "all rows see each other": block_config(causal=False, sample_from_anchor=False, markov_rank=0),
}
BESIDE: dict[str, dict[str, Any]] = {"alone": {}, "with n-grams": {"lookup": True}}
LAWS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "coupled": {"temperature": 0.8}}

# As the others, but none begins with a whole block of another.
APART = [*PROMPTS[:3], [9, 7, 3] * 9, PROMPTS[4]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Tiny:
    return write_tiny(folder, max_context=128, eos_token_id=10, spread=0.25)


@pytest.fixture(scope="module")
def heads(folder: Path, tiny: Tiny) -> dict[str, AnyHeadModel]:
    target, loaded = open_model(folder / "target"), {}
    for number, (name, config) in enumerate(CONFIGS.items()):  # with this seed each is right now and then
        head = HeadFolder(write_any(config, folder / f"head{number}", seed=2), target.config)
        loaded[name] = load_head(
            head, target, tiny.target, kernels=draft_kernels(choose_kernels("auto", CPU)[0])
        )
    return loaded


def llm_with(tiny: Tiny, drafts: Mapping[str, Any], **options: Any) -> LLM:
    config = EngineConfig.from_options("tiny", {**ENGINE, "drafts": tuple(drafts), **options})
    return LLM.from_models(config, Models(tiny.target, tiny.tokenizer, dict(drafts)))


def played(trace: Trace, policy: str, batch: int, **options: Any) -> tuple[list[Step], Played]:
    """The steps with trees in which a trace is played, and what came of it."""
    steps: list[PlayedStep] = []
    speculation = speculation_of(policy, trace.speculation)
    parts = whole([trace], at_once=batch)
    came = play(
        parts, POLICIES[policy](trace, speculation), speculation=speculation, on_step=steps.append, **options
    )
    entries = [
        [(e.request_id, contents(e.tree), e.path) for e in step.entries] for step in steps if step.entries
    ]
    return entries, came


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("head", CONFIGS)
def test_a_replay_is_the_live_run(
    tiny: Tiny, heads: dict[str, AnyHeadModel], head: str, beside: str, law: str
) -> None:
    llm = llm_with(tiny, {"head": heads[head]}, max_batch_size=4, max_step_tokens=160, **BESIDE[beside])
    trace = recorded(llm, APART, **LAWS[law])
    for policy in ("cost", "fixed"):
        for batch in (1, 4):
            engine = llm.variant(tree_size=policy, clock="curve", max_batch_size=batch)
            steps = live(engine, trace)
            again, came = played(trace, policy, batch)
            assert again == steps
            assert came.partly_read == 0
            assert batch > 1 or any(path for step in steps for _, _, path in step)


@pytest.mark.parametrize("law", LAWS)
def test_trees_that_steps_leave_little_room_are_those_of_the_live_run(
    tiny: Tiny, heads: dict[str, AnyHeadModel], law: str
) -> None:
    """And prompts that are read over several steps; a draft model guesses, too."""
    drafts = {"head": heads["the target's output layer"], "similar": tiny.similar}
    llm = llm_with(tiny, drafts, max_batch_size=4, max_step_tokens=24)
    trace = recorded(llm, APART, **LAWS[law])
    for batch in (1, 4):
        steps = live(llm.variant(max_batch_size=batch), trace)
        again, came = played(trace, "fixed", batch)
        assert again == steps
        assert came.partly_read == 0


def test_blocks_that_are_larger_than_trees_are_refused(tiny: Tiny, folder: Path) -> None:
    config = replace(CONFIGS["all rows see each other"], block_size=34)
    target = open_model(folder / "target")
    head = HeadFolder(write_any(config, folder / "wide", seed=2), target.config)
    kernels = draft_kernels(choose_kernels("auto", CPU)[0])
    llm = llm_with(tiny, {"head": load_head(head, target, tiny.target, kernels=kernels)})
    with pytest.raises(ConfigError, match="head has blocks of 34 rows, more than trees have nodes; traces"):
        recorded(llm, APART[:2])


def test_trees_of_a_head_that_has_missed_some_of_a_text_are_counted(
    tiny: Tiny, heads: dict[str, AnyHeadModel], tmp_path: Path
) -> None:
    """One of two prompts that begin alike starts behind blocks that the head has not read yet."""
    llm = llm_with(tiny, {"head": heads["the target's output layer"]}, max_batch_size=5, max_step_tokens=200)
    trace = recorded(llm, PROMPTS)
    steps = live(llm.variant(max_batch_size=5), trace)
    again, came = played(trace, "fixed", 5)
    roots = [one for step in steps for one in step if one[0] == "3" and len(one[1][0]) > 1]
    assert came.partly_read == len(roots) > 5
    others = [[[one for one in step if one[0] != "3"] for step in ran] for ran in (again, steps)]
    assert others[0] == others[1]
    assert again != steps
    write_trace(tmp_path / "trace.npz", trace)
    for batch, notes in ((1, []), (5, [f"partly_read={came.partly_read}"])):
        asked = ["policy", "replay", str(tmp_path / "trace.npz"), "--policy", "fixed", "--batch", str(batch)]
        entries = CliRunner().invoke(cli, asked).output
        assert entries.splitlines()[-1].split()[7:] == notes


@pytest.fixture
def trace(tiny: Tiny, heads: dict[str, AnyHeadModel], made: list[Trace]) -> Trace:
    """The trace of a head whose trees are whole in every step, and of n-grams."""
    if not made:
        llm = llm_with(tiny, {"head": heads["like the shipped one"]}, lookup=True)
        made.append(recorded(llm, APART, temperature=0.8))
    return made[0]


def test_a_trace_of_a_head_is_read_as_it_was_written(trace: Trace, tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.npz", trace)
    read = read_trace(tmp_path / "trace.npz")
    assert read.drafts["head"].head == trace.drafts["head"].head
    assert read.drafts["head"].head == BlockRows(block_size=5, skipped=0, causal=True, reads_last=True)
    assert played(read, "cost", 2) == played(trace, "cost", 2)


def test_every_smaller_tree_is_the_beginning_of_a_larger_one(trace: Trace) -> None:
    guesses = trace.drafts["head"].guesses
    roots = [int(root) for root in guesses.roots if root >= 0]
    assert len(roots) > 50

    def grown(root: int, most: int, room: int = 100) -> TokenTree:
        builder = TreeBuilder(0, room)
        regrow(builder, guesses, root, most, "head", DrawRule.COUPLED)
        return builder.build()

    for root in roots:
        largest = grown(root, MAX_NODES)
        assert 0 < largest.num_nodes <= 1 + MAX_NODES
        likelihoods = largest.likelihoods()
        assert likelihoods == sorted(likelihoods, reverse=True)
        for most in (1, 7, 20):
            nodes = min(1 + most, largest.num_nodes)
            for smaller in (grown(root, most), grown(root, MAX_NODES, 1 + most)):
                assert smaller.token_ids == largest.token_ids[:nodes]
                assert smaller.parents == largest.parents[:nodes]
                assert contents(smaller)[2] == contents(largest)[2][: nodes - 1]


def test_a_head_is_a_fixed_choice_whatever_the_depth(trace: Trace) -> None:
    parts = whole([trace])
    choices = [*fixed_choices(parts, trace.speculation, (2, 8))]
    assert [(choice.speculators, choice.depth) for choice in choices[::2]] == [
        (("head",), 1),
        (("lookup",), 0),
        (("head", "lookup"), 1),
    ]
    none = play_fixed(parts, trace.speculation, FixedChoice(("lookup",), 0, 8))
    some = play_fixed(parts, trace.speculation, FixedChoice(("head",), 1, 8))
    assert none.draft_passes["head"] == 0
    assert some.draft_passes["head"] > 0
    assert some.nodes <= 7 * some.steps
    best, came = best_fixed(parts, trace.speculation, (2, 8))
    assert best in choices
    assert came is not None
    assert came.seconds <= min(none.seconds, some.seconds)


def test_who_knows_the_text_follows_a_head_further_than_anybody(trace: Trace) -> None:
    parts = whole([trace])
    knowing = play_oracle(parts, trace.speculation)
    _, fixed = best_fixed(parts, trace.speculation)
    assert fixed is not None
    assert knowing.draft_passes["head"] > 0
    assert knowing.seconds < min(
        played(trace, "cost", 1)[1].seconds, fixed.seconds, play_without(parts).seconds
    )
    # A tree of all recorded nodes is deeper than one of the verified nodes.
    small, large = (played(trace, "fixed", 1, whole_trees=each)[1] for each in (False, True))
    assert large.nodes > small.nodes


@pytest.mark.parametrize(
    ("head", "law"), [("all rows see each other", "greedy"), ("the target's output layer", "coupled")]
)
def test_an_oracle_knows_heads_that_go_deeper_than_the_expansion(
    tiny: Tiny, heads: dict[str, AnyHeadModel], head: str, law: str
) -> None:
    trace = recorded(llm_with(tiny, {"head": heads[head]}, expansion="1"), APART, **LAWS[law])
    parts = whole([trace])
    knowing = play_oracle(parts, trace.speculation)
    assert knowing.draft_passes["head"] > 0
    assert knowing.seconds < play_without(parts).seconds


@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"min_tokens": 3}])
def test_trees_that_are_drawn_level_by_level_are_not_recorded(
    tiny: Tiny, heads: dict[str, AnyHeadModel], params: dict[str, Any]
) -> None:
    llm = llm_with(tiny, {"head": heads["the target's output layer"]})
    with pytest.raises(RequestError, match=f"{next(iter(params))} is .* head head draws its trees level by"):
        recorded(llm, APART, temperature=0.8, **params)
    recorded(llm, APART[-1:], **({} if "min_tokens" in params else params), temperature=0, max_tokens=3)


def test_what_a_trace_of_a_head_lacks_is_not_made_up(trace: Trace) -> None:
    head = trace.drafts["head"]
    filtered = [replace(text, params=replace(text.params, top_k=3)) for text in trace.texts]
    bare = replace(head.guesses, roots=np.full_like(head.guesses.roots, NO_SITE))
    assert head.head is not None
    wide = replace(head, head=replace(head.head, causal=False))
    for lacking, options, reason in (
        (replace(trace, texts=tuple(filtered)), {}, "would draw level by level for request 0"),
        (replace(trace, drafts={"head": replace(head, guesses=bare)}), {}, "was not recorded below"),
        (replace(trace, drafts={"head": wide}), {"max_nodes": 4}, "room for 4; replay larger trees"),
    ):
        speculation = replace(trace.speculation, **options)
        with pytest.raises(TraceTooSmallError, match=reason):
            play(whole([lacking]), POLICIES["fixed"](lacking, speculation), speculation=speculation)
