"""Heads know nothing of forms: a text that must have one is the same with a head and without."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specinfer import SamplingParams
from specinfer.heads.checkpoint import AnyHeadModel
from specinfer.speculation_config import NO_SPECULATION
from specinfer.tokenizer import Tokenizer
from tests.engines import Tiny, assert_idle
from tests.unit.engine.heads.head_engines import HEADS, PROMPTS, SAMPLED, engine

pytestmark = pytest.mark.thorough

END = 63
SCHEMA = {"type": "string", "maxLength": 9}
# Parameters, and checks of complete texts. No token is forced, so the head guesses all of them.
FORMS: list[tuple[dict[str, Any], Callable[[str], object]]] = [
    ({"regex": "[0-9 ,]{18}"}, re.compile("[0-9 ,]{18}").fullmatch),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA}}},
        lambda text: len(json.loads(text)) <= 9,
    ),
]


@pytest.fixture(scope="module")
def ending(folder: Path, tiny: Tiny) -> Tiny:
    """The same target with a token that ends texts, which grammars need."""
    tokenizer = Tokenizer.load(folder / "target")
    tokenizer.eos_token_ids = frozenset({END})
    return replace(tiny, tokenizer=tokenizer)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(("asked", "fits"), FORMS, ids=["regex", "schema"])
def test_the_text_keeps_its_form_and_is_that_of_the_target_alone(
    ending: Tiny,
    heads: dict[str, AnyHeadModel],
    name: str,
    asked: dict[str, Any],
    fits: Callable[[str], object],
) -> None:
    params = [
        SamplingParams(max_tokens=24, **asked, **sampling)
        for sampling in ({"temperature": 0}, *({**SAMPLED, "seed": seed} for seed in range(5)))
        for _ in PROMPTS
    ]
    prompts = PROMPTS * (len(params) // len(PROMPTS))
    with engine(ending, heads[name]) as llm:
        alone = llm.variant(replace(llm.config, speculation=NO_SPECULATION)).generate(prompts, params)
        outputs = llm.generate(prompts, params)
        assert_idle(llm)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
    assert all(output.finish_reason == "stop" and fits(output.text) for output in outputs)
    proposed = sum(output.figures.proposed_by.get("draft", 0) for output in outputs)
    accepted = sum(output.figures.accepted_by.get("draft", 0) for output in outputs)
    assert 0 < accepted < proposed
