from __future__ import annotations

import math

import pytest
import torch

from specinfer.attention.sdpa import rotated
from specinfer.models.layers import RotaryEmbedding, rope_frequencies, rotations
from specinfer.models.positions import DynamicScaling, Llama3Scaling, Rope, YarnScaling


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64)
    plain = rope_frequencies(Rope(10000.0), 8)
    scaled = rope_frequencies(Rope(10000.0, llama3=scaling), 8)
    waves = (2 * math.pi / plain).tolist()  # 6.3, 63, 628, 6283; short is < 16, long is > 64
    assert waves[0] < 16 < waves[1] < 64 < waves[2]
    ratio = (plain / scaled).tolist()
    assert ratio[0] == pytest.approx(1)
    assert 1 < ratio[1] < 8
    assert ratio[2:] == pytest.approx([8, 8])


def test_a_head_is_rotated_by_complex_multiplication():
    """(a, b) at distance H/2 is the number a + bi, rotated by position * frequency."""
    frequencies = rope_frequencies(Rope(100.0), 8)
    positions = torch.tensor([0, 3, 250])
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    want = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(1j * positions[:, None, None] * frequencies)
    got = rotated(x, None, 0.0, RotaryEmbedding(Rope(100.0), 8).at(positions))
    torch.testing.assert_close(got, torch.cat((want.real, want.imag), -1), atol=1e-4, rtol=0)
    torch.testing.assert_close(got[0], x[0])


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


def test_dynamic_rotations_are_those_of_the_length_that_ends_there() -> None:
    """theta becomes theta * (factor * length / original - (factor - 1)) ** (size / (size - 2))."""
    rope = RotaryEmbedding(Rope(100.0, dynamic=DynamicScaling(2.0, 10)), 4)
    positions = torch.tensor([[3, 9], [10, 24]])
    plain = RotaryEmbedding(Rope(100.0), 4).at(positions)
    made = rope.at(positions)
    assert torch.equal(made.cos[0], plain.cos[0])
    for column, grown in ((0, 1.2), (1, 4.0)):  # lengths 11 and 25
        own = RotaryEmbedding(Rope(100.0 * grown**2), 4).at(positions[1, column])
        torch.testing.assert_close(made.cos[1, column], own.cos)
        torch.testing.assert_close(made.sin[1, column], own.sin)
