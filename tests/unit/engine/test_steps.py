"""A step's tree as JSON values, and files of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specinfer.engine.steps import TreeEvent
from specinfer.speculate.decision import PLAIN, Contribution, Decision
from specinfer.tokenizer import Tokenizer
from specinfer.tree import TreeBuilder
from specinfer.verify.coupled import Acceptance
from tests.tiny_models import write_byte_tokenizer

A, B = b"AB"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_byte_tokenizer(tmp_path, 256)
    return Tokenizer.load(tmp_path)


def step(root: int, guess: int, bonus: int) -> TreeEvent:
    builder = TreeBuilder(root=root)
    builder.add(0, guess, "lookup")
    return TreeEvent(2, "r", builder.build(), Acceptance((1,), bonus), {"propose": 0.25})


def test_an_event_says_all_of_its_step(tokenizer: Tokenizer) -> None:
    assert step(A, B, A).to_json(tokenizer) == {
        "step": 2,
        "request_id": "r",
        "token_ids": [A, B],
        "parents": [-1, 0],
        "proposed_by": [[], ["lookup"]],
        "path": [1],
        "next_token": A,
        "likelihoods": [1.0, 0.5],
        "seconds": {"propose": 0.25},
        "texts": ["A", "B"],
        "next_text": "A",
    }


def test_an_event_says_why_where_somebody_asked() -> None:
    decision = Decision((Contribution("lookup", PLAIN),), (1.0,), 0.0, 0.5)
    record = replace(step(A, B, A), decision=decision).to_json()
    assert record["decision"] == decision.to_json()
