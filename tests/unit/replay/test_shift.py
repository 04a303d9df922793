"""How soon a draft is asked again behind a shift to a text that it is good at."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specinfer import SamplingParams
from specinfer.config import DEEPEST, SpeculationConfig
from specinfer.replay.guess_trie import GuessRecorder
from specinfer.replay.replay import Part, cost_policy, play
from specinfer.replay.simulated_engine import PlayedStep
from specinfer.replay.trace import EngineFacts, RecordedDraft, RecordedText, Trace
from specinfer.runtime.cost_curve import CostCurve
from specinfer.speculate.drafts import hindsight
from specinfer.tree import Draw, DrawRule

BAD, GOOD = 400, 200  # places
WRONG = 1  # a token that the text has not
PROMPT = (2, 3, 4, 5)
TARGET = CostCurve((1, 64), (1.0, 1.1))
DRAFTS = (CostCurve((1, 64), (0.2, 0.5)), CostCurve((1, 64), (0.3, 0.4)))
SURE = 0.85  # of each of its guesses


def text_of(seed: int, draft: CostCurve, right: float) -> Trace:
    """A text at whose first places the draft is right in 2 of a hundred, and then as often as that."""
    chance = random.Random(seed)
    text = [chance.randrange(2, 60) for _ in range(BAD + GOOD + DEEPEST)]
    luck = [chance.random() < (0.02 if place < BAD else right) for place in range(len(text))]
    notes = GuessRecorder()
    for place in range(BAD + GOOD):
        path: tuple[int, ...] = ()
        for ahead in range(DEEPEST):
            follows = WRONG not in path and luck[place + ahead]
            guess = text[place + ahead] if follows else WRONG
            drawn = Draw(0, 1, "draft", DrawRule.POINT_MASS, None, SURE, (SURE, 0.05))
            notes.note(path, 4, [guess], [drawn])
            path = (*path, guess)
        notes.close_root()
    length = BAD + GOOD
    return Trace(
        model="target",
        engine=EngineFacts(
            vocab=64, max_context=1024, max_step_tokens=256, block_size=16, prefix_reuse=False, ending=()
        ),
        speculation=SpeculationConfig(drafts=("draft",), ngram=False, max_nodes=32),
        texts=(
            RecordedText(
                PROMPT, tuple(text[:length]), SamplingParams(temperature=0, max_tokens=length), seed=0
            ),
        ),
        drafts={"draft": RecordedDraft("draft", 1024, draft, notes.trie())},
        curve=TARGET,
        stages={},
        likeliest=np.zeros((length, 2), np.float32),
    )


def steps_until_asked(trace: Trace) -> int:
    """Behind the shift, until a draft is asked in 15 of 20 steps; all there are if never."""
    steps: list[PlayedStep] = []
    play([Part([(trace, 0)])], cost_policy(trace, trace.speculation), on_step=steps.append)
    place, asked = 0, list[bool]()
    for step in steps:
        if place >= BAD:
            asked.append(step.passes["draft"] > 0)
        place += sum(len(entry.committed) for entry in step.entries)
    found = (i for i in range(len(asked) - 20) if sum(asked[i : i + 20]) >= 15)
    return next(found, len(asked))


@pytest.mark.parametrize("right", [0.95, 0.7])
@pytest.mark.parametrize("draft", DRAFTS, ids=["cheap", "dear"])
def test_a_draft_that_was_never_right_is_back_at_the_first_look(
    draft: CostCurve, right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = [text_of(seed, draft, right) for seed in range(3)]
    with_hindsight = [steps_until_asked(trace) for trace in traces]
    assert max(with_hindsight) <= 50
    monkeypatch.setattr(hindsight, "MOST_PLACES", 0)
    assert sum(steps_until_asked(trace) for trace in traces) > 1.5 * sum(with_hindsight)
