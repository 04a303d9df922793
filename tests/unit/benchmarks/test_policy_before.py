"""Which texts are played against the policy before, and what the page says of them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.unit.benchmarks.conftest import Run


@pytest.mark.parametrize("times", [1, 3])
def test_each_text_comes_so_often_in_a_row(
    script: Callable[[str], ModuleType], run: Run, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    module = script("policy_before")
    orders: list[list[tuple[str, int]]] = []

    def played(order: list[tuple[str, int]], traces: Any) -> dict[str, Any]:
        orders.append(order)
        return {"texts": len(order), "tokens": 7, **dict.fromkeys(("before", "now", "over"), (1.0, 0.5, 2.0))}

    trace = SimpleNamespace(texts=["one", "two"], engine="the same")
    monkeypatch.setattr(module, "played", played)
    monkeypatch.setattr(module, "read_trace", lambda path: trace)
    page = run(module, "--traces", "chat-00.npz", "code-00.npz", "--times", str(times))
    assert orders[0] == [("chat-00", 0)] * times + [("chat-00", 1)] * times
    in_turns = [(name, number) for number in (0, 1) for name in ("chat-00", "code-00")]
    assert orders[2] == [text for text in in_turns for _ in range(times)]
    assert any("Each text comes 3 times in a row." in line for line in page) is (times == 3)
    assert f"| all in turns | {4 * times} | 7 | 1.000 [0.500, 2.000] |" in "".join(page)
