"""A tuning: collect, train, keep the best; in a folder that any later run can go on from.

    OUT     config.json, model.safetensors, README.md     the best head so far: `--draft OUT`
            training.png                                  loss and held-out guesses, if matplotlib is there
            work    tuning.json                           what it is for: the target, the head's shape
                    shards                                what was collected
                    checkpoint.safetensors                the training's state

Whoever is killed loses what came after the last shard or checkpoint. Time counts over all runs: a run with
`--resume` and the same minutes does what the earlier ones left.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from specinfer.config import EngineConfig
from specinfer.errors import TuneError
from specinfer.files import NewFile
from specinfer.heads.block import BlockHead
from specinfer.heads.checkpoint import HeadFolder
from specinfer.heads.export import write_head
from specinfer.hub import resolve
from specinfer.kernels.machine import thread_count
from specinfer.llm import LLM
from specinfer.models.config import Family
from specinfer.models.weights import OpenModel, open_model
from specinfer.progress import NoProgress, Progress
from specinfer.tune.card import Material, card
from specinfer.tune.checkpoint import read_checkpoint, write_checkpoint
from specinfer.tune.collect import Collected, Collector, collecting, default_taps
from specinfer.tune.guesses import Head
from specinfer.tune.held_out import Figures, entries_of, held_out_texts, measure
from specinfer.tune.informed_head import begin_as_target, learn_pairs, some_texts, tune_loudness
from specinfer.tune.listener import Listener
from specinfer.tune.new_head import (
    HeadShape,
    folded,
    frequent_tokens,
    head_config,
    known_head,
    new_head,
    sizes_of,
)
from specinfer.tune.plot import draw_training
from specinfer.tune.prompts import Prompts
from specinfer.tune.shards import Corpus, TunedText
from specinfer.tune.trainer import TrainConfig, Trainer

_BETWEEN: Final = 90.0  # seconds from one checkpoint to the next, at most; writing one takes some more
_CHECKPOINTS: Final = 4  # at least, however short the training
_LEAST_TRAINING: Final = 1 / 3  # of the time, whatever collecting took
_SCALED_BY: Final = 64  # texts whose hidden states say how large these are
_SOLVED_BY: Final = 1000  # texts by which a head begins as its target
_TRIED_BY: Final = 8  # texts on which it is tried how loud it should be
_ARCHITECTURES: Final = {
    Family.LLAMA: "LlamaForCausalLM",
    Family.MISTRAL: "MistralForCausalLM",
    Family.QWEN2: "Qwen2ForCausalLM",
    Family.QWEN3: "Qwen3ForCausalLM",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """What is to be tuned, and for how long."""

    target: EngineConfig
    out: Path
    minutes: float = 30.0  # in all, over all runs
    collect_minutes: float | None = None  # of these; None: a third
    resume: bool = False
    chat: bool | None = None  # prompts go through the chat template; None: where there is one
    max_tokens: int = 256  # of an answer
    init: str | None = None  # target, random, or an exported head to go on from; None: as the shape allows
    head: HeadShape = field(default_factory=HeadShape)
    training: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise TuneError(f"minutes is {self.minutes}; allowed: more than 0")
        if self.collect_minutes is not None and not 0 <= self.collect_minutes < self.minutes:
            raise TuneError(
                f"{self.collect_minutes} minutes are to collect in, of {self.minutes} in all; allowed: 0 or "
                "more, and fewer than these"
            )

        if self.init == "target" and not self.head.begins_as_target:
            raise TuneError(
                "init is target, which is for block heads of layout specinfer; allowed: random, or a head"
            )

    @property
    def work(self) -> Path:
        """What later runs go on from."""
        return self.out / "work"

    @property
    def collect_seconds(self) -> float:
        """What collecting may take, over all runs."""
        return 60 * (self.minutes / 3 if self.collect_minutes is None else self.collect_minutes)


class Tuning:
    """One run. `say` is told each line for a person, and `clock` counts seconds."""

    def __init__(
        self,
        config: TuneConfig,
        *,
        progress: Progress | None = None,
        say: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes the folder; raises TuneError where it is another tuning's, OSError where it cannot be made.

        Raises ModelError and its kind for a target that cannot be found, or that no head is trained for.
        """
        self._config = config
        self._progress = progress or NoProgress()
        self._say = say
        self._clock = clock
        files = resolve(config.target.model, progress=self._progress)
        self._target: OpenModel = open_model(files)
        self._name = files.name
        self._taps = default_taps(self._target.config)
        self._head = head_config(self._target.config, self._taps, config.head)
        self._shape = {"target": Path(files.name).name, "head": asdict(config.head), "taps": list(self._taps)}
        self._claim()
        self._corpus = Corpus(config.work / "shards")
        for name in self._corpus.damaged:
            say(f"{config.work / 'shards' / name} is damaged and is left out")

    @property
    def vocab(self) -> int:
        """The target's tokens."""
        return self._target.config.vocab_size

    def run(self, prompts: Prompts, sources: Sequence[str]) -> Figures:
        """Collect and train until the time is over; the figures of the best head, which is in the folder.

        `sources` are the names of what prompts were read from. Raises TuneError where nothing can be learnt,
        OSError where the disk is full: what was kept until then can be gone on from.
        """
        for fault in prompts.faults:
            self._say(f"skipped: {fault}")
        try:
            self._collect(prompts)
            return self._train(sources)
        except OSError as error:
            raise TuneError(
                f"cannot write to {self._config.out}: {error.strerror or error}; make room, and --resume "
                "goes on from what was kept"
            ) from error

    def _claim(self) -> None:
        """Make the folder this tuning's, or see that it is."""
        work = self._config.work
        facts = work / "tuning.json"
        if facts.exists():
            if not self._config.resume:
                raise TuneError(f"{self._config.out} has a tuning in it; --resume goes on with it")
            known = _read(facts)
            for name, value in self._shape.items():
                if known.get(name) != value:
                    raise TuneError(
                        f"the tuning in {self._config.out} is of {name} {known.get(name)}, this one of "
                        f"{value}; name another folder, or the same options"
                    )
        elif self._config.resume:
            raise TuneError(f"{self._config.out} has no tuning to resume; leave --resume out")
        elif (self._config.out / "config.json").exists():
            raise TuneError(f"{self._config.out} has a model in it already; name another folder")
        (work / "shards").mkdir(parents=True, exist_ok=True)
        _write(facts, json.dumps(self._shape))

    def _collect(self, prompts: Prompts) -> None:
        corpus = self._corpus
        left = self._config.collect_seconds - corpus.seconds
        known = corpus.keys
        if left <= 0 or all(one.key in known for one in prompts.asked):
            if not corpus.tokens:
                raise TuneError("nothing was collected, and no time is left for it; give more minutes")
            return
        listener = Listener((*self._taps, self._target.config.num_layers))
        with LLM(collecting(self._config.target), speculators=[listener], progress=self._progress) as llm:
            chat = llm.tokenizer.has_chat_template if self._config.chat is None else self._config.chat
            collector = Collector(llm, listener, chat=chat, max_tokens=self._config.max_tokens)
            found = collector.run(prompts.asked, corpus, left, self._progress, self._clock)
        self._say(_told(found, corpus))

    def _train(self, sources: Sequence[str]) -> Figures:
        config, corpus = self._config, self._corpus
        torch.set_num_threads(thread_count(config.target.threads))
        trainer = self._trainer()
        texts = held_out_texts(corpus)
        if not texts or not corpus.count(held_out=False):
            raise TuneError(
                f"{corpus.tokens} tokens were collected, too few to learn from and to measure with; "
                "--resume with more minutes or prompts"
            )
        total = 60 * config.minutes
        seconds = max(total - corpus.seconds, _LEAST_TRAINING * total)
        self._measure_anew(trainer, texts)
        left = seconds - trainer.state.seconds
        if left <= 0:
            self._say(f"the {config.minutes:g} minutes are over; --resume with more goes on")
            if trainer.state.best == 0:
                raise TuneError("no head was trained yet, and no time is left; give more minutes")
            return measure(trainer.averaged(), texts, trainer.scale_ND)
        between = min(_BETWEEN, seconds / _CHECKPOINTS)
        best: Figures | None = None
        self._progress.start(round(left), "training", "seconds")
        try:
            while (left := seconds - trainer.state.seconds) > 0:
                self._stretch(trainer, min(between, left), seconds)
                figures = self._keep(trainer, texts, sources)
                best = figures or best
                self._progress.advance(round(min(between, left)))
        finally:
            self._progress.finish()
        return best if best is not None else measure(trainer.averaged(), texts, trainer.scale_ND)

    def _trainer(self) -> Trainer:
        """A trainer that goes on where the last one was, or begins."""
        path = self._config.work / "checkpoint.safetensors"
        if path.exists():
            kept = read_checkpoint(path)
            scale_ND = kept.tensors["scale"]
            head = new_head(self._head, self._target, kept.ids, self._config.training.seed)
            trainer = Trainer(head, scale_ND, self._config.training)
            try:
                trainer.load(kept.tensors, kept.state)
            except (KeyError, RuntimeError) as error:
                raise TuneError(f"{path} is of another head ({error}); remove it to train anew") from error
            return trainer
        learnt = min(_SCALED_BY, self._corpus.count(held_out=False))
        scale_ND = sizes_of(self._corpus.text(number, held_out=False) for number in range(learnt))
        init = self._config.init or ("target" if self._config.head.begins_as_target else "random")
        if init not in ("target", "random"):
            return Trainer(
                known_head(init, self._head, self._target, scale_ND), scale_ND, self._config.training
            )
        ids = frequent_tokens(self._corpus, self._head.draft_vocab_size, self._head.body.vocab_size)
        head = new_head(self._head, self._target, ids, self._config.training.seed)
        if init == "random":
            return Trainer(head, scale_ND, self._config.training)
        assert isinstance(head, BlockHead)  # TuneConfig refuses others
        return self._informed(head, scale_ND)

    def _informed(self, head: BlockHead, scale_ND: Tensor) -> Trainer:
        """A trainer of a head that knows what can be had without learning."""
        texts = some_texts(self._corpus, _SOLVED_BY)
        learn_pairs(head, self._corpus, entries_of(head))
        begin_as_target(head, self._target, texts, scale_ND)
        trainer = Trainer(head, scale_ND, self._config.training)
        loss = tune_loudness(head, lambda head: trainer.loss_of(head, texts[:_TRIED_BY]))
        trainer.start_average()
        self._say(f"the head begins with a loss of {loss:.2f}")
        return trainer

    def _stretch(self, trainer: Trainer, seconds: float, total: float) -> None:
        """Train for so many seconds, at least one step, of `total` that this training has."""
        state = trainer.state
        before, began = state.seconds, self._clock()
        while True:
            trainer.step(self._corpus, max(0.0, 1 - state.seconds / total))
            state.seconds = before + self._clock() - began
            if state.seconds - before >= seconds:
                return

    def _keep(self, trainer: Trainer, texts: list[TunedText], sources: Sequence[str]) -> Figures | None:
        """Measure, export what is better than before, write a checkpoint; figures of what is better."""
        began = self._clock()
        state, averaged = trainer.state, trainer.averaged()
        figures = measure(averaged, texts, trainer.scale_ND)
        better = figures.tokens_per_pass > state.best or not state.history
        state.history.append(
            {
                "seconds": state.seconds,
                "steps": state.steps,
                "loss": state.loss,
                "hits": list(figures.hits),
                "first_three": figures.first_three,
                "tokens_per_pass": figures.tokens_per_pass,
            }
        )
        if better:
            state.best, state.places = figures.tokens_per_pass, figures.places
            self._export(folded(averaged, trainer.scale_ND), trainer, figures, sources)
        draw_training(state.history, self._config.out / "training.png")
        state.seconds += self._clock() - began
        write_checkpoint(self._config.work / "checkpoint.safetensors", trainer, self._shape)
        self._say(
            f"{state.seconds / 60:.1f} min, {state.steps} steps, {state.blocks} blocks: loss "
            f"{state.loss:.3f}; held out: first guess {figures.hits[0]:.3f}, one of three "
            f"{figures.first_three:.3f}, {figures.tokens_per_pass:.3f} tokens a pass"
            f"{', the best so far' if better else ''}"
        )
        return figures if better else None

    def _measure_anew(self, trainer: Trainer, texts: list[TunedText]) -> None:
        """What is exported, where more is held out than then: later heads are held against that."""
        state, out = trainer.state, self._config.out
        if not state.history or not (out / "config.json").exists():
            return
        exported = HeadFolder(out, self._target.config).module(self._target)
        figures = measure(exported, texts, torch.ones_like(trainer.scale_ND))
        if figures.places != state.places:
            state.best, state.places = figures.tokens_per_pass, figures.places
            self._say(
                f"on {figures.places} held-out places that there are now the best head makes {state.best:.3f}"
            )

    def _export(self, head: Head, trainer: Trainer, figures: Figures, sources: Sequence[str]) -> None:
        corpus, out = self._corpus, self._config.out
        write_head(
            head,
            out,
            verifier=self._name,
            architectures=[_ARCHITECTURES[self._target.config.family]],
            dtype=torch.bfloat16,
        )
        material = Material(
            Path(self._name).name,
            sources,
            corpus.count(held_out=False),
            corpus.count(held_out=True),
            corpus.tokens,
            corpus.seconds,
        )
        _write(
            out / "README.md", card(head.config, material, trainer.state, self._config.training.loss, figures)
        )


def _told(found: Collected, corpus: Corpus) -> str:
    """What came of collecting, in a line."""
    skipped = f", {found.silent} said nothing" if found.silent else ""
    skipped += f", {found.refused} were too long" if found.refused else ""
    return (
        f"{found.answered} prompts were answered{skipped}; there are {corpus.tokens} tokens of answers, "
        f"{corpus.count(held_out=True)} texts held out and {corpus.count(held_out=False)} not, "
        f"{corpus.tokens / max(corpus.seconds, 0.01):.0f} tokens/s"
    )


def _read(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise TuneError(f"{path} is damaged; name another folder")
    return found


def _write(path: Path, text: str) -> None:
    with NewFile(path, mode=0o644) as new:
        new.write(text.encode())
        new.keep()
