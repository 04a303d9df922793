"""Rotary position embeddings (RoFormer), the half-split form all Hugging Face models use.

Shapes: T rows, H head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from specinfer.attention.backend import Rotation
from specinfer.models.config import Llama3Scaling, Rope

_FEWEST: Final = 512  # positions that rotations are made of at once


def rotation(positions_T: Tensor, frequencies: Tensor) -> Rotation:
    """The rotations of one pass; `frequencies` is the angle per position of each pair, [H / 2]."""
    angles = positions_T.to(torch.float32)[:, None] * frequencies
    return Rotation(angles.cos(), angles.sin())


def rotations(frequencies: Sequence[Tensor], longest: int, positions: int) -> list[Rotation]:
    """For each of these frequencies the rotations of positions 0, 1, ...: so many, and some that are to come.

    A text has `longest` positions at most.
    """
    to_come = 1 << (max(positions, _FEWEST) - 1).bit_length()
    all_T = torch.arange(max(positions, min(to_come, longest)), device=frequencies[0].device)
    return [rotation(all_T, one) for one in frequencies]


def rope_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """The angle per position of each pair of dimensions, [head_dim / 2], float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.llama3 is not None:
        frequencies = _llama3(frequencies, rope.llama3)
    if rope.divisors is not None:
        frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    return frequencies / rope.linear_factor


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
