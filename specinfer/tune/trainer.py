"""The trainer: steps of gradient descent over blocks of the collected texts, until the time is over.

A step's batch is a function of its number, so a run that is resumed sees what it would have seen. Blocks
are as deep as a die says, each level .6 times as often as the one before it: deep levels count only where all
before them are right, and what is not computed costs nothing. What is measured and exported is an average
of the weights over the last few hundred steps, which is better than any of them and makes the end of a run
as good as its middle; over the last half of the time the learning rate falls besides.

Where the CPU has instructions for it, products are of bfloat16 numbers and put out such, and so is what lies
between an MLP's. All else is of float32: weights, their average and moments, norms, rotations, softmaxes, the
residual stream, losses.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import reduce
from typing import Final, TypeVar

import torch
from torch import Tensor

from specinfer.errors import TuneError
from specinfer.tune.dataset import TrainingSet, TunedText, anchors_of, block_batch
from specinfer.tune.draft import TrainableDraft, entries_of
from specinfer.tune.losses import LOSSES, GuessBatch, Loss, Shortlist, shortlists, summed_losses

# Names of glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_KEPT: Final = 1 << 30  # bytes
_LARGEST: Final = (1 << 30, 1 << 25)  # bytes of a block; older versions of glibc take no more than the latter
_Given = TypeVar("_Given")
_Made = TypeVar("_Made")
_WARM_UP: Final = 30  # steps
_RATE: Final = 1e-3  # of learning, for rows of at most ...
_WIDTH: Final = 576  # ... so many values
_COOLING: Final = 0.5  # of the time, at its end
_COLDEST: Final = 0.03  # of the rate
_DEEPER: Final = 0.6  # chance that a block that is l levels deep is l + 1
_NORM: Final = 1.0  # of a step's gradient at most
_MEMORY: Final = 0.995  # of the average, for a step
_REMEMBERED: Final = 4  # one step in so many goes into it
_TRIED_ON: Final = 64  # anchors of a text, where a loss is tried
_LEAST: Final = 1e-6  # of all that places count for


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How a draft is trained, of whichever kind."""

    loss: Loss = "hybrid"
    rate: float | None = None  # of learning; None: by the width of the draft
    texts: int = 4  # of a step
    shortlist: int = 768  # tokens of the draft's that a step computes
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise TuneError(f"loss is {self.loss!r}; allowed: {', '.join(LOSSES)}")


@dataclass(slots=True)
class TrainState:
    """How far a training has come; all of it that is not weights."""

    steps: int = 0
    blocks: int = 0
    seconds: float = 0.0
    loss: float = 0.0  # of late
    history: list[dict[str, float | list[float]]] = field(default_factory=list)  # a row per measurement
    best: float = 0.0  # tokens per pass of what is exported, with the members before it
    places: int = 0  # of held-out answers, on which that was measured

    def learned(self, loss: float, count: int) -> None:
        """One more step is done."""
        self.loss = loss if not self.steps else 0.98 * self.loss + 0.02 * loss
        self.steps += 1
        self.blocks += count


class Trainer:
    """A draft, its average, and the optimizer's moments."""

    def __init__(self, draft: TrainableDraft, config: TrainConfig) -> None:
        self.draft = draft
        self.state = TrainState()
        self._config = config
        self._workers = Workers(config.texts)
        self._entry_V = entries_of(draft)
        width = len(draft.last_norm.weight)
        self._rate = usual_rate(width) if config.rate is None else config.rate
        self._named = {name: p for name, p in draft.module.named_parameters() if p.requires_grad}
        self.average = {name: p.detach().clone() for name, p in self._named.items()}
        self._optimizer = torch.optim.AdamW(
            self._named.values(), lr=self._rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, dataset: TrainingSet, left: float) -> None:
        """Learn from a few texts; `left` is the part of the time that is left, of 1."""
        config, number = self._config, self.state.steps
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + number)
        chosen = torch.randint(len(dataset), (config.texts,), generator=generator)
        texts = [dataset.text(int(i)) for i in chosen]
        texts = [text for text in texts if text.answer > 1]
        levels = self._levels(generator)
        if not texts:
            self.state.steps += 1
            return
        anchors = [anchors_of(text, self.draft.anchors, generator) for text in texts]
        loss, count = self._learn(texts, anchors, levels, generator)
        torch.nn.utils.clip_grad_norm_(self._named.values(), _NORM)
        rate = self._rate * min(1.0, (number + 1) / _WARM_UP) * max(_COLDEST, min(1.0, left / _COOLING))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        if number % _REMEMBERED == 0:
            self._remember()
        self.state.learned(loss, count)

    def _learn(
        self, texts: Sequence[TunedText], anchors: Sequence[Tensor], levels: int, generator: torch.Generator
    ) -> tuple[float, int]:
        """Leave the gradients of a step's texts in the parameters; its loss, and how many blocks it had."""
        draft, config = self.draft, self._config
        count = min(self._workers.count, len(texts))

        def read(first: int) -> GuessBatch:
            mine = slice(first, None, count)
            return GuessBatch.of(
                block_batch(texts[mine], anchors[mine], levels, draft.scale_ND), self._entry_V
            )

        def gradients(part: tuple[GuessBatch, Shortlist]) -> tuple[Tensor, Sequence[Tensor | None]]:
            loss = summed_losses(draft, *part, config.loss)
            return loss.detach(), torch.autograd.grad(loss / weight, parameters, allow_unused=True)

        parameters = [*self._named.values()]
        parts = self._workers.map(read, range(count))
        weight = max(_LEAST, sum(float(part.weights_R.sum()) for part in parts))
        short = shortlists(draft, parts, config.shortlist, generator)
        found = self._workers.map(gradients, [*zip(parts, short, strict=True)])
        for parameter, of_parts in zip(parameters, zip(*(of for _, of in found), strict=True), strict=True):
            known = [gradient for gradient in of_parts if gradient is not None]
            parameter.grad = reduce(torch.add, known).contiguous() if known else None
        loss = sum(float(loss) for loss, _ in found) / weight
        return loss, sum(int(part.batch.valid_BAL[..., 0].sum()) for part in parts)

    def averaged(self) -> TrainableDraft:
        """A copy of the draft with averaged weights."""
        copy = self.draft.copy()
        copy.module.load_state_dict(self.average, strict=False)
        return copy

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything a checkpoint holds, under names of its own; not copies."""
        yield "scale", self.draft.scale_ND
        yield "ids", self.draft.ids
        for name, parameter in self._named.items():
            yield f"head.{name}", parameter.detach()
            yield f"average.{name}", self.average[name]
            state = self._optimizer.state.get(parameter, {})
            for moment in ("exp_avg", "exp_avg_sq"):
                yield f"{moment}.{name}", state.get(moment, torch.zeros_like(parameter))

    def load(self, tensors: dict[str, Tensor], state: TrainState) -> None:
        """Go on from a checkpoint of such a trainer; raises KeyError where it lacks something."""
        self.state = state
        for name, parameter in self._named.items():
            with torch.no_grad():
                parameter.copy_(tensors[f"head.{name}"])
            self.average[name] = tensors[f"average.{name}"]
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(state.steps)),
                **{moment: tensors[f"{moment}.{name}"] for moment in ("exp_avg", "exp_avg_sq")},
            }

    def _levels(self, generator: torch.Generator) -> int:
        """How deep this step's blocks are."""
        dice = torch.rand(self.draft.learnt_depth - 1, generator=generator)
        return 1 + int((dice < _DEEPER).cumprod(dim=0).sum())

    @torch.no_grad()
    def _remember(self) -> None:
        # A young average is of few steps, or it would be of the first ones for long.
        memory = min(_MEMORY, (1 + self.state.steps) / (10 + self.state.steps)) ** _REMEMBERED
        for name, parameter in self._named.items():
            self.average[name].lerp_(parameter, 1 - memory)


