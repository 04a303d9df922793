"""Rotary position embeddings (RoFormer), in the half-split form of Hugging Face models.

Shapes: T rows, H head size, F frequencies, one per rotated pair of elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.attention.backend import Rotation
from specinfer.models.positions import DynamicScaling, Llama3Scaling, Rope, YarnScaling

_MIN_POSITIONS: Final = 512  # minimum number of tabulated positions


class RotaryEmbedding:
    """Rotations of any positions on a device; each is a function of its position alone."""

    __slots__ = ("_dynamic", "_exponents_F", "_frequencies_F", "_scale_F", "_theta")

    def __init__(self, rope: Rope, head_dim: int, device: torch.device | None = None) -> None:
        self._theta, self._dynamic = rope.theta, rope.dynamic
        self._exponents_F = _exponents(rope, head_dim).to(device)
        self._frequencies_F = rope_frequencies(rope, head_dim).to(device)
        self._scale_F: Tensor | None = None
        if rope.attention_factor != 1.0:
            scale_F = torch.ones(head_dim // 2)
            scale_F[: len(self._exponents_F)] = rope.attention_factor
            self._scale_F = scale_F.to(device)

    @property
    def device(self) -> torch.device:
        """The device of its rotations."""
        return self._frequencies_F.device

    def at(self, positions: Tensor) -> Rotation:
        """The rotations at these positions, of any shape: cos and sin are [..., H / 2]."""
        places = positions.to(torch.float32)[..., None]
        angles = places * self._frequencies_F
        if self._dynamic is not None:
            angles = self._extended(positions, places, angles, self._dynamic)
        cos, sin = angles.cos(), angles.sin()
        return (
            Rotation(cos, sin)
            if self._scale_F is None
            else Rotation(cos * self._scale_F, sin * self._scale_F)
        )

    def _extended(self, positions: Tensor, places: Tensor, angles: Tensor, scaling: DynamicScaling) -> Tensor:
        """Replace the angles of rows beyond the original context, which have their own theta."""
        size = 2 * len(self._exponents_F)
        length = (positions + 1).clamp(min=scaling.original_context)
        grown = scaling.factor * length / scaling.original_context - (scaling.factor - 1)
        theta = self._theta * grown ** (size / (size - 2))
        own = places * (1.0 / theta[..., None] ** self._exponents_F)
        own = F.pad(own, (0, angles.shape[-1] - size // 2))
        return torch.where(places >= scaling.original_context, own, angles)


def rotations(embeddings: Sequence[RotaryEmbedding], longest: int, positions: int) -> list[Rotation]:
    """For each embedding the rotations of positions 0, 1, ...: at least `positions`, and spare ones.

    A text has at most `longest` positions.
    """
    to_come = 1 << (max(positions, _MIN_POSITIONS) - 1).bit_length()
    count = max(positions, min(to_come, longest))
    return [one.at(torch.arange(count, device=one.device)) for one in embeddings]


def rope_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """The angle per position of each pair of elements, [head_dim / 2], float32; 0 for unrotated pairs."""
    exponents = _exponents(rope, head_dim)
    frequencies = 1.0 / rope.theta**exponents
    if rope.llama3 is not None:
        frequencies = _llama3(frequencies, rope.llama3)
    if rope.yarn is not None:
        frequencies = _yarn(rope, rope.yarn, exponents)
    divisors = rope.divisors if rope.longrope is None else rope.longrope.divisors
    if divisors is not None:
        frequencies = frequencies / torch.tensor(divisors, dtype=torch.float32)
    return F.pad(frequencies / rope.linear_factor, (0, head_dim // 2 - len(frequencies)))


def _exponents(rope: Rope, head_dim: int) -> Tensor:
    """Negated exponents of theta for each frequency, [rotated / 2]."""
    size = head_dim if rope.rotated is None else rope.rotated
    return torch.arange(0, size, 2, dtype=torch.float32) / size


def _yarn(rope: Rope, scaling: YarnScaling, exponents: Tensor) -> Tensor:
    """YaRN: keep frequencies with many turns within the original context, divide the others."""
    size = 2 * len(exponents)

    def dimension(turns: float) -> float:
        """The dimension with that number of turns."""
        return size * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low or 0.001
    divided = ((torch.arange(len(exponents), dtype=torch.float32) - low) / width).clamp(0, 1)
    powers = rope.theta**exponents
    return 1.0 / (scaling.factor * powers) * divided + 1.0 / powers * (1 - divided)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3.1: keep short wavelengths, divide long ones, blend between the two."""
    wavelengths = 2 * math.pi / frequencies
    long = scaling.original_context / scaling.low_freq_factor
    short = scaling.original_context / scaling.high_freq_factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    blend = (scaling.original_context / wavelengths - scaling.low_freq_factor) / span
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelengths > long, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < short, frequencies, scaled)
