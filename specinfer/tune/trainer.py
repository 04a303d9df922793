"""Trainer: gradient descent on blocks of the collected texts until the time is spent.

A step's batch is a function of its number, so a resumed run sees the same batches. The depth of blocks is
random: each level occurs 0.6 times as often as the level before. Deep levels matter only if all before them
are right, and levels that are not drawn cost no time. Measurements and exports use an average of the weights
over the last few hundred steps, which is better than any single step's weights and makes the end of a run
less important. The learning rate also decays over the last half of the time.

On CPUs with bfloat16 instructions, matrix products and the MLP's intermediate values are bfloat16. All else
is float32: weights, their average and moments, norms, rotations, softmaxes, the residual stream, losses.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import reduce
from typing import Final, TypeVar

import torch
from torch import Tensor

from specinfer.tune.dataset import TrainingSet, TunedText, anchors_of, block_batch
from specinfer.tune.draft import TrainableDraft, entries_of
from specinfer.tune.losses import GuessBatch, Shortlist, shortlists, summed_losses

# Names of glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_TRIM_THRESHOLD: Final = 1 << 30  # bytes
_MMAP_THRESHOLDS: Final = (1 << 30, 1 << 25)  # bytes; older versions of glibc accept only the second
_Given = TypeVar("_Given")
_Made = TypeVar("_Made")
_WARM_UP_STEPS: Final = 30  # steps
_RATE: Final = 1e-3  # learning rate for a width of at most _REFERENCE_WIDTH
_REFERENCE_WIDTH: Final = 576
_DECAY: Final = 0.5  # final fraction of the time in which the learning rate decays
_MIN_RATE: Final = 0.03  # minimum factor of the learning rate
_DEEPER: Final = 0.6  # probability that a block of l levels gets level l + 1
_MAX_NORM: Final = 1.0  # maximum gradient norm
_AVERAGE_DECAY: Final = 0.995  # decay of the average per step
_AVERAGE_EVERY: Final = 4  # steps between updates of the average
_STEP_TEXTS: Final = 4  # texts of a step
_LOSS_ANCHORS: Final = 64  # anchors per text when an initial loss is computed
_MIN_WEIGHT: Final = 1e-6  # minimum total weight


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Training options common to all kinds of draft."""

    rate: float | None = None  # learning rate; None: by the width of the draft
    shortlist: int = 768  # tokens of the draft whose logits a step computes
    seed: int = 0


@dataclass(slots=True)
class TrainState:
    """Progress of a training, without weights."""

    steps: int = 0
    blocks: int = 0
    seconds: float = 0.0
    loss: float = 0.0  # running mean
    history: list[dict[str, float | list[float]]] = field(default_factory=list)  # a row per measurement
    best: float = 0.0  # tokens per pass of the exported draft together with the earlier members
    places: int = 0  # held-out positions of that measurement

    def learned(self, loss: float, count: int) -> None:
        """Count one step."""
        self.loss = loss if not self.steps else 0.98 * self.loss + 0.02 * loss
        self.steps += 1
        self.blocks += count


