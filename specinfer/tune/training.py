"""The training of one draft: until its time is over, the best is exported, and a checkpoint holds all else.

A checkpoint is one safetensors file, replaced as a whole, so that some state is always there. A process that
is killed loses what came after the last one. Time counts over all runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from specinfer.errors import ModelFileError, TuneError
from specinfer.files import write_text
from specinfer.models.safetensors import FLOATS, read_entries, write_safetensors
from specinfer.progress import NoProgress, Progress
from specinfer.report.files import dress, new_figure
from specinfer.tune.card import Material, card
from specinfer.tune.dataset import TrainingSet, TunedText, first_texts
from specinfer.tune.draft import Beginning, Kind, Target, TrainableDraft
from specinfer.tune.evaluation import Along, Figures, measure, read_draft
from specinfer.tune.trainer import TrainConfig, Trainer, TrainState, loss_of

_DTYPES: Final = {**FLOATS, "I64": torch.int64, "U8": torch.uint8}
_FACTS: Final = "facts"  # JSON, as bytes
_BETWEEN: Final = 90.0  # seconds from one checkpoint to the next, at most; writing one takes some more
_CHECKPOINTS: Final = 4  # at least, however short the training
_TRIED_BY: Final = 8  # texts on which it is tried how a draft should begin
_MINUTES: Final = "minutes of training"


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """What was read."""

    tensors: dict[str, Tensor]
    state: TrainState
    shape: Mapping[str, object]  # of the head, and of what it is trained for

    @property
    def ids(self) -> list[int]:
        """The tokens the head can name."""
        return [int(token) for token in self.tensors["ids"]]


def write_checkpoint(path: Path, trainer: Trainer, shape: Mapping[str, object]) -> None:
    """Write all that a training needs to go on; raises OSError."""
    facts = json.dumps({"state": asdict(trainer.state), "shape": dict(shape)}).encode()
    tensors = {name: tensor.contiguous() for name, tensor in trainer.tensors()}
    tensors[_FACTS] = torch.frombuffer(bytearray(facts), dtype=torch.uint8)
    write_safetensors(path, tensors, mode=0o600)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; raises TuneError where it is damaged."""
    try:
        entries = read_entries([path], _DTYPES)
        tensors = {name: entry.read_rows(0, entry.shape[0]) for name, entry in entries.items()}
        facts = json.loads(tensors.pop(_FACTS).numpy().tobytes())
        known = {one.name for one in fields(TrainState)}
        state = TrainState(**{name: value for name, value in facts["state"].items() if name in known})
        return Checkpoint(tensors, state, dict(facts["shape"]))
    except (ModelFileError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise TuneError(
            f"{path} is damaged ({error}); remove it, and training begins anew on what was collected"
        ) from error


@dataclass(frozen=True, slots=True)
class TrainingFiles:
    """Where a training's files lie."""

    folder: Path  # of the best draft so far
    checkpoint: Path


@dataclass(frozen=True, slots=True, eq=False)
class Hearers:
    """Who is told how it goes, and what counts the seconds."""

    progress: Progress = field(default_factory=NoProgress)
    say: Callable[[str], None] = lambda line: None
    clock: Callable[[], float] = time.monotonic


class Training:
    """A draft and what it learns from."""

    def __init__(
        self,
        kind: Kind,
        config: TrainConfig,
        target: Target,
        dataset: TrainingSet,
        texts: Sequence[TunedText],
        files: TrainingFiles,
        *,
        earlier: Sequence[Along] = (),
        material: Material,
        init: str | None = None,
        hearers: Hearers,
    ) -> None:
        """Goes on where the last one was, or begins as `init`; `texts` are held out, `earlier` are members of
        its pool.

        Raises TuneError where the checkpoint is damaged or another draft's, and as Kind.new.
        """
        self._kind, self._target, self._dataset, self._texts = kind, target, dataset, texts
        self._files, self._material, self._hearers = files, material, hearers
        self._earlier = earlier
        self._config = config
        self.trainer = self._resumed() or self._begun(init)

    def run(self, seconds: float) -> None:
        """Train until `seconds` are over, in all runs; the best draft is in its folder then.

        Raises TuneError where no time is left before anything was trained, OSError where the disk is full.
        """
        trainer, hearers = self.trainer, self._hearers
        self._measure_anew()
        left = seconds - trainer.state.seconds
        if left <= 0:
            if trainer.state.best == 0:
                raise TuneError("no draft was trained yet, and no time is left; give more minutes")
            return
        between = min(_BETWEEN, seconds / _CHECKPOINTS)
        with hearers.progress.showing(round(left), "training", "seconds"):
            while (left := seconds - trainer.state.seconds) > 0:
                self._stretch(min(between, left), seconds)
                self.keep()
                hearers.progress.advance(round(min(between, left)))

    def keep(self) -> None:
        """Measure, export what is better than before, write a checkpoint."""
        clock, trainer, folder = self._hearers.clock, self.trainer, self._files.folder
        began = clock()
        state, averaged = trainer.state, trainer.averaged()
        figures = measure(averaged, self._texts, self._earlier)
        better = figures.worth > state.best
        state.history.append(
            {
                "seconds": state.seconds,
                "steps": state.steps,
                "loss": state.loss,
                "hits": list(figures.hits),
                "first_three": figures.first_three,
                "tokens_per_pass": figures.tokens_per_pass,
                "worth": figures.worth,
            }
        )
        if better:
            state.best, state.places = figures.worth, figures.places
            self._export(averaged, figures)
        draw_training(state.history, folder / "training.png")
        state.seconds += clock() - began
        write_checkpoint(self._files.checkpoint, trainer, self._kind.facts())
        self._hearers.say(
            f"{state.seconds / 60:.1f} min, {state.steps} steps, {state.blocks} blocks: loss "
            f"{state.loss:.3f}; held out: first guess {figures.hits[0]:.3f}, one of three "
            f"{figures.first_three:.3f}, {figures.tokens_per_pass:.3f} tokens a pass"
            f"{'' if figures.pooled is None else f', {figures.pooled:.3f} in the pool'}"
            f"{', the best so far' if better else ''}"
        )

    def _resumed(self) -> Trainer | None:
        path = self._files.checkpoint
        if not path.exists():
            return None
        kept = read_checkpoint(path)
        try:
            trainer = Trainer(self._kind.blank(self._target, kept.tensors["scale"], kept.ids), self._config)
            trainer.load(kept.tensors, kept.state)
        except (KeyError, RuntimeError) as error:
            raise TuneError(f"{path} is of another draft ({error}); remove it to train anew") from error
        return trainer

    def _begun(self, init: str | None) -> Trainer:
        tried = first_texts(self._dataset, _TRIED_BY)

        def loss(draft: TrainableDraft) -> float:
            return loss_of(draft, tried, self._config)

        beginning = Beginning(self._target, self._dataset, self._config.seed, loss, self._hearers.say)
        return Trainer(self._kind.new(init, beginning), self._config)

    def _stretch(self, seconds: float, total: float) -> None:
        """Train for so many seconds, at least one step, of `total` that this training has."""
        state, clock = self.trainer.state, self._hearers.clock
        before, began = state.seconds, clock()
        while True:
            self.trainer.step(self._dataset, max(0.0, 1 - state.seconds / total))
            state.seconds = before + clock() - began
            if state.seconds - before >= seconds:
                return

    def _measure_anew(self) -> None:
        """What is exported: later drafts are held against that, whatever the last checkpoint says of it.

        Whoever is killed behind an export has a checkpoint of before; and since then more may have been held
        out, and the members before this one may have learnt.
        """
        state, folder = self.trainer.state, self._files.folder
        if not (folder / "config.json").exists():
            state.best = 0.0
            return
        exported = read_draft(folder, self._target, self.trainer.draft.depth)
        figures = measure(exported, self._texts, self._earlier)
        if state.history and figures.places != state.places:
            self._hearers.say(
                f"on {figures.places} held-out places that there are now the best makes {figures.worth:.3f}"
            )
        state.best, state.places = figures.worth, figures.places
        if not self._card.exists():
            self._describe(exported, figures)

    def _export(self, draft: TrainableDraft, figures: Figures) -> None:
        """Write a draft and its card; whoever is killed on the way leaves no card that is another draft's."""
        self._card.unlink(missing_ok=True)
        draft.write(self._files.folder, self._target)
        self._describe(draft, figures)

    @property
    def _card(self) -> Path:
        return self._files.folder / "README.md"

    def _describe(self, draft: TrainableDraft, figures: Figures) -> None:
        told = card(draft.described(), self._material, self.trainer, self._config.loss, figures)
        write_text(self._card, told)


def draw_training(history: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Write the picture of a training's measurements to `path`, if matplotlib is there; whether it is.

    Raises OSError.
    """
    if find_spec("matplotlib") is None:
        return False
    figure = new_figure(10, 4.2, dpi=120)
    left, middle, right = figure.subplots(1, 3)
    minutes = [row["seconds"] / 60 for row in history]
    left.plot(minutes, [row["loss"] for row in history])
    for level in range(len(history[-1]["hits"])):
        middle.plot(minutes, [row["hits"][level] for row in history], label=f"level {level + 1}")
    middle.legend(frameon=False, fontsize=8)
    middle.set_ylim(0, 1)
    right.plot(minutes, [row["tokens_per_pass"] for row in history])
    dress(left, "Loss", _MINUTES, "")
    dress(middle, "Held out: first guess right", _MINUTES, "")
    dress(right, "Held out: tokens a pass, chain", _MINUTES, "")
    figure.savefig(path)
    return True
