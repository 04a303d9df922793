"""Tests whether accepted lengths can be predicted before drawing, by input and by size of the predictor.

    python -m benchmarks.speculation.matching_length --model TARGET --quantization int8 \
        --train TRACE... --held-out TRACE... --out RESULT.md

SpecInfer's first version (arXiv 2305.09781v1) runs a predictor before a draft. From the target's features at
the root it predicts the number of accepted tokens of each speculator. Here predictors are trained on traces
(`specinfer trace record`) and compared with acceptance counts of each level:

    hazard      P(level d of a speculator's proposal holds the next token, given that the levels above did)
    inputs      cheap: known facts of the last steps; final: the target's last hidden state known at the
                root, in the row that chose the root; taps: those of two earlier layers
    predictors  linear, and MLPs of 16, 64, 256 and 64+64 units, one output per speculator and level

Held-out texts, whose prompts are not in the training data, give log-loss, AUC, and the reduction of log-loss
relative to the counts, with a 95% interval over texts.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.study import REQUIRED, Study, parser, row, run, settings_of
from specinfer import LLM
from specinfer.models.language_model import LanguageModel
from specinfer.replay.oracle import correct_counts
from specinfer.replay.replay import Phase
from specinfer.replay.trace import Trace, read_trace
from specinfer.runtime.batch import chain_rows
from specinfer.runtime.runner import ModelRunner

SIZES: Final[dict[str, tuple[int, ...]]] = {
    "linear": (),
    "16": (16,),
    "64": (64,),
    "256": (256,),
    "64+64": (64, 64),
}  # hidden units
INPUTS: Final = ("cheap", "final", "cheap + final", "cheap + final + taps")
LEVELS: Final = 5  # predicted levels of a proposal
FADES: Final = (4.0, 16.0)  # tokens over which the hits of a text are averaged
COUNTED: Final = 30.0  # outcomes per level in the counts
CHUNK: Final = 128  # rows per pass over a text
EPOCHS: Final = 30
PATIENCE: Final = 3  # epochs without a lower log-loss
BATCH: Final = 256  # positions
RATE: Final = 2e-3  # learning rate
DECAYS: Final = (1.0, 30.0)  # weight decays; the best on held-back texts is used
RESAMPLES: Final = 2000  # resamples of texts per interval

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Known:
    """Facts about the positions of some texts, without each text's first, and the outcomes of proposals."""

    texts: NDArray[np.int64]  # [places]: the text's number
    cheap: Floats  # [places, features]
    hidden: Floats  # [places, taps, D], in the row that chose the root; the final one last
    hits: Floats  # [places, speculators, LEVELS]: 1 hit, 0 miss, NaN below a miss and after the text
    counted: Floats  # the same: predictions of the counts

    def inputs(self, name: str) -> Floats:
        """Return a predictor's inputs at each position, [places, features]."""
        parts = {
            "cheap": self.cheap,
            "final": self.hidden[:, -1],
            "taps": self.hidden[:, :-1].reshape(len(self.hidden), -1),
        }
        return np.concatenate([parts[part] for part in name.split(" + ")], axis=1)


def main() -> None:
    options = parser(__doc__, model=REQUIRED, quantization="none")
    traces: dict[str, Any] = {"nargs": "+", "type": Path, "metavar": "TRACE", "required": True}
    options.add_argument("--train", help="traces for training", **traces)
    options.add_argument("--held-out", help="held-out traces", **traces)
    args = options.parse_args()
    study = Study("matching-length", args.out, settings_of(args))
    wanted = [f"{inputs}, {size}" for inputs in INPUTS for size in SIZES]
    if missing := [name for name in wanted if name not in study.cells]:
        train, test, names = places_of(args)
        rates = np.nanmean(test.hits[:, :, 0], axis=0).tolist()
        study.keep(
            "data",
            {"places": [len(train.texts), len(test.texts)], "first": dict(zip(names, rates, strict=True))},
        )
        study.keep("counts", judged(test.counted, test, names))
        for name in missing:
            inputs, size = name.rsplit(", ", 1)
            predict = fit(train, train.inputs(inputs), SIZES[size])
            study.keep(name, judged(predict(test.inputs(inputs)), test, names))
            print(name, study.cells[name], flush=True)
    study.write(page(study.cells, args))


