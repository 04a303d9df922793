"""Rows of logits of every shape there is, and how tokens are chosen in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.kernels.sampling import NativeScan
from specinfer.sampling_params import SamplingParams
from specinfer.verify.scan import SAMPLE_REQUEST, LogitBlock, sample_request
from tests.kernels import kernels

Row = NDArray[np.float32]

SHAPES: dict[str, Callable[[np.random.Generator, int], NDArray[np.float64]]] = {
    "flat": lambda rng, vocab: np.zeros(vocab),
    "wide": lambda rng, vocab: rng.normal(size=vocab),
    "peaked": lambda rng, vocab: rng.normal(size=vocab) * 8,
    "one far ahead": lambda rng, vocab: rng.normal(size=vocab) + 60 * (np.arange(vocab) == vocab // 2),
    "tied": lambda rng, vocab: rng.integers(-3, 3, vocab) / 4,
    "ascending": lambda rng, vocab: np.arange(vocab) / vocab * 9,
    "half banned": lambda rng, vocab: np.where(rng.random(vocab) < 0.5, -np.inf, rng.normal(size=vocab)),
    "most banned": lambda rng, vocab: np.where(np.arange(vocab) % 97 > 0, -np.inf, np.arange(vocab) % 5),
    "far below zero": lambda rng, vocab: rng.normal(size=vocab) * 3 - 1e4,
    "like a model's": lambda rng, vocab: np.round(rng.gumbel(size=vocab) * 2.5 * 8) / 8,  # bf16 has ties
}
SIZES = [1, 2, 15, 16, 17, 257, 1025, 40_003]
PARAMS = {
    "plain": SamplingParams(temperature=0.8),
    "cold": SamplingParams(temperature=0.02),
    "hot": SamplingParams(temperature=1e20),
    "top_k": SamplingParams(temperature=0.9, top_k=40),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "narrow top_p": SamplingParams(temperature=1.5, top_p=0.3),
    "min_p": SamplingParams(temperature=1.2, min_p=0.05),
    "all": SamplingParams(temperature=0.7, top_k=300, top_p=0.9, min_p=0.01),
}


ALL_PARAMS = {
    **PARAMS,
    "greedy": SamplingParams(temperature=0),
    "hot top_p": SamplingParams(temperature=30.0, top_p=0.9),
}


def native_scan() -> NativeScan:
    return kernels("native").scan


def blocks(lines: Sequence[Row]) -> dict[str, LogitBlock]:
    """The same rows in both dtypes, the second cut off and with gaps between them."""
    vocab = len(lines[0])
    wide = np.full((len(lines), vocab + 5), 0x7F7F, dtype=np.uint16)
    wide[:, :vocab] = [(line.view(np.uint32) >> 16).astype(np.uint16) for line in lines]
    return {"float32": LogitBlock(np.stack(lines)), "bfloat16": LogitBlock(wide[:, :vocab])}


def asked(params: Sequence[SamplingParams], seeds: Sequence[int], position: int = 12) -> NDArray[Any]:
    """Requests at one position after another."""
    each = zip(params, seeds, strict=True)
    return np.array([sample_request(p, s, position + i) for i, (p, s) in enumerate(each)], SAMPLE_REQUEST)


def with_threads(answer: Callable[[], Any]) -> list[Any]:
    """The answers with 1, 2 and 8 threads of the library and of PyTorch."""
    library, answers = kernels("native").library, []
    before = library.threads(), torch.get_num_threads()
    try:
        for threads in (1, 2, 8):
            library.set_threads(threads), torch.set_num_threads(threads)
            answers.append(answer())
    finally:
        library.set_threads(before[0]), torch.set_num_threads(before[1])
    return answers


def rows(vocab: int) -> dict[str, Row]:
    rng = np.random.default_rng([vocab, 8])
    return {name: shape(rng, vocab).astype(np.float32) for name, shape in SHAPES.items()}
