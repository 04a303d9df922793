"""Passes without gradients, entered once."""

from __future__ import annotations

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
