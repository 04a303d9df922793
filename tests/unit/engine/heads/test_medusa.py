"""Medusa heads in engines: the hidden state that they read, and their passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specinfer.engine.trace import TreeEvent
from specinfer.heads.kinds import AnyHeadModel
from specinfer.heads.medusa import MedusaModel, MedusaText
from specinfer.heads.runner import HeadRunner
from specinfer.plan import StepPlan
from specinfer.speculate.drafts.head_drafts import MedusaDraft
from tests.engines import Tiny, engine_of
from tests.unit.engine.heads.head_engines import (
    PROMPTS,
    AnyHead,
    engine,
    hidden_states,
    likelihood_gap,
    normed,
    shaped,
)


def test_a_medusa_head_reads_one_state_and_no_other(
    tiny: Tiny, heads: dict[str, AnyHeadModel], modules: dict[str, AnyHead]
) -> None:
    events: list[TreeEvent] = []
    with engine(tiny, heads["medusa"]) as llm:
        engine_of(llm).on_tree = events.append
        (output,) = llm.generate([PROMPTS[0]], shaped(8))
    text, end, module = [*PROMPTS[0], *output.token_ids], len(PROMPTS[0]), modules["medusa"]
    right_TND = hidden_states(tiny, text)
    wrong = {
        "before the norm": right_TND[:, :-1],
        "a layer off": normed(tiny, right_TND[:, :-2]),
        "a token late": right_TND.roll(-1, 0),
        "a token early": right_TND.roll(1, 0),
    }
    seen = 0
    for event in events:
        if event.tree.num_nodes > 1:
            seen += 1
            assert likelihood_gap(module, text[:end], right_TND, event.tree) < 1e-4
            for name, states_TND in wrong.items():
                assert likelihood_gap(module, text[:end], states_TND, event.tree) > 1e-3, name
        end += 1 + len(event.acceptance.path)
    assert seen > 3


def test_a_medusa_step_is_priced_by_a_pass_for_as_many_texts(
    tiny: Tiny, heads: dict[str, AnyHeadModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    unread: list[list[int]] = []
    passes: list[tuple[int, int]] = []  # priced rows, and computed texts
    begin, run = MedusaDraft.begin, MedusaModel.guess

    def noted_begin(draft: MedusaDraft, plan: StepPlan) -> list[int]:
        unread.append(begin(draft, plan))
        return unread[-1]

    def noted_run(model: MedusaModel, texts: Sequence[MedusaText], cache: Any) -> Any:
        passes.append((sum(unread[-1]), len(texts)))
        return run(model, texts, cache)

    monkeypatch.setattr(MedusaDraft, "begin", noted_begin)
    monkeypatch.setattr(MedusaModel, "guess", noted_run)
    with engine(tiny, heads["medusa"]) as llm:
        llm.generate(PROMPTS[2:], shaped(12))
        llm.generate(PROMPTS[:2], shaped(12))
    assert {count for step in unread for count in step} == {0, 2}
    assert {(2, 1), (4, 2)} <= {*passes}
    model = heads["medusa"]
    assert isinstance(model, MedusaModel)
    passes.clear()
    for rows in (1, 2, 3, 4):
        HeadRunner(model, num_blocks=0, block_size=4).probe(rows, every_row=True)
    assert [texts for _, texts in passes] == [1, 1, 2, 2]
