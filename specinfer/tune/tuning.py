"""A tuning: collect, train, keep the best; in a folder that any later run can go on from.

    OUT     config.json, model.safetensors, README.md     the best draft so far: `--draft OUT`
            training.png                                  loss and held-out guesses, if matplotlib is there
            work    tuning.json                           what it is for: the target, the draft's shape
                    shards                                what was collected
                    checkpoint.safetensors                the training's state

Whoever is killed loses what came after the last shard or checkpoint. Time counts over all runs: a run with
`--resume` and the same minutes does what the earlier ones left.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from specinfer.errors import TuneError
from specinfer.files import NewFile
from specinfer.hub import resolve
from specinfer.kernels.machine import thread_count
from specinfer.llm import LLM
from specinfer.models.weights import open_model
from specinfer.progress import NoProgress, Progress
from specinfer.tune.card import Material
from specinfer.tune.collect import Collected, Collector, collecting
from specinfer.tune.config import TuneConfig
from specinfer.tune.draft import Target
from specinfer.tune.held_out import Figures, held_out_texts
from specinfer.tune.lessons import AllLessons, Lessons
from specinfer.tune.listener import Listener
from specinfer.tune.prompts import Prompts
from specinfer.tune.shards import Corpus
from specinfer.tune.training import Hearers, Place, Training

_LEAST_TRAINING: Final = 1 / 3  # of the time, whatever collecting took


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
        self._hearers = Hearers(progress or NoProgress(), say, clock)
        files = resolve(config.target.model, progress=self._hearers.progress)
        self._target = Target(files, open_model(files))
        config.kind.check(self._target.config, config.init)
        self._taps = config.kind.taps(self._target.config)
        self._shape = {
            "target": self._target.name,
            "head": config.kind.facts(),
            "taps": list(self._taps),
        }
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
            self._hearers.say(f"skipped: {fault}")
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
        with LLM(
            collecting(self._config.target), speculators=[listener], progress=self._hearers.progress
        ) as llm:
            chat = llm.tokenizer.has_chat_template if self._config.chat is None else self._config.chat
            collector = Collector(llm, listener, chat=chat, max_tokens=self._config.max_tokens)
            found = collector.run(prompts.asked, corpus, left, self._hearers.progress, self._hearers.clock)
        self._hearers.say(_told(found, corpus))

    def _train(self, sources: Sequence[str]) -> Figures:
        config, corpus = self._config, self._corpus
        torch.set_num_threads(thread_count(config.target.threads))
        texts = held_out_texts(corpus)
        if not texts or not corpus.count(held_out=False):
            raise TuneError(
                f"{corpus.tokens} tokens were collected, too few to learn from and to measure with; "
                "--resume with more minutes or prompts"
            )
        total = 60 * config.minutes
        seconds = max(total - corpus.seconds, _LEAST_TRAINING * total)
        training = self._training(AllLessons(corpus), sources)
        if training.trainer.state.seconds >= seconds:
            self._hearers.say(f"the {config.minutes:g} minutes are over; --resume with more goes on")
        return training.run(seconds)

    def _training(self, lessons: Lessons, sources: Sequence[str]) -> Training:
        config, corpus = self._config, self._corpus
        return Training(
            config,
            self._target,
            lessons,
            held_out_texts(corpus),
            Place(config.out, config.work / "checkpoint.safetensors"),
            material=Material.of(self._target.name, sources, corpus),
            seed=config.training.seed,
            hearers=self._hearers,
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