def places_of(args: argparse.Namespace) -> tuple[Known, Known, list[str]]:
    """Return the training positions, the held-out positions with other prompts, and all speculators."""
    learnt, held_out = ([read_trace(path) for path in paths] for paths in (args.train, args.held_out))
    asked = {text.prompt for trace in held_out for text in trace.texts}
    reaches = [
        correct_counts([Phase([(one, i) for i in range(len(one.texts))])]) for one in (*learnt, *held_out)
    ]
    names = sorted({name for of in reaches for of_text in of for at in of_text.values() for name in at})
    with LLM(args.model, quantization=args.quantization, max_batch_size=1) as llm:
        found = [
            known(
                trace,
                matching_lengths(trace, reach, names),
                hidden_states(llm.models.target, trace, llm.config.cache.block_size),
                without=asked if number < len(learnt) else (),
            )
            for number, (trace, reach) in enumerate(zip((*learnt, *held_out), reaches, strict=True))
        ]
    return joined(found[: len(learnt)]), joined(found[len(learnt) :]), names


def matching_lengths(
    trace: Trace, reaches: Sequence[Mapping[int, Mapping[str, int]]], names: Sequence[str]
) -> NDArray[np.int64]:
    """Return the accepted tokens of each speculator's proposal at each position, [places, names]."""
    return np.array(
        [
            [reaches[i].get(len(text.prompt) + place, {}).get(name, 0) for name in names]
            for i, text in enumerate(trace.texts)
            for place in range(len(text.output))
        ]
    )


