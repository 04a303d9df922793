"""Small networks that predict hazards of guesses, and what they are worth."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from matching_length.places import LEVELS, Floats, Known

RESAMPLES: Final = 2000  # of texts, for an interval
DECAYS: Final = (1.0, 30.0)  # of weights; the one that is best on texts not learnt from is taken
EPOCHS: Final = 30
PATIENCE: Final = 3  # epochs without a better log-loss
BATCH: Final = 256  # places
RATE: Final = 2e-3  # of learning


@dataclass(frozen=True, slots=True)
class Predictor:
    """A small network in NumPy: features of places -> hazards of each speculator and level."""

    mean: Floats  # [features]
    scale: Floats
    layers: tuple[tuple[Floats, Floats], ...]  # weights [in, out] and biases [out]
    outputs: tuple[str, ...]  # speculators, LEVELS outputs each

    def __call__(self, x: Floats) -> dict[str, Floats]:
        """Hazards by speculator, [places, LEVELS]."""
        h = (x - self.mean) * self.scale
        for number, (weights, biases) in enumerate(self.layers):
            h = (np.maximum(h, 0) if number else h) @ weights + biases
        hazards = (1 / (1 + np.exp(-h))).reshape(len(x), len(self.outputs), LEVELS)
        return {name: hazards[:, i] for i, name in enumerate(self.outputs)}

    @property
    def size(self) -> int:
        """Its weights and biases."""
        return sum(weights.size + biases.size for weights, biases in self.layers)


def untrained(features: int, units: Sequence[int], names: tuple[str, ...]) -> Predictor:
    """A predictor of this shape that knows nothing."""
    sizes = [features, *units, len(names) * LEVELS]
    layers = [
        (np.zeros(pair, dtype=np.float32), np.zeros(pair[1], dtype=np.float32)) for pair in pairwise(sizes)
    ]
    ones = np.ones(features, dtype=np.float32)
    return Predictor(0 * ones, ones, tuple(layers), names)


def fit(known: Known, x: Floats, units: Sequence[int], *, seed: int = 0) -> tuple[Predictor, float]:
    """A predictor of hazards from `x`, and its log-loss on the sixth of the texts that chose among several.

    The loss is that of known hits alone: of a level behind a miss, or that nobody guessed, nothing is known.
    """
    names = tuple(known.hits)
    y = np.concatenate([known.hits[name] for name in names], axis=1)
    held = known.texts % 6 == 0
    mean, scale = x[~held].mean(axis=0), 1 / (x[~held].std(axis=0) + 1e-3)
    data = _Data(
        torch.from_numpy(((x - mean) * scale).astype(np.float32)),
        torch.from_numpy(np.nan_to_num(y).astype(np.float32)),
        torch.from_numpy(~np.isnan(y)),
        torch.from_numpy(np.flatnonzero(~held)),
        torch.from_numpy(np.flatnonzero(held)),
    )
    with torch.random.fork_rng(devices=[]):
        fitted = [_fit(data, units, decay, seed) for decay in DECAYS]
    layers, loss = min(fitted, key=lambda one: one[1])
    return Predictor(mean, scale, layers, names), loss


_Layers = tuple[tuple[Floats, Floats], ...]


@dataclass(frozen=True, slots=True)
class _Data:
    """What a network learns from."""

    x: torch.Tensor  # [places, features]
    y: torch.Tensor  # [places, outputs]
    seen: torch.Tensor  # [places, outputs]: whether y is known
    learning: torch.Tensor  # places
    held: torch.Tensor  # places that tell when to stop

    def loss(self, model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        """The mean log-loss of what is known of these places."""
        logits, seen = model(self.x[rows]), self.seen[rows]
        each = torch.nn.functional.binary_cross_entropy_with_logits(logits, self.y[rows], reduction="none")
        return (each * seen).sum() / seen.sum().clamp(min=1)


def _fit(data: _Data, units: Sequence[int], decay: float, seed: int) -> tuple[_Layers, float]:
    """The layers that were best on the places that are held back, and their loss there."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(*pair) for pair in pairwise([data.x.shape[1], *units, data.y.shape[1]])]
    model = torch.nn.Sequential(*[part for layer in layers for part in (torch.nn.ReLU(), layer)][1:])
    torch.nn.init.zeros_(layers[-1].weight)
    with torch.no_grad():  # it begins as how often each is right
        rates = (data.y * data.seen).sum(0).add(1) / data.seen.sum(0).add(2)
        layers[-1].bias.copy_(torch.logit(rates))
    optimizer = torch.optim.AdamW(
        [
            {"params": [layer.weight for layer in layers], "weight_decay": decay},
            {"params": [layer.bias for layer in layers], "weight_decay": 0.0},
        ],
        lr=RATE,
    )
    kept, least, left = _arrays(layers), np.inf, PATIENCE
    for _ in range(EPOCHS):
        with torch.no_grad():
            now = float(data.loss(model, data.held))
        left = PATIENCE if now < least else left - 1
        if now < least:
            kept, least = _arrays(layers), now
        if not left:
            break
        for rows in torch.split(data.learning[torch.randperm(len(data.learning))], BATCH):
            optimizer.zero_grad()
            torch.autograd.backward(data.loss(model, rows))
            optimizer.step()
    return kept, least


