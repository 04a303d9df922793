"""Medusa heads in engines: the hidden state that they read, and their passes."""

from __future__ import annotations

from specinfer.engine.trace import TreeEvent
from specinfer.heads.kinds import AnyHeadModel
from tests.engines import Tiny, engine_of
from tests.unit.engine.heads.head_engines import (
    PROMPTS,
    AnyHead,
    engine,
    hidden_states,
    is_as_likely,
    likelihood_gap,
    normed,
    shaped,
)


def test_a_medusa_head_reads_one_state_and_no_other(
    tiny: Tiny, heads: dict[str, AnyHeadModel], modules: dict[str, AnyHead]
) -> None:
    events: list[TreeEvent] = []
    with engine(tiny, heads["medusa"]) as llm:
        engine_of(llm).listeners.on_tree = events.append
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
            assert is_as_likely(module, text[:end], right_TND, event.tree)
            for name, states_TND in wrong.items():
                assert likelihood_gap(module, text[:end], states_TND, event.tree) > 1e-3, name
        end += 1 + len(event.acceptance.path)
    assert seen > 3
