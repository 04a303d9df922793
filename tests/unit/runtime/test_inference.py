"""Passes without gradients, entered once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from specinfer.runtime.flight import inference


def test_nothing_computed_inside_has_a_gradient_and_the_mode_ends_with_the_call() -> None:
    weight = torch.ones(2, requires_grad=True)

    @inference
    def doubled(x: torch.Tensor, *, times: int) -> torch.Tensor:
        """Return its output."""
        return times * x

    made = doubled(weight, times=2)
    assert made.tolist() == [2.0, 2.0]
    assert not made.requires_grad
    assert not torch.is_inference_mode_enabled()
    assert (2 * weight).requires_grad
    assert doubled.__doc__ == "Return its output."


def test_it_is_entered_by_the_outermost_call_and_left_where_one_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered: list[str] = []
    enter = torch.inference_mode

    @contextmanager
    def counted() -> Iterator[None]:
        entered.append("in")
        with enter():
            yield

    monkeypatch.setattr(torch, "inference_mode", counted)

    @inference
    def inner() -> bool:
        return torch.is_inference_mode_enabled()

    @inference
    def outer() -> list[bool]:
        return [inner(), inner(), torch.is_inference_mode_enabled()]

    assert outer() == [True] * 3
    assert entered == ["in"]

    @inference
    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    assert not torch.is_inference_mode_enabled()
