"""A tuning: collect, train, keep the best; in a folder that any later run can go on from.

    OUT     config.json, model.safetensors, README.md     the best draft so far: `--draft OUT`
            training.png                                  loss and held-out guesses, if matplotlib is there
            work    tuning.json                           what it is for: the target, the draft's shape
                    shards                                what was collected
                    checkpoint.safetensors                the training's state

With several members each has a folder and a state of its own, and the pool is in the folder itself:

    OUT     pool.json                                     which of them are in it: `--draft OUT`
            member1, member2, ...                         each as above
            work    member1.safetensors, ...              the trainings' states

A process that is killed loses what came after the last shard or checkpoint. Time counts over all runs: a run
with `--resume` and the same minutes does what the earlier ones left.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch

from specinfer.config import EngineConfig
from specinfer.errors import TuneError
from specinfer.files import write_text
from specinfer.hub import resolve
from specinfer.hub.pool import MOST_MEMBERS, is_pool
from specinfer.kernels.machine import thread_count
from specinfer.llm import LLM
from specinfer.models.weights import open_model
from specinfer.progress import NoProgress, Progress
from specinfer.tune.boosting import BoostConfig, Proposals, dataset_of, proposals
from specinfer.tune.card import Material
from specinfer.tune.collector import Collector, HiddenStateListener, collecting
from specinfer.tune.dataset import Corpus, TrainingSet
from specinfer.tune.draft import Kind, Target
from specinfer.tune.evaluation import (
    Along,
    Incumbent,
    PairedComparison,
    along,
    figures_of,
    held_out_texts,
    read_draft,
    replace_folder,
    taps_of,
)
from specinfer.tune.head_kinds import BlockKind
from specinfer.tune.prompts import Prompts
from specinfer.tune.selection import (
    Costs,
    MeasuredDraft,
    Selection,
    TuneResult,
    add_worth,
    best_shapes,
    candidates_of,
    make_pool,
    measured_costs,
)
from specinfer.tune.trainer import TrainConfig, keep_freed_memory
from specinfer.tune.training import Hearers, Training, TrainingFiles

_LEAST_TRAINING: Final = 1 / 3  # of the time, whatever collecting took
_SEEDS_APART: Final = 101  # of members


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """One tuning; what it may be gone on with is in its folder."""

    target: EngineConfig
    out: Path
    minutes: float = 30.0  # in all, over all runs
    collect_minutes: float | None = None  # of these; None: a third
    resume: bool = False
    chat: bool | None = None  # prompts go through the chat template; None: where there is one
    max_tokens: int = 256  # of an answer
    replace: Path | None = None  # the head or pool in this folder is replaced where that is worth it
    init: str | None = None  # target, random, or an exported draft to go on from; None: as the kind allows
    kind: Kind = field(default_factory=BlockKind)
    members: int = 1  # drafts, which share the time
    boost: BoostConfig | None = None  # how the later ones are boosted; None: as usual
    training: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise TuneError(f"minutes is {self.minutes}; allowed: more than 0")
        if not 1 <= self.members <= MOST_MEMBERS:
            raise TuneError(f"members is {self.members}; allowed: 1 to {MOST_MEMBERS}")
        if self.boost is not None and self.members == 1:
            boost = f"{self.boost.form}, {'warm' if self.boost.warm else 'cold'}"
            raise TuneError(f"boost is {boost}, and a single member has nobody to be boosted by")
        if self.replace is not None:
            old, new = self.replace.expanduser().resolve(), self.out.expanduser().resolve()
            if old == new or old in new.parents or new in old.parents or not old.name:
                raise TuneError(
                    f"what is to be replaced is in {self.replace}, and what is tuned goes into {self.out}; "
                    "allowed: two folders, neither of them in the other"
                )
        if self.collect_minutes is not None and not 0 <= self.collect_minutes < self.minutes:
            raise TuneError(
                f"{self.collect_minutes} minutes are to collect in, of {self.minutes} in all; allowed: 0 or "
                "more, and fewer than these"
            )

    @property
    def boosting(self) -> BoostConfig:
        """How members are boosted."""
        return self.boost or BoostConfig()

    @property
    def work(self) -> Path:
        """What later runs go on from."""
        return self.out / "work"

    @property
    def collect_seconds(self) -> float:
        """What collecting may take, over all runs."""
        return 60 * (self.minutes / 3 if self.collect_minutes is None else self.collect_minutes)


class Tuning:
    """One run.

    `say` is told each line for a person, `clock` counts seconds, `costs` says what passes cost.
    """

    def __init__(
        self,
        config: TuneConfig,
        *,
        progress: Progress | None = None,
        say: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
        costs: Costs = measured_costs,
    ) -> None:
        """Writes nothing yet; raises TuneError where the folder is another tuning's.

        Raises ModelError and its kind for a target that cannot be found, or that no head is trained for.
        """
        self._config = config
        self._hearers = Hearers(progress or NoProgress(), say, clock)
        files = resolve(config.target.model, progress=self._hearers.progress)
        self._target = Target(files, open_model(files))
        config.kind.check(self._target.config, config.init if self._begins else None)
        old = config.replace
        self._incumbent = None if old is None else Incumbent(old.expanduser().resolve(), self._target)
        self._costs = costs
        own_taps = config.kind.taps(self._target.config)
        their_taps = () if self._incumbent is None else self._incumbent.taps()
        self._taps = tuple(sorted({*own_taps, *their_taps}))
        self._shape: dict[str, object] = {
            "target": self._target.name,
            "head": config.kind.facts(),
            "taps": list(self._taps),
        }
        if config.members > 1:
            self._shape |= {"members": config.members, "boost": config.boosting.facts()}
        self._check_folder()
        self._corpus = self._reading(own_taps)
        for name in self._corpus.damaged:
            say(f"{config.work / 'shards' / name} is damaged and is left out")

    @property
    def _begins(self) -> bool:
        """Whether a draft is still to begin as the config says: what is resumed asks for it no more."""
        warm = self._config.members > 1 and self._config.boosting.warm
        beginning = range(1 if warm else self._config.members)
        return not all(self._files(number).checkpoint.exists() for number in beginning)

    @property
    def vocab(self) -> int:
        """The target's tokens."""
        return self._target.config.vocab_size

    def run(self, prompts: Prompts, sources: Sequence[str]) -> TuneResult:
        """Collect and train until the time is over; what the best draft, or the pool, is worth.

        `sources` are the names of what prompts were read from. Raises TuneError where nothing can be learnt,
        OSError where the disk is full: what was kept until then can be gone on from.
        """
        self.collect(prompts)
        return self.train(sources)

    def collect(self, prompts: Prompts) -> None:
        """Collect until the time for that is over; raises as `run`."""
        for fault in prompts.faults:
            self._hearers.say(f"skipped: {fault}")
        with self._telling_of_the_disk():
            self._collect(prompts)

    def train(self, sources: Sequence[str]) -> TuneResult:
        """Train on what was collected, until the time is over; returns and raises as `run`."""
        with self._telling_of_the_disk():
            return self._train(sources)

    @contextmanager
    def _telling_of_the_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TuneError(
                f"cannot write to {self._config.out}: {error.strerror or error}; make room, and --resume "
                "goes on from what was kept"
            ) from error

    @property
    def _facts(self) -> Path:
        return self._config.work / "tuning.json"

    def _claim(self) -> None:
        """Make the folder this tuning's, now that there is something to be put into it."""
        (self._config.work / "shards").mkdir(parents=True, exist_ok=True)
        write_text(self._facts, json.dumps(self._shape))

    def _check_folder(self) -> None:
        """Raise TuneError where the folder is not this tuning's, and cannot be."""
        facts = self._facts
        if facts.exists():
            if not self._config.resume:
                raise TuneError(f"{self._config.out} has a tuning in it; --resume goes on with it")
            known = _read(facts)
            for name in (*self._shape, *known):  # of what a single draft lacks, too
                if known.get(name) != self._shape.get(name):
                    raise TuneError(
                        f"the tuning in {self._config.out} is of {name} {known.get(name)}, this one of "
                        f"{self._shape.get(name)}; name another folder, or the same options"
                    )
        elif self._config.resume:
            raise TuneError(f"{self._config.out} has no tuning to resume; leave --resume out")
        elif (self._config.out / "config.json").exists() or is_pool(self._config.out):
            raise TuneError(f"{self._config.out} has a model in it already; name another folder")

    def _collect(self, prompts: Prompts) -> None:
        corpus = self._corpus
        left = self._config.collect_seconds - corpus.seconds
        known = corpus.keys
        if left <= 0 or all(one.key in known for one in prompts.asked):
            if not corpus.tokens:
                raise TuneError("nothing was collected, and no time is left for it; give more minutes")
            return
        listener = HiddenStateListener((*self._taps, self._target.config.num_layers))
        with LLM(
            collecting(self._config.target), speculators=[listener], progress=self._hearers.progress
        ) as llm:
            chat = llm.tokenizer.has_chat_template if self._config.chat is None else self._config.chat
            config = self._config
            collector = Collector(
                llm, listener, chat=chat, max_tokens=config.max_tokens, seed=config.training.seed
            )
            self._claim()
            found = collector.run(prompts.asked, corpus, left, self._hearers.progress, self._hearers.clock)
        self._hearers.say(found.told(corpus))

    def _train(self, sources: Sequence[str]) -> TuneResult:
        config, corpus = self._config, self._corpus
        torch.set_num_threads(thread_count(config.target.threads))
        keep_freed_memory()
        texts = held_out_texts(corpus)
        if not texts or not corpus.count(held_out=False):
            raise TuneError(
                f"{corpus.tokens} tokens were collected, too few to learn from and to measure with; "
                "--resume with more minutes or prompts"
            )
        self._claim()
        total = 60 * config.minutes
        share = max(total - corpus.seconds, _LEAST_TRAINING * total) / config.members
        known: list[Proposals] = []
        members: list[MeasuredDraft] = []
        late = 0
        for number in range(config.members):
            dataset = dataset_of(corpus, config.boosting.form, known)
            training = self._training(dataset, sources, number, [one.along for one in members])
            late += training.trainer.state.seconds >= share
            if late == config.members:
                self._hearers.say(f"the {config.minutes:g} minutes are over; --resume with more goes on")
            training.run(share)
            files = self._files(number)
            draft = read_draft(files.folder, self._target, training.trainer.draft.depth)
            members.append(MeasuredDraft(files.folder, draft, along(draft, texts)))
            if number + 1 < config.members and config.boosting.form != "none":
                known.append(proposals(draft, corpus, self._hearers.progress))
        return self._judged(members, Material.of(self._target, sources, corpus))

    def _training(
        self, dataset: TrainingSet, sources: Sequence[str], number: int = 0, earlier: Sequence[Along] = ()
    ) -> Training:
        """The training of a member, by its number from 0 on."""
        config, corpus = self._config, self._corpus
        if config.members > 1:
            self._hearers.say(
                f"member {number + 1} of {config.members} learns from {len(dataset)} of "
                f"{corpus.count(held_out=False)} texts"
            )
        init = str(self._files(number - 1).folder) if number and config.boosting.warm else config.init
        return Training(
            config.kind,
            replace(config.training, seed=config.training.seed + _SEEDS_APART * number),
            self._target,
            dataset,
            held_out_texts(corpus),
            self._files(number),
            earlier=tuple(earlier),
            material=Material.of(self._target, sources, corpus),
            init=init,
            hearers=self._hearers,
        )

    def _files(self, number: int) -> TrainingFiles:
        """Where a member's files lie: a single one is the folder's own."""
        config = self._config
        if config.members == 1:
            return TrainingFiles(config.out, config.work / "checkpoint.safetensors")
        name = member_name(number)
        return TrainingFiles(config.out / name, config.work / f"{name}.safetensors")

    def _judged(self, members: Sequence[MeasuredDraft], material: Material) -> TuneResult:
        """Say what passes cost and who pays, make a pool of those, and let it replace what is worse."""
        config, old = self._config, self._incumbent
        former = [] if old is None else self._former(old, members[0].draft.depth)
        folders = [one.folder for one in (*members, *former)]
        costs = self._costs(config.target, folders, self._hearers.progress)
        everybody = candidates_of([*members, *former], costs)
        candidates, theirs = everybody[: len(members)], everybody[len(members) :]
        selection = Selection(candidates, costs.target)
        for line in selection.lines():
            self._hearers.say(line)
        if config.members > 1:
            make_pool(config.out, self._target, members, config.kind.name, selection, material)
        else:
            add_worth(config.out, selection)
        chosen = [candidates[number].along for number in selection.best.members]
        figures = figures_of(chosen[0], chosen[1:])
        if old is not None and not self._corpus.count(held_out=True):
            self._hearers.say(f"{old.folder} stays: no answer was held out that both could be measured along")
        elif old is not None:
            former_speed = best_shapes(theirs, costs.target, range(len(theirs)))
            texts_P = members[0].along.texts_P.numpy()
            comparison = PairedComparison.of(selection.best.of_texts(texts_P), former_speed.of_texts(texts_P))
            self._hearers.say(comparison.told(old.folder))
            if comparison.better:
                replace_folder(config.out, old.folder)
        return TuneResult(replace(figures, tokens_per_pass=figures.worth), selection)

    def _former(self, old: Incumbent, depth: int) -> list[MeasuredDraft]:
        """The drafts that may be replaced, along the same answers."""
        found: list[MeasuredDraft] = []
        for folder, draft in zip(old.members, old.drafts(depth), strict=True):
            corpus = self._reading(taps_of(folder, self._target))
            found.append(MeasuredDraft(folder, draft, along(draft, held_out_texts(corpus))))
        return found

    def _reading(self, taps: Sequence[int]) -> Corpus:
        """What was collected, with these taps of those that were."""
        return Corpus(self._config.work / "shards", [self._taps.index(tap) for tap in taps])


def member_name(number: int) -> str:
    """The folder of a pool's member, by its number from 0 on."""
    return f"member{number + 1}"


def _read(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise TuneError(f"{path} is damaged; name another folder")
    return found
