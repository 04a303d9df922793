"""A tuning: collects answers, trains drafts and keeps the best, in a folder that a later run can resume.

    OUT     config.json, model.safetensors, README.md     the best draft so far: `--draft OUT`
            work    tuning.json                           settings: the target, the draft's shape
                    shards                                collected answers
                    checkpoint.safetensors                the training's state

With several members each has its own folder and state, and OUT itself holds the pool:

    OUT     pool.json                                     its members: `--draft OUT`
            member1, member2, ...                         each as above
            work    member1.safetensors, ...              the trainings' states

A process that is killed loses the work since the last shard or checkpoint. Time is counted over all runs: a
run with `--resume` and the same minutes spends what earlier runs left.
"""

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
from specinfer.hub.model_files import MAX_MEMBERS, POOL_FILE
from specinfer.kernels.machine import thread_count
from specinfer.llm import LLM
from specinfer.models.open_model import open_model
from specinfer.progress import NoProgress, Progress
from specinfer.tune.boosting import DiscountedSet, Proposals, proposals
from specinfer.tune.card import TrainingMaterial
from specinfer.tune.collector import Collector, HiddenStateListener, collecting_config
from specinfer.tune.dataset import Corpus, TrainingSet
from specinfer.tune.draft import Kind, Target
from specinfer.tune.evaluation import (
    TokenRanks,
    figures_of,
    held_out_texts,
    rank_tokens,
    read_draft,
)
from specinfer.tune.head_draft import BlockKind
from specinfer.tune.prompts import Prompts
from specinfer.tune.selection import (
    Costs,
    MeasuredDraft,
    Selection,
    TuneResult,
    add_speed_section,
    candidates_of,
    make_pool,
    measured_costs,
)
from specinfer.tune.trainer import TrainConfig, keep_freed_memory
from specinfer.tune.training import Outputs, Training, TrainingFiles

_MIN_TRAINING: Final = 1 / 3  # minimum fraction of the time for training, however long collecting took
_SEEDS_APART: Final = 101  # between members


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """Options of a tuning."""

    target: EngineConfig
    out: Path
    minutes: float = 30.0  # total over all runs
    collect_minutes: float | None = None  # part of `minutes` for collecting; None: a third
    resume: bool = False
    chat: bool | None = None  # apply the chat template to prompts; None: if the model has one
    max_tokens: int = 256  # per answer
    init: str | None = None  # target, random, or a folder of an exported draft; None: the kind's default
    kind: Kind = field(default_factory=BlockKind)
    members: int = 1  # drafts, which share the time
    training: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise TuneError(f"minutes is {self.minutes}; allowed: more than 0")
        if not 1 <= self.members <= MAX_MEMBERS:
            raise TuneError(f"members is {self.members}; allowed: 1 to {MAX_MEMBERS}")
        if self.collect_minutes is not None and not 0 <= self.collect_minutes < self.minutes:
            raise TuneError(
                f"collect_minutes is {self.collect_minutes}; allowed: 0 or more, and less than the "
                f"{self.minutes} minutes in all"
            )

    @property
    def work(self) -> Path:
        """Folder with the state for later runs."""
        return self.out / "work"

    @property
    def collect_seconds(self) -> float:
        """Time for collecting, over all runs."""
        return 60 * (self.minutes / 3 if self.collect_minutes is None else self.collect_minutes)


