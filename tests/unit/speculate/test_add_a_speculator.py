"""The code of docs/add_a_speculator.md, run: as it stands on the page, and in an engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specinfer.config import SchedulerConfig, SpeculationConfig
from specinfer.engine.admission import Admission
from specinfer.engine.engine import Engine
from specinfer.engine.kv_blocks import BlockPool
from specinfer.engine.scheduler import Scheduler
from specinfer.request import Request, RequestOutput
from specinfer.runtime.runner import ModelRunner
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.limits import SpeculationLimits
from specinfer.speculate.policy import FixedPolicy
from specinfer.speculate.speculator import Speculator
from specinfer.verify.pairs import Verifier
from tests.engines import Tiny, slow_generate, write_tiny
from tests.plans import entry, outcome, plan

PAGE = Path(__file__).parents[3] / "docs" / "add_a_speculator.md"


def page() -> dict[str, Any]:
    """The names the page's code blocks define, run in order as one program."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
    return names


def test_the_pages_own_test_passes() -> None:
    test: Callable[[Any], None] = page()["test_the_most_frequent_tokens_are_guessed"]
    test(entry, plan)


def test_it_keeps_the_budget_counts_what_is_committed_and_forgets() -> None:
    speculator: Speculator = page()["FrequentTokens"](branches=2)
    text = [3, 3, 4, 5, 5, 5]
    assert speculator.propose(plan(entry(text, max_nodes=2)))[0].token_ids == (5, 5)
    assert speculator.propose(plan(entry(text, max_depth=0)))[0].token_ids == (5,)
    speculator.observe([outcome(4, 4, 4)])
    assert speculator.propose(plan(entry([*text, 4, 4, 4])))[0].token_ids == (4, 4, 5)
    speculator.observe([outcome(finished=True)])
    assert speculator.propose(plan(entry([9])))[0].token_ids == (9, 9)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=16, max_context=64)


@pytest.mark.parametrize("verifier", list(Verifier))
def test_in_an_engine_it_is_believed_sometimes_and_the_text_is_the_targets(
    tiny: Tiny, verifier: Verifier
) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    prompt = (1, 2, 3, 2)
    output = answer(tiny, page()["FrequentTokens"](), verifier, Request("r", prompt, params, seed=0))
    assert list(output.token_ids) == slow_generate(tiny.target, prompt, params)
    assert 0 < output.figures.accepted_tokens < output.figures.drafted_tokens
    assert output.figures.credit == {"frequent": output.figures.accepted_tokens}


def answer(tiny: Tiny, speculator: Speculator, verifier: Verifier, request: Request) -> RequestOutput:
    pool = BlockPool(num_blocks=8, block_size=16)
    engine = Engine(
        target=ModelRunner(tiny.target, num_blocks=8, block_size=16),
        speculators=Ensemble([speculator], vocab=tiny.target.config.vocab_size, policy=FixedPolicy()),
        tokenizer=tiny.tokenizer,
        admission=Admission(
            tiny.tokenizer,
            SpeculationLimits(SpeculationConfig(max_nodes=4), [speculator]),
            vocab=tiny.target.config.vocab_size,
            max_context=64,
            capacity=128,
        ),
        scheduler=Scheduler(SchedulerConfig(), pool, tree_nodes=4, max_context=64),
        verifier=verifier,
    )
    engine.add(engine.admission.admit(request))
    while True:
        for output in engine.step():
            if output.finished:
                engine.check_integrity()
                return output