class Trainer:
    """A draft, the average of its weights, and the optimizer's moments."""

    def __init__(self, draft: TrainableDraft, config: TrainConfig) -> None:
        self.draft = draft
        self.state = TrainState()
        self._config = config
        self._workers = Workers(_STEP_TEXTS)
        self._entry_V = entries_of(draft)
        width = len(draft.last_norm.weight)
        self._rate = default_rate(width) if config.rate is None else config.rate
        self._named = {name: p for name, p in draft.module.named_parameters() if p.requires_grad}
        self.average = {name: p.detach().clone() for name, p in self._named.items()}
        self._optimizer = torch.optim.AdamW(
            self._named.values(), lr=self._rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, dataset: TrainingSet, left: float) -> None:
        """Train on a few texts; `left` is the remaining fraction of the time, in [0, 1]."""
        config, number = self._config, self.state.steps
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + number)
        chosen = torch.randint(len(dataset), (_STEP_TEXTS,), generator=generator)
        texts = [dataset.text(int(i)) for i in chosen]
        levels = self._levels(generator)
        anchors = [anchors_of(text, self.draft.anchors, generator) for text in texts]
        loss, count = self._learn(texts, anchors, levels, generator)
        torch.nn.utils.clip_grad_norm_(self._named.values(), _MAX_NORM)
        rate = self._rate * min(1.0, (number + 1) / _WARM_UP_STEPS) * max(_MIN_RATE, min(1.0, left / _DECAY))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        if number % _AVERAGE_EVERY == 0:
            self._update_average()
        self.state.learned(loss, count)

    def _learn(
        self, texts: Sequence[TunedText], anchors: Sequence[Tensor], levels: int, generator: torch.Generator
    ) -> tuple[float, int]:
        """Set the gradients of the parameters for a step's texts; return its loss and number of blocks."""
        draft, config = self.draft, self._config
        count = min(self._workers.count, len(texts))

        def read(first: int) -> GuessBatch:
            mine = slice(first, None, count)
            return GuessBatch.of(
                block_batch(texts[mine], anchors[mine], levels, draft.scale_ND), self._entry_V
            )

        def gradients(part: tuple[GuessBatch, Shortlist]) -> tuple[Tensor, Sequence[Tensor | None]]:
            loss = summed_losses(draft, *part)
            return loss.detach(), torch.autograd.grad(loss / weight, parameters, allow_unused=True)

        parameters = [*self._named.values()]
        parts = self._workers.map(read, range(count))
        weight = max(_MIN_WEIGHT, sum(float(part.weights_R.sum()) for part in parts))
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
        """All tensors of a checkpoint, by name; not copies."""
        yield "scale", self.draft.scale_ND
        yield "ids", self.draft.ids
        for name, parameter in self._named.items():
            yield f"head.{name}", parameter.detach()
            yield f"average.{name}", self.average[name]
            state = self._optimizer.state.get(parameter, {})
            for moment in ("exp_avg", "exp_avg_sq"):
                yield f"{moment}.{name}", state.get(moment, torch.zeros_like(parameter))

    def load(self, tensors: dict[str, Tensor], state: TrainState) -> None:
        """Resume from a checkpoint; raises KeyError if a tensor is missing."""
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
        """Random depth of this step's blocks."""
        dice = torch.rand(self.draft.trained_depth - 1, generator=generator)
        return 1 + int((dice < _DEEPER).cumprod(dim=0).sum())

    @torch.no_grad()
    def _update_average(self) -> None:
        # At first the average has a short memory; otherwise the first steps would dominate it for long.
        memory = min(_AVERAGE_DECAY, (1 + self.state.steps) / (10 + self.state.steps)) ** _AVERAGE_EVERY
        for name, parameter in self._named.items():
            self.average[name].lerp_(parameter, 1 - memory)


def default_rate(width: int) -> float:
    """Default learning rate of a draft with rows of `width` values.

    Wide drafts are built from layers of wide targets, whose weights are small. At the best rate of a width of
    576, a draft of width 1536 destroys its target's layer in its first steps (docs/decisions/07-heads.md).
    """
    return _RATE * math.sqrt(min(1.0, _REFERENCE_WIDTH / width)) ** 3


@torch.no_grad()
def loss_of(draft: TrainableDraft, texts: Sequence[TunedText], config: TrainConfig) -> float:
    """Loss of a draft on some anchors of each text, over all trained levels; the anchors are fixed."""
    generator = torch.Generator().manual_seed(config.seed)
    anchors = [anchors_of(text, _LOSS_ANCHORS, generator) for text in texts]
    batch = block_batch(texts, anchors, draft.trained_depth, draft.scale_ND)
    places = GuessBatch.of(batch, entries_of(draft))
    [short] = shortlists(draft, [places], config.shortlist, generator)
    loss = summed_losses(draft, places, short)
    return float(loss) / max(float(places.weights_R.sum()), _MIN_WEIGHT)


class Workers:
    """A thread pool with at most one thread per core."""

    def __init__(self, limit: int) -> None:
        """`limit` is the maximum number of parts of a step; the cores are torch's current threads."""
        self._cores = torch.get_num_threads()
        self.count = max(1, min(limit, self._cores))
        self._pool = ThreadPoolExecutor(self.count, "training") if self.count > 1 else None

    def map(self, work: Callable[[_Given], _Made], parts: Sequence[_Given]) -> list[_Made]:
        """Apply `work` to each part, in parallel and in order; raises the exception of the first failed part.

        The parts share the cores. No part is running when it returns or raises.
        """
        count = len(parts)
        if self._pool is None or count == 1:
            return [work(part) for part in parts]

        def run_single(number: int) -> _Made:
            share = self._cores // count + (number < self._cores % count)
            torch.set_num_threads(max(1, share))  # thread-local
            return work(parts[number])

        futures = [self._pool.submit(run_single, number) for number in range(count)]
        try:
            return [future.result() for future in futures]
        finally:
            wait(futures)
            torch.set_num_threads(self._cores)  # initial value for threads that compute for the first time


def keep_freed_memory() -> None:
    """Keep freed memory in the process, if the C library supports it.

    A training step allocates what the step before it freed, a few hundred tensors of megabytes. By default
    glibc returns such blocks and maps new ones, whose pages the kernel zeroes for one thread of the process
    at a time. That took a fifth of the time with one thread, a quarter with two. Threads other
    than the main one still return blocks of 64 MB and more.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
        any(mallopt(_M_MMAP_THRESHOLD, size) for size in _MMAP_THRESHOLDS)