class Tuning:
    """One run of a tuning.

    `say` receives report lines, `clock` returns seconds, `costs` returns the costs of passes.
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
        """Writes nothing yet; raises TuneError if the folder belongs to another tuning.

        Raises ModelError or a subclass if the target cannot be found or is not supported.
        """
        self._config = config
        self._outputs = Outputs(progress or NoProgress(), say, clock)
        files = resolve(config.target.model, progress=self._outputs.progress)
        self._target = Target(files, open_model(files))
        # Only a first member that is not resumed begins as `init`; others begin as the member before.
        init = None if self._files(0).checkpoint.exists() else config.init
        config.kind.check(self._target.config, init)
        self._costs = costs
        self._taps = config.kind.taps(self._target.config)
        self._shape: dict[str, object] = {
            "target": self._target.name,
            "head": config.kind.facts(),
            "taps": list(self._taps),
        }
        if config.members > 1:
            self._shape["members"] = config.members
        self._check_folder()
        self._corpus = Corpus(config.work / "shards")
        for name in self._corpus.damaged:
            say(f"{config.work / 'shards' / name} is damaged and is left out")

    @property
    def vocab(self) -> int:
        """Number of the target's tokens."""
        return self._target.config.vocab_size

    def run(self, prompts: Prompts, sources: Sequence[str]) -> TuneResult:
        """Collect and train until the time is spent; return the figures of the best draft or the pool.

        `sources` are the names of the prompt files. Raises TuneError if there is nothing to learn from,
        OSError if the disk is full; the saved state can be resumed.
        """
        self.collect(prompts)
        return self.train(sources)

    def collect(self, prompts: Prompts) -> None:
        """Collect until the time for it is spent; raises as `run`."""
        for fault in prompts.faults:
            self._outputs.say(f"skipped: {fault}")
        with self._reporting_disk_errors():
            self._collect(prompts)

    def train(self, sources: Sequence[str]) -> TuneResult:
        """Train on the collected answers until the time is spent; returns and raises as `run`."""
        with self._reporting_disk_errors():
            return self._train(sources)

    @contextmanager
    def _reporting_disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TuneError(
                f"cannot write to {self._config.out}: {error.strerror or error}; free some space; --resume "
                "continues from the saved state"
            ) from error

    @property
    def _facts(self) -> Path:
        return self._config.work / "tuning.json"

    def _write_facts(self) -> None:
        """Mark the folder as this tuning's, before the first file is written."""
        (self._config.work / "shards").mkdir(parents=True, exist_ok=True)
        write_text(self._facts, json.dumps(self._shape))

    def _check_folder(self) -> None:
        """Raise TuneError if the folder belongs to another tuning or holds a model."""
        facts = self._facts
        if facts.exists():
            if not self._config.resume:
                raise TuneError(f"{self._config.out} holds a tuning already; --resume continues it")
            known = _read(facts)
            for name in (*self._shape, *known):  # includes settings that only pools have
                if known.get(name) != self._shape.get(name):
                    raise TuneError(
                        f"the tuning in {self._config.out} has {name} {known.get(name)}, and this one has "
                        f"{self._shape.get(name)}; name another folder, or give the same options"
                    )
        elif self._config.resume:
            raise TuneError(f"{self._config.out} has no tuning to resume; leave --resume out")
        elif any((self._config.out / name).exists() for name in ("config.json", POOL_FILE)):
            raise TuneError(f"{self._config.out} holds a model already; name another folder")

    def _collect(self, prompts: Prompts) -> None:
        corpus = self._corpus
        left = self._config.collect_seconds - corpus.seconds
        known = corpus.keys
        if left <= 0 or all(one.key in known for one in prompts.prompts):
            if not corpus.tokens:
                raise TuneError("nothing was collected and no time is left for collecting; give more minutes")
            return
        listener = HiddenStateListener((*self._taps, self._target.config.num_layers))
        with LLM(
            collecting_config(self._config.target), speculators=[listener], progress=self._outputs.progress
        ) as llm:
            chat = llm.tokenizer.has_chat_template if self._config.chat is None else self._config.chat
            config = self._config
            collector = Collector(
                llm, listener, chat=chat, max_tokens=config.max_tokens, seed=config.training.seed
            )
            self._write_facts()
            found = collector.run(prompts.prompts, corpus, left, self._outputs.progress, self._outputs.clock)
        self._outputs.say(found.summary(corpus))

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
        self._write_facts()
        total = 60 * config.minutes
        share = max(total - corpus.seconds, _MIN_TRAINING * total) / config.members
        known: list[Proposals] = []
        members: list[MeasuredDraft] = []
        late = 0
        for number in range(config.members):
            dataset = DiscountedSet(corpus, known)
            training = self._training(dataset, sources, number, [one.ranks for one in members])
            late += training.trainer.state.seconds >= share
            if late == config.members:
                self._outputs.say(f"the {config.minutes:g} minutes are spent; --resume with more continues")
            training.run(share)
            files = self._files(number)
            draft = read_draft(files.folder, self._target, training.trainer.draft.depth)
            members.append(MeasuredDraft(files.folder, draft, rank_tokens(draft, texts)))
            if number + 1 < config.members:
                known.append(proposals(draft, corpus, self._outputs.progress))
        return self._select(members, TrainingMaterial.of(self._target, sources, corpus))

    def _training(
        self,
        dataset: TrainingSet,
        sources: Sequence[str],
        number: int = 0,
        earlier: Sequence[TokenRanks] = (),
    ) -> Training:
        """The training of a member; `number` counts from 0."""
        config, corpus = self._config, self._corpus
        if config.members > 1:
            self._outputs.say(f"member {number + 1} of {config.members} learns from {len(dataset)} texts")
        init = str(self._files(number - 1).folder) if number else config.init
        return Training(
            config.kind,
            replace(config.training, seed=config.training.seed + _SEEDS_APART * number),
            self._target,
            dataset,
            held_out_texts(corpus),
            self._files(number),
            earlier=tuple(earlier),
            material=TrainingMaterial.of(self._target, sources, corpus),
            init=init,
            outputs=self._outputs,
        )

    def _files(self, number: int) -> TrainingFiles:
        """Paths of a member's files; a single draft is in the folder itself."""
        config = self._config
        if config.members == 1:
            return TrainingFiles(config.out, config.work / "checkpoint.safetensors")
        name = member_name(number)
        return TrainingFiles(config.out / name, config.work / f"{name}.safetensors")

    def _select(self, members: Sequence[MeasuredDraft], material: TrainingMaterial) -> TuneResult:
        """Report costs, select members and write the pool."""
        config = self._config
        costs = self._costs(config.target, [one.folder for one in members], self._outputs.progress)
        candidates = candidates_of(members, costs)
        selection = Selection(candidates, costs.target)
        for line in selection.lines():
            self._outputs.say(line)
        if config.members > 1:
            make_pool(config.out, members, config.kind.name, selection, material)
        else:
            add_speed_section(config.out, selection)
        chosen = [one.ranks for one in candidates[: len(selection.best.names)]]
        figures = figures_of(chosen[0], chosen[1:])
        return TuneResult(replace(figures, tokens_per_pass=figures.worth), selection)


def member_name(number: int) -> str:
    """Folder name of a pool's member; `number` counts from 0."""
    return f"member{number + 1}"


def _read(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise TuneError(f"{path} is damaged; name another folder")
    return found