def _arrays(layers: Sequence[torch.nn.Linear]) -> _Layers:
    return tuple((_array(layer.weight.T), _array(layer.bias)) for layer in layers)


def _array(tensor: torch.Tensor) -> Floats:
    return np.array(tensor.detach().numpy(), order="C")


def microseconds(predictor: Predictor, x: Floats, rows: int) -> float:
    """What one prediction for so many requests takes, the least of many."""
    part, least = x[:rows], np.inf
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(20):
            predictor(part)
        least = min(least, (time.perf_counter() - began) / 20)
    return 1e6 * least


def judged(
    hazards: Mapping[str, Floats], test: Known, names: Sequence[str], *, seed: int = 0
) -> dict[str, Any]:
    """Log-loss, AUC and calibration error of hazards by speculator.

    And by how much the log-loss is below that of the counts, with a 95% interval over texts.
    """
    rng = np.random.default_rng(seed)
    of: dict[str, Any] = {}
    for name in names:
        y = test.hits[name]
        seen = ~np.isnan(y) & ~np.isnan(hazards[name])
        p, truth = hazards[name][seen].astype(np.float64), y[seen]
        first = ~np.isnan(y[:, 0]) & ~np.isnan(hazards[name][:, 0])
        of[name] = {
            "hits": int(seen.sum()),
            "log_loss": float(_losses(p, truth).mean()),
            "auc": auc(p, truth),
            "auc_first": auc(hazards[name][first, 0], y[first, 0]),
            "error": calibration_error(p, truth),
        }
        if name in test.counted:
            both = ~np.isnan(y) & ~np.isnan(hazards[name]) & ~np.isnan(test.counted[name])
            texts = np.nonzero(both)[0]
            gain = _losses(test.counted[name][both], y[both]) - _losses(hazards[name][both], y[both])
            of[name]["below_counts"] = interval(gain, test.texts[texts], rng)
    return {"of": of}


def _losses(p: NDArray[Any], truth: NDArray[Any]) -> NDArray[np.float64]:
    p = np.clip(p.astype(np.float64), 1e-4, 1 - 1e-4)
    losses: NDArray[np.float64] = -np.where(truth > 0.5, np.log(p), np.log(1 - p))
    return losses


def auc(p: NDArray[Any], truth: NDArray[Any]) -> float:
    """How often a hit has the larger value than a miss, ties counting half; 0.5 where all are alike."""
    hits, misses = int((truth > 0.5).sum()), int((truth <= 0.5).sum())
    if not hits or not misses:
        return 0.5
    _, where, count = np.unique(p, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[where.reshape(-1)]
    return float((ranks[truth > 0.5].sum() - hits * (hits + 1) / 2) / (hits * misses))


def calibration_error(p: NDArray[Any], truth: NDArray[Any], bins: int = 10) -> float:
    """The mean distance between what is said and what is so, over bins of equal width."""
    if not len(p):
        return 0.0
    where = np.minimum((p * bins).astype(int), bins - 1)
    off = [abs(float((p - truth)[where == i].sum())) for i in range(bins)]
    return sum(off) / len(p)


def interval(
    values: NDArray[np.float64], texts: NDArray[np.int64], rng: np.random.Generator
) -> tuple[float, float, float]:
    """A mean and its 95% interval where texts are drawn anew."""
    numbers, where = np.unique(texts, return_inverse=True)
    if not len(numbers):
        return 0.0, 0.0, 0.0
    sums, counts = np.bincount(where, weights=values), np.bincount(where)
    drawn = rng.integers(len(numbers), size=(RESAMPLES, len(numbers)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(values.mean()), float(low), float(high)