def hidden_states(target: LanguageModel, trace: Trace, block_size: int) -> Floats:
    """Return the inputs of a middle and a late layer and the last output at every position, [places, 3,
    D].

    Rows are those that chose the root, each divided by its root mean square; zeros at a text's first
    position.
    """
    layers = target.config.num_layers
    taps = (layers // 2, max(0, layers - 4), layers)
    found: list[Floats] = []
    for text in trace.texts:
        ids = [*text.prompt, *text.output][:-2]
        blocks = -(-len(ids) // block_size) + 1
        runner = ModelRunner(target, num_blocks=blocks, block_size=block_size)
        rows: list[torch.Tensor] = []
        for start in range(0, len(ids), CHUNK):
            part = chain_rows(ids[start : start + CHUNK], start, range(blocks), logits=False)
            rows.append(runner.launch([part], taps=taps).tapped(taps))
        states = np.zeros((len(text.output), len(taps), target.config.hidden_size), dtype=np.float32)
        states[1:] = torch.cat(rows)[len(text.prompt) - 1 :].float().numpy()
        found.append(states / np.sqrt(np.square(states).mean(axis=-1, keepdims=True) + 1e-6))
    return np.concatenate(found)


def known(
    trace: Trace, lengths: NDArray[np.int64], states: Floats, without: Collection[tuple[int, ...]] = ()
) -> Known:
    """Return the facts of a trace's positions, without texts' first positions and prompts in `without`."""
    place = np.concatenate([np.arange(len(text.output)) for text in trace.texts])
    texts = np.repeat(np.arange(len(trace.texts)), np.diff(trace.starts))
    left = np.array([len(text.output) for text in trace.texts])[texts] - place
    levels = np.arange(LEVELS)
    hits = (lengths[:, :, None] > levels).astype(np.float32)
    reached = (lengths[:, :, None] >= levels) & (left[:, None, None] > levels)
    hits[~reached] = np.nan
    kept = (place > 0) & np.array([text.prompt not in without for text in trace.texts])[texts]
    counted = counts(hits)
    cheap = cheap_features(trace, hits, counted, place)
    return Known(texts[kept], cheap[kept], states[kept], hits[kept], counted[kept])


def cheap_features(trace: Trace, hits: Floats, counted: Floats, place: NDArray[np.int64]) -> Floats:
    """Return facts of each position that need no further target pass, [places, features].

    These are margin and entropy of the token before the root, the speculators with hits there, and hit rates
    over the last tokens. Hits count even for speculators that did not run, which is more than a policy has.
    The counts are included, so no predictor has less than they have.
    """
    best = np.clip(np.nan_to_num(trace.likeliest.astype(np.float64), nan=-1.0, neginf=-30.0), -30, 0)
    first, second = np.exp(best).T
    rest = np.clip(1 - first - second, 1e-9, 1)
    entropy = -sum(p * np.log(np.clip(p, 1e-9, 1)) for p in (first, second, rest))
    columns = [_before(np.clip(best[:, 0] - best[:, 1], 0, 15), place), _before(entropy, place)]
    columns.append(np.log1p(place))
    for speculator in range(hits.shape[1]):
        right = np.nan_to_num(hits[:, speculator, 0].astype(np.float64), nan=0.5)
        columns += [_before(right, place), *(_faded(right, place, tokens) for tokens in FADES)]
        rate = np.clip(counted[:, speculator, 0], 0.01, 0.99)
        columns.append(np.log(rate / (1 - rate)))
    return np.stack(columns, axis=1).astype(np.float32)


def _before(values: NDArray[Any], place: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return values one position earlier in the same text; 0 at its first."""
    return np.where(place > 0, np.roll(values, 1), 0.0)


def _faded(values: NDArray[Any], place: NDArray[np.int64], tokens: float) -> NDArray[np.float64]:
    """Return the fading mean over about `tokens` tokens of the same text."""
    found, mean = np.empty(len(values)), 0.5
    for i, value in enumerate(values):
        mean = 0.5 if place[i] == 0 else mean
        found[i] = mean
        mean += (value - mean) / tokens
    return found


def counts(hits: Floats) -> Floats:
    """Return each hit's prediction by fading counts of its level, updated in order."""
    rates, found = np.full(hits.shape[1:], 0.7), np.empty_like(hits)
    for place, of_place in enumerate(hits):
        found[place] = rates
        rates += np.where(np.isnan(of_place), 0.0, (of_place - rates) / COUNTED)
    return found


def joined(parts: Sequence[Known]) -> Known:
    """Join the positions of several traces, with texts renumbered."""
    starts = np.cumsum([0, *(part.texts.max(initial=-1) + 1 for part in parts)])
    return Known(
        np.concatenate([part.texts + start for part, start in zip(parts, starts, strict=False)]),
        *(np.concatenate([getattr(part, name) for part in parts]) for name in Known.__slots__[1:]),
    )


class Predictor:
    """A small network from features to hazards of each speculator and level."""

    def __init__(self, x: Floats, units: Sequence[int], y: torch.Tensor, seen: torch.Tensor) -> None:
        """Initialize the output biases with the mean of each of `y`, [places, outputs], where it was seen."""
        self.shape = (-1, y.shape[1] // LEVELS, LEVELS)
        self._mean, self._scale = x.mean(axis=0), 1 / (x.std(axis=0) + 1e-3)
        layers = [torch.nn.Linear(*pair) for pair in pairwise([x.shape[1], *units, y.shape[1]])]
        self.net = torch.nn.Sequential(*[part for layer in layers for part in (torch.nn.ReLU(), layer)][1:])
        torch.nn.init.zeros_(layers[-1].weight)
        with torch.no_grad():
            layers[-1].bias.copy_(torch.logit((y * seen).sum(0).add(1) / seen.sum(0).add(2)))

    def scaled(self, x: Floats) -> torch.Tensor:
        """Return features scaled for the network."""
        return torch.from_numpy(((x - self._mean) * self._scale).astype(np.float32))

    @torch.no_grad()
    def __call__(self, x: Floats) -> Floats:
        """Return hazards, [places, speculators, LEVELS]."""
        hazards: Floats = torch.sigmoid(self.net(self.scaled(x))).numpy().reshape(self.shape)
        return hazards


def fit(known: Known, x: Floats, units: Sequence[int]) -> Predictor:
    """Return the best predictor from `x` on a held-back sixth of the texts.

    The loss counts only known hits, as a level below a miss is unknown.
    """
    with torch.random.fork_rng(devices=[]):
        fitted = [_fit(known, x, units, decay) for decay in DECAYS]
    return min(fitted, key=lambda one: one[1])[0]


def _fit(known: Known, x: Floats, units: Sequence[int], decay: float) -> tuple[Predictor, float]:
    """Return the predictor with this weight decay, and its loss on the held-back texts."""
    flat = known.hits.reshape(len(known.hits), -1)
    y, seen = torch.from_numpy(np.nan_to_num(flat)), torch.from_numpy(~np.isnan(flat))
    held = torch.from_numpy(np.flatnonzero(known.texts % 6 == 0))
    learning = torch.from_numpy(np.flatnonzero(known.texts % 6 != 0))
    torch.manual_seed(0)
    predictor = Predictor(x[learning.numpy()], units, y[learning], seen[learning])
    net, inputs = predictor.net, predictor.scaled(x)
    weights = [one for one in net.parameters() if one.ndim > 1]
    biases = [one for one in net.parameters() if one.ndim == 1]
    groups = [{"params": weights, "weight_decay": decay}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE)

    def loss(rows: torch.Tensor) -> torch.Tensor:
        each = torch.nn.functional.binary_cross_entropy_with_logits(
            net(inputs[rows]), y[rows], reduction="none"
        )
        return (each * seen[rows]).sum() / seen[rows].sum().clamp(min=1)

    kept, least, patience = net.state_dict(), np.inf, PATIENCE
    for _ in range(EPOCHS):
        with torch.no_grad():
            now = float(loss(held))
        patience = PATIENCE if now < least else patience - 1
        if now < least:
            kept, least = {name: value.clone() for name, value in net.state_dict().items()}, now
        if not patience:
            break
        for rows in torch.split(learning[torch.randperm(len(learning))], BATCH):
            optimizer.zero_grad()
            torch.autograd.backward(loss(rows))
            optimizer.step()
    net.load_state_dict(kept)
    return predictor, least


def judged(hazards: Floats, test: Known, names: Sequence[str]) -> dict[str, Any]:
    """Return log-loss, AUC and the log-loss reduction relative to the counts, with interval, by
    speculator.
    """
    of: dict[str, Any] = {}
    for i, name in enumerate(names):
        y, seen = test.hits[:, i], ~np.isnan(test.hits[:, i])
        p, truth = hazards[:, i][seen], y[seen]
        gain = _losses(test.counted[:, i][seen], truth) - _losses(p, truth)
        texts = np.broadcast_to(test.texts[:, None], seen.shape)[seen]
        of[name] = {
            "log_loss": float(_losses(p, truth).mean()),
            "auc": auc(p, truth),
            "below_counts": interval(gain, texts),
        }
    return of


def _losses(p: NDArray[Any], truth: NDArray[Any]) -> NDArray[np.float64]:
    p = np.clip(p.astype(np.float64), 1e-4, 1 - 1e-4)
    losses: NDArray[np.float64] = -np.where(truth > 0.5, np.log(p), np.log(1 - p))
    return losses


def auc(p: NDArray[Any], truth: NDArray[Any]) -> float:
    """Return the AUC: how often a hit has a larger value than a miss, with ties as half; 0.5 without both."""
    hits, misses = int((truth > 0.5).sum()), int((truth <= 0.5).sum())
    if not hits or not misses:
        return 0.5
    _, where, count = np.unique(p, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[where.reshape(-1)]
    return float((ranks[truth > 0.5].sum() - hits * (hits + 1) / 2) / (hits * misses))


def interval(values: NDArray[np.float64], texts: NDArray[np.int64]) -> tuple[float, float, float]:
    """Return a mean and its 95% bootstrap interval over texts."""
    numbers, where = np.unique(texts, return_inverse=True)
    sums, count = np.bincount(where, weights=values), np.bincount(where)
    drawn = np.random.default_rng(0).integers(len(numbers), size=(RESAMPLES, len(numbers)))
    low, high = np.quantile(sums[drawn].sum(1) / count[drawn].sum(1), (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def page(cells: Mapping[str, Any], args: argparse.Namespace) -> list[str]:
    """Return Markdown: a table of predictors per speculator."""
    data = cells["data"]
    lines = [
        f"# Matching lengths, predicted before anything is drawn: {Path(args.model).stem}",
        "",
        f"Trained on {data['places'][0]} places of texts, tried on {data['places'][1]} of other prompts. "
        f"Log-loss and AUC are those of the {LEVELS} levels that were reached; in brackets by how much the "
        "log-loss is below that of fading counts of each level, with a 95% interval over texts.",
    ]
    for name, rate in data["first"].items():
        lines += ["", f"## {name}, right at the first level: {rate:.2f}", ""]
        lines += [row("inputs, predictor", "log-loss", "AUC"), row(*["---"] * 3)]
        for shown, of in cells.items():
            if shown != "data":
                mean, low, high = of[name]["below_counts"]
                below = "" if shown == "counts" else f" ({mean:+.4f}, {low:+.4f} to {high:+.4f})"
                lines.append(row(shown, f"{of[name]['log_loss']:.4f}{below}", f"{of[name]['auc']:.3f}"))
    return lines


if __name__ == "__main__":
    run(main)
