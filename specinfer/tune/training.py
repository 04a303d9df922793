"""Training of one draft: exports the best draft so far and writes checkpoints until the time is spent.

A checkpoint is one safetensors file that is replaced atomically. A process that is killed loses the work
since the last one. Time is counted over all runs.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from specinfer.errors import ModelFileError, TuneError
from specinfer.files import write_text
from specinfer.models.safetensors import FLOATS, read_entries, write_safetensors
from specinfer.progress import NoProgress, Progress
from specinfer.tune.card import TrainingMaterial, card
from specinfer.tune.dataset import TrainingSet, TunedText, first_texts
from specinfer.tune.draft import Kind, Target, TrainableDraft
from specinfer.tune.evaluation import Figures, TokenRanks, measure, read_draft
from specinfer.tune.trainer import TrainConfig, Trainer, TrainState, loss_of

_DTYPES: Final = {**FLOATS, "I64": torch.int64, "U8": torch.uint8}
_FACTS: Final = "facts"  # JSON, as bytes
_MAX_INTERVAL: Final = 90.0  # maximum seconds between checkpoints, without the time to write one
_MIN_CHECKPOINTS: Final = 4  # minimum number of checkpoints
_INIT_TEXTS: Final = 8  # texts used to choose the initial weights


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Contents of a checkpoint."""

    tensors: dict[str, Tensor]
    state: TrainState


