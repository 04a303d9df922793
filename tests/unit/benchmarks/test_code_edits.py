"""The forty code edits of benchmarks/speculation/prediction.py, and what it says of their results."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

SETTINGS = {"model": "small.gguf", "max_tokens": 64}


@pytest.fixture(scope="module")
def bench(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("prediction")


# Digest of all prompts in order; published figures of edits belong to these.
DIGEST = "afff9cf590aab0f970746325e0e2f0a5c7aec86394e456bf71cb64237e0b5e5a"


def test_there_are_forty_edits_of_forty_files(bench: ModuleType) -> None:
    edits = bench.read_edits()
    assert len(edits) == 40
    assert len({edit.file for edit in edits}) == 40
    assert len({edit.source for edit in edits}) == len({edit.ask for edit in edits}) == 40
    assert hashlib.sha256("".join(edit.digest for edit in edits).encode()).hexdigest() == DIGEST


def test_a_file_has_50_to_150_lines(bench: ModuleType) -> None:
    for edit in bench.read_edits():
        assert edit.source.isascii(), edit.file
        assert 50 <= len(edit.source.splitlines()) <= 150, edit.file
        assert edit.source.endswith("\n"), edit.file


def test_a_python_file_parses(bench: ModuleType) -> None:
    found = [edit for edit in bench.read_edits() if edit.file.endswith(".py")]
    assert len(found) == 23
    assert all(ast.parse(edit.source).body for edit in found)


def test_every_request_names_something_in_its_file(bench: ModuleType) -> None:
    for edit in bench.read_edits():
        named = re.findall(r"`([^`]+)`", edit.ask)
        assert any(name in edit.source for name in named), edit.file


def test_the_question_holds_request_and_file(bench: ModuleType) -> None:
    edit = bench.Edit("a.py", "x = 1\n", "Let x be 2.")
    assert edit.prompt == (
        "Let x be 2.\n\nThis is a.py:\n\n```\nx = 1\n```\n\n"
        "Answer with the whole changed file and nothing else."
    )


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("a\nb\nc\n", (0, 0)),
        ("```python\na\nb\nc\n```", (0, 0)),
        ("Here it is:\n\n```\na\nB\nc\n```\nDone.", (1, 1)),
        ("```\na\nb\n", (1, 0)),  # cut short
        ("```\na\nb\nx\ny\nc\n```", (0, 2)),
        ("", (3, 0)),
    ],
)
def test_changed_lines_looks_into_the_fence(
    bench: ModuleType, answer: str, expected: tuple[int, int]
) -> None:
    assert bench.changed_lines("a\nb\nc\n", answer) == expected


def side(tokens: int, steps: int, seconds: float, accepted: int = 0, rejected: int = 0) -> dict[str, Any]:
    return {
        "tokens": tokens + 1,
        "finish_reason": "stop",
        "steps": steps,
        "step_tokens": tokens,
        "seconds": seconds,
        "accepted": accepted,
        "rejected": rejected,
    }


def result(edit: Any, difference: dict[str, Any] | None, steps: int) -> dict[str, Any]:
    return {
        "digest": edit.digest,
        "commit": "0123456789ab",
        "prompt_tokens": 80,
        "plain": side(60, 60, 6.0),
        "predicted": side(60, steps, 2.0, accepted=60 - steps, rejected=steps),
        "difference": difference,
        "lines_removed": 1,
        "lines_added": 2,
    }


def test_the_page_adds_up_steps_and_names_what_differs(bench: ModuleType) -> None:
    edits = [
        bench.Edit("a.py", "x\n", "ask"),
        bench.Edit("b.py", "y\ny\n", "ask"),
        bench.Edit("c.py", "", ""),
    ]
    rounding = {"explained": True, "same_text": False, "text": "at output token 7: 1 became 2"}
    results = {"a.py": result(edits[0], None, 6), "b.py": result(edits[1], rounding, 24)}
    page = "\n".join(bench.page(edits, results, SETTINGS))
    assert "- edits: 2 of 3" in page
    # 120 tokens in 30 steps; 10 and 2.5 by themselves
    assert "**tokens per step: 4.00** over all steps; per edit: mean 6.25, median 6.25, least 2.50" in page
    assert "1 edits at 5 or more" in page
    assert "- tokens/s of 2 edits: 10.0 without, 30.0 with the prediction: 3.00 times" in page
    assert "- prediction tokens: 90 accepted, 30 rejected (75% of the proposed were accepted)" in page
    assert "- identical texts: 1 of 2\n  - b.py, at output token 7: 1 became 2: rounding" in page
    assert "| b.py | 2 | -1 +2 | 61 | stop | 10.0 | 30.0 | 3.00 | 2.50 | 36 | 24 | no |" in page


@pytest.mark.parametrize(
    ("difference", "expected"), [(None, False), ({"explained": True}, False), ({"explained": False}, True)]
)
def test_only_an_unexplained_difference_is_wrong(
    bench: ModuleType, difference: dict[str, bool] | None, expected: bool
) -> None:
    assert bench.unexplained({"difference": difference}) is expected