def usual_rate(width: int) -> float:
    """The rate of learning of a draft whose rows have so many values.

    Wide ones are made of the layers of wide targets, whose weights are small: at a rate that a head of 576
    learns best at, one of 1536 unlearns its target's layer in its first steps (docs/log.md).
    """
    return _RATE * math.sqrt(min(1.0, _WIDTH / width)) ** 3


@torch.no_grad()
def loss_of(draft: TrainableDraft, texts: Sequence[TunedText], config: TrainConfig) -> float:
    """The loss of a draft on some of each text, all levels it learns; the same places every time.

    Raises TuneError where no text has an answer of two tokens, of which a guess could be made.
    """
    generator = torch.Generator().manual_seed(config.seed)
    texts = [text for text in texts if text.answer > 1]
    if not texts:
        raise TuneError(
            "every answer that was looked at is a single token, of which nothing can be guessed; ask prompts "
            "that are answered at length"
        )
    anchors = [anchors_of(text, _TRIED_ON, generator) for text in texts]
    batch = block_batch(texts, anchors, draft.learnt_depth, draft.scale_ND)
    places = GuessBatch.of(batch, entries_of(draft))
    [short] = shortlists(draft, [places], config.shortlist, generator)
    loss = summed_losses(draft, places, short, config.loss)
    return float(loss) / max(float(places.weights_R.sum()), _LEAST)


class Workers:
    """As many as there are cores to compute with, and no more than there can be parts."""

    def __init__(self, most: int) -> None:
        """`most` parts of a step; the cores are those that torch computes with now."""
        self._cores = torch.get_num_threads()
        self.count = max(1, min(most, self._cores))
        self._pool = ThreadPoolExecutor(self.count, "training") if self.count > 1 else None

    def map(self, work: Callable[[_Given], _Made], parts: Sequence[_Given]) -> list[_Made]:
        """What comes of each part, in their order; raises what the first of them that fails raises.

        Each has its share of the cores. No part is under way any more when it returns or raises.
        """
        count = len(parts)
        if self._pool is None or count == 1:
            return [work(part) for part in parts]

        def alone(number: int) -> _Made:
            share = self._cores // count + (number < self._cores % count)
            torch.set_num_threads(max(1, share))  # of this thread
            return work(parts[number])

        futures = [self._pool.submit(alone, number) for number in range(count)]
        try:
            return [future.result() for future in futures]
        finally:
            wait(futures)
            torch.set_num_threads(self._cores)  # what threads begin with that compute for the first time


def keep_freed_memory() -> bool:
    """Let the process keep what it frees, as far as the C library can be told to; whether it could.

    A step of training allocates what the one before it freed, a few hundred tensors of megabytes. By default
    glibc gives such blocks back and maps new ones, whose pages the kernel fills with zeros, for one thread of
    the process at a time: that was a fifth of one thread's time, and a quarter of two's (docs/log.md). Other
    threads than the main one still give back blocks of 64 MB and more.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    kept = bool(mallopt(_M_TRIM_THRESHOLD, _KEPT))
    return any(mallopt(_M_MMAP_THRESHOLD, size) for size in _LARGEST) and kept
