"""Tables of rotations; tests/parity compares the rotations with transformers'."""

from __future__ import annotations

import pytest
import torch

from specinfer.models.layers import RotaryEmbedding, rope_frequencies, rotations
from specinfer.models.positions import Rope, YarnScaling


def test_a_text_has_no_rotations_behind_its_longest() -> None:
    one, other = (RotaryEmbedding(Rope(theta), 4) for theta in (1.0, 16.0))
    for longest, positions, made in ((4096, 3, 512), (4096, 513, 1024), (700, 513, 700), (100, 3, 100)):
        [rope] = rotations([one], longest, positions)
        assert len(rope.cos) == len(rope.sin) == made
    ropes = rotations([one, other], 700, 701)
    assert [len(rope.cos) for rope in ropes] == [701, 701], "what is asked for, there is"
    frequencies = rope_frequencies(Rope(16.0), 4)
    assert torch.equal(ropes[1].cos[:300], torch.cos(torch.arange(300.0)[:, None] * frequencies))


def test_what_is_not_rotated_stays_to_the_bit() -> None:
    """Four of eight elements are: pairs (0, 4) and (1, 5)."""
    scaling = YarnScaling(4.0, 16, attention_factor=1.25)
    rope = RotaryEmbedding(Rope(100.0, rotated=4, yarn=scaling), 8).at(torch.tensor([5, 100_000]))
    assert torch.equal(rope.cos[:, 2:], torch.ones(2, 2))
    assert torch.equal(rope.sin[:, 2:], torch.zeros(2, 2))
    assert (rope.cos**2 + rope.sin**2)[:, :2].flatten().tolist() == pytest.approx([1.5625] * 4)
