"""A step's tree as JSON values, and files of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specinfer.engine.trace import TreeEvent, complaint, read_trace
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
    assert complaint(record) == ""


# Files.

EVENT: dict[str, Any] = {
    "step": 1,
    "token_ids": [5, 6, 7],
    "parents": [-1, 0, 1],
    "proposed_by": [[], ["lookup"], ["lookup", "draft"]],
    "path": [1],
    "next_token": 8,
}


def test_what_an_engine_tells_is_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(step(A, B, A).to_json()) + "\n\n" + json.dumps(EVENT) + "\r\n")
    assert read_trace(file) == file.read_bytes()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_ids": []}, "token_ids is no list of integers"),
        ({"token_ids": [1, True, 3]}, "token_ids is no list of integers"),
        ({"parents": [-1, 0]}, "parents is no list of as many integers as token_ids"),
        ({"parents": [-1, 0, 2]}, "parents is no tree: the first is -1, and each other one an earlier node"),
        ({"parents": [0, 0, 1]}, "parents is no tree: the first is -1, and each other one an earlier node"),
        ({"path": [3]}, "path is no list of nodes"),
        ({"path": [2]}, "path does not lead down the tree from its root"),
        ({"next_token": "x"}, "step and next_token are integers"),
        ({"step": None}, "step and next_token are integers"),
        ({"proposed_by": [[], []]}, "proposed_by is no list of lists of names, one for each node"),
        ({"proposed_by": [[], [1], []]}, "proposed_by is no list of lists of names, one for each node"),
        ({"texts": ["a"]}, "texts has not one value for each node"),
        ({"likelihoods": [1.0, "x", 0.5]}, "likelihoods has not one value for each node"),
        ({"seconds": {"propose": "x"}}, "seconds is no object of numbers"),
        ({"bytes": {"5": 1}}, "bytes is no object of texts"),
        ({"next_text": 1}, "next_text and request_id are texts"),
    ],
)
def test_what_is_wrong_with_a_step_is_said(change: dict[str, Any], said: str) -> None:
    assert complaint(EVENT) == ""
    assert complaint(EVENT | change) == said