def write_checkpoint(path: Path, trainer: Trainer) -> None:
    """Write all state that training needs to resume; raises OSError."""
    facts = json.dumps({"state": asdict(trainer.state)}).encode()
    tensors = {name: tensor.contiguous() for name, tensor in trainer.tensors()}
    tensors[_FACTS] = torch.frombuffer(bytearray(facts), dtype=torch.uint8)
    write_safetensors(path, tensors, mode=0o600)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; raises TuneError if it is damaged."""
    try:
        entries = read_entries([path], _DTYPES)
        tensors = {name: entry.read_rows(0, entry.shape[0]) for name, entry in entries.items()}
        facts = json.loads(tensors.pop(_FACTS).numpy().tobytes())
        known = {one.name for one in fields(TrainState)}
        state = TrainState(**{name: value for name, value in facts["state"].items() if name in known})
        return Checkpoint(tensors, state)
    except (ModelFileError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise TuneError(
            f"{path} is damaged ({error}); remove it to restart training on the collected answers"
        ) from error


@dataclass(frozen=True, slots=True)
class TrainingFiles:
    """Paths of a training."""

    folder: Path  # holds the best draft so far
    checkpoint: Path


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """Outputs for progress and messages, and the clock."""

    progress: Progress = field(default_factory=NoProgress)
    say: Callable[[str], None] = lambda line: None
    clock: Callable[[], float] = time.monotonic


class Training:
    """Trains one draft."""

    def __init__(
        self,
        kind: Kind,
        config: TrainConfig,
        target: Target,
        dataset: TrainingSet,
        texts: Sequence[TunedText],
        files: TrainingFiles,
        *,
        earlier: Sequence[TokenRanks] = (),
        material: TrainingMaterial,
        init: str | None = None,
        outputs: Outputs,
    ) -> None:
        """Resume from the checkpoint, or start as `init`.

        `texts` are held out; `earlier` are members of its pool. Raises TuneError if the checkpoint is damaged
        or belongs to another draft, and as Kind.new.
        """
        self._kind, self._target, self._dataset, self._texts = kind, target, dataset, texts
        self._files, self._material, self._outputs = files, material, outputs
        self._earlier = earlier
        self._config = config
        self.trainer = self._resumed() or self._new_trainer(init)

    def run(self, seconds: float) -> None:
        """Train until `seconds` have passed over all runs; the best draft is then in its folder.

        Raises TuneError if no time is left and no draft was trained, OSError if the disk is full.
        """
        trainer, outputs = self.trainer, self._outputs
        self._measure_exported()
        left = seconds - trainer.state.seconds
        if left <= 0:
            if trainer.state.best == 0:
                raise TuneError("no draft was trained yet and no time is left; give more minutes")
            return
        between = min(_MAX_INTERVAL, seconds / _MIN_CHECKPOINTS)
        with outputs.progress.showing(round(left), "training", "seconds"):
            while (left := seconds - trainer.state.seconds) > 0:
                self._train_for(min(between, left), seconds)
                self.checkpoint()
                outputs.progress.advance(round(min(between, left)))

    def checkpoint(self) -> None:
        """Measure, export the draft if it is the best so far, and write a checkpoint."""
        clock, trainer = self._outputs.clock, self.trainer
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
        state.seconds += clock() - began
        write_checkpoint(self._files.checkpoint, trainer)
        self._outputs.say(
            f"{state.seconds / 60:.1f} min, {state.steps} steps, {state.blocks} blocks: loss "
            f"{state.loss:.3f}; held out: first guess {figures.hits[0]:.3f}, one of three "
            f"{figures.first_three:.3f}, {figures.tokens_per_pass:.3f} tokens per pass"
            f"{'' if figures.pooled is None else f', {figures.pooled:.3f} in the pool'}"
            f"{', the best so far' if better else ''}"
        )

    def _resumed(self) -> Trainer | None:
        path = self._files.checkpoint
        if not path.exists():
            return None
        kept = read_checkpoint(path)
        try:
            scale_ND, ids = kept.tensors["scale"], kept.tensors["ids"].tolist()
            trainer = Trainer(self._kind.blank(self._target, scale_ND, ids), self._config)
            trainer.load(kept.tensors, kept.state)
        except (KeyError, RuntimeError) as error:
            raise TuneError(f"{path} is of another draft ({error}); remove it to restart training") from error
        return trainer

    def _new_trainer(self, init: str | None) -> Trainer:
        tried = first_texts(self._dataset, _INIT_TEXTS)

        def loss(draft: TrainableDraft) -> float:
            return loss_of(draft, tried, self._config)

        given = self._target, self._dataset, self._config.seed
        return Trainer(self._kind.new(init, *given, loss, self._outputs.say), self._config)

    def _train_for(self, seconds: float, total: float) -> None:
        """Train for `seconds`, at least one step; `total` is the whole time of this training."""
        state, clock = self.trainer.state, self._outputs.clock
        before, began = state.seconds, clock()
        while True:
            self.trainer.step(self._dataset, max(0.0, 1 - state.seconds / total))
            state.seconds = before + clock() - began
            if state.seconds - before >= seconds:
                return

    def _measure_exported(self) -> None:
        """Measure the exported draft, which later drafts are compared with.

        The checkpoint's figure may be outdated: the process may have been killed between an export and its
        checkpoint, more answers may have been held out since, or earlier members may have been trained on.
        """
        state, folder = self.trainer.state, self._files.folder
        if not (folder / "config.json").exists():
            state.best = 0.0
            return
        exported = read_draft(folder, self._target, self.trainer.draft.depth)
        figures = measure(exported, self._texts, self._earlier)
        if state.history and figures.places != state.places:
            self._outputs.say(
                f"on the {figures.places} held-out positions available now, the best draft makes "
                f"{figures.worth:.3f} tokens per pass"
            )
        state.best, state.places = figures.worth, figures.places
        if not self._card.exists():
            self._describe(exported, figures)

    def _export(self, draft: TrainableDraft, figures: Figures) -> None:
        """Write a draft and its card; a killed process leaves no card that describes another draft."""
        self._card.unlink(missing_ok=True)
        draft.write(self._files.folder, self._target)
        self._describe(draft, figures)

    @property
    def _card(self) -> Path:
        return self._files.folder / "README.md"

    def _describe(self, draft: TrainableDraft, figures: Figures) -> None:
        text = card(draft.description(), self._material, self.trainer, figures)
        write_text(self._card, text)
