"""Parts of a row's way through a decoder, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def norm(x: Array, weight: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight)


def rotated(x_NH: Array, position: int, theta: float, size: int | None = None) -> Array:
    """Rotary embeddings of the first `size` elements of each head, by default of all."""
    half = (size or x_NH.shape[-1]) // 2
    angles = position * theta ** (-np.arange(half) / half)
    a, b, rest = np.split(x_NH, [half, 2 * half], axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def attended(queries_NH: Array, seen: Sequence[tuple[Array, Array]], scale: float) -> Array:
    """Return the values that a row's heads read from seen rows, whose keys and values are [K, H]."""
    found = []
    for number, query in enumerate(queries_NH):
        own = number * len(seen[0][0]) // len(queries_NH)
        weights = softmax(np.array([query @ key[own] for key, _ in seen]) * scale)
        found.append(sum(w * value[own] for w, (_, value) in zip(weights, seen, strict=True)))
    return np.concatenate(found)


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max())
    return np.asarray(powers / powers.sum())


def sigmoid(x: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def silu(x: Array) -> Array:
    return x * sigmoid(x)
