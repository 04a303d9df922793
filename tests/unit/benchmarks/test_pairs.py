"""benchmarks/machines/pairs.py: the page, and the order of the ways."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

WAYS = ["quantization=int8", "quantization=int4"]


@pytest.fixture(scope="module")
def pairs(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("pairs")


def cell(plain: float, lookup: float, token: int = 5) -> dict[str, Any]:
    return {
        "plain|1": {"speed": plain, "tokens": [[5, 6]]},
        "lookup|1": {"speed": lookup, "tokens": [[token, 6]]},
    }


def test_ratios_are_those_of_a_round_and_a_different_text_is_shown(pairs: ModuleType, tmp_path: Path) -> None:
    settings = {"model": "small", "way": WAYS, "batch_sizes": [1], "limit": 3, "max_tokens": 2}
    study = pairs.Study("pairs", tmp_path / "page.md", settings)
    for way, seconds in zip(WAYS, (4.0, 1.25), strict=True):
        study.keep(f"load|{way}", {"first": seconds, "later": 0.5})
    for number, speeds in enumerate(((10, 20), (20, 30), (40, 40))):
        first, second = speeds
        study.keep(f"round|{number}", {WAYS[0]: cell(first, 50), WAYS[1]: cell(second, 50, token=9)})
    lines = pairs.page(study)
    assert "| `quantization=int4` | 1.2 | 0.5 |" in lines
    assert "| `quantization=int8` | plain | 1 | 20.0 [10.0 - 40.0] | 1.000 [1.000 - 1.000] |  |" in lines
    assert "| `quantization=int4` | plain | 1 | 30.0 [20.0 - 40.0] | 1.500 [1.000 - 2.000] |  |" in lines
    assert "| `quantization=int8` | lookup | 1 | 50.0 [50.0 - 50.0] | 1.000 [1.000 - 1.000] | yes |" in lines
    assert "| `quantization=int4` | lookup | 1 | 50.0 [50.0 - 50.0] | 1.000 [1.000 - 1.000] | NO |" in lines


def test_every_way_answers_in_turn_with_its_options(
    pairs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(pairs, "LLM", lambda model, **options: opened.append((model, options)))
    args = Namespace(model="small", threads=2, batch_sizes=[1, 16])
    pairs.load(args, "quantization=int8,sum_parts=8")
    assert opened[0][0] == "small"
    assert opened[0][1].items() >= {"quantization": "int8", "sum_parts": 8, "max_batch_size": 16}.items()

    order: list[str] = []
    monkeypatch.setattr(pairs, "questions_of", lambda dataset, limit: ["a"])
    monkeypatch.setattr(pairs, "GUESSES", {"plain": lambda llm: llm})
    monkeypatch.setattr(pairs, "answers", lambda llm, questions, size, max_tokens: order.append(llm.name))

    class Opened:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> Opened:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    asked = Namespace(dataset=[], limit=1, max_tokens=1, batch_sizes=[1])
    pairs.answer_all(asked, {"one": Opened("one"), "two": Opened("two")}, backwards=True)
    assert order == ["two", "one"]
