"""The models, prompts and sizes of a run of the paper's questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import specinfer
from benchmarks.study import ask, total_figures
from specinfer import LLM, EngineConfig, SamplingParams, SpeculationFigures
from specinfer.engine.steps import TreeEvent
from specinfer.report.dataset import read_dataset
from specinfer.speculate.speculator import Speculator
from specinfer.tree.token_tree import draws_by_parent

Size = Literal["full", "quick", "toy"]
Value = TypeVar("Value")

# The paper's data sets and their files. Dolly stands in for Chatbot Instruction Prompts.
DATASETS: Final[Mapping[str, str]] = {
    "Alpaca": "alpaca",
    "CP": "chatgpt_prompts",
    "WebQA": "webquestions",
    "CIP": "dolly",
    "PIQA": "piqa",
}


@dataclass(slots=True, kw_only=True)
class Lab:
    """One run: its size, its models and its prompts. It keeps one model and its drafts open."""

    size: Size
    target: str  # Qwen2.5-Coder-1.5B
    draft: str  # the 0.5B
    small: str  # SmolLM2-135M, for which the package has a head
    prompts: Path
    _open: LLM | None = field(default=None, init=False)
    _key: tuple[str, ...] = field(default=(), init=False)

    def pick(self, *, full: Value, quick: Value, toy: Value) -> Value:
        """Return the value for this size."""
        return {"full": full, "quick": quick, "toy": toy}[self.size]

    def datasets(self) -> Sequence[str]:
        """Return the paper's names of the data sets: all, or two."""
        return self.pick(full=list(DATASETS), quick=["Alpaca", "WebQA"], toy=["Alpaca"])

    def questions(self, name: str, limit: int) -> list[str]:
        """Return the first `limit` prompts of a data set; `name` is the paper's, or a file's."""
        data = read_dataset(self.prompts / f"{DATASETS.get(name, name)}.jsonl").head(limit)
        return [conversation.turns[0] for conversation in data.conversations]

    def pair(self, name: str) -> tuple[str, list[str]]:
        """Return target and draft: "pair", two language models, or "head", SmolLM2 with the package's.

        Toy models have no head; a language model is in its place.
        """
        head = Path(specinfer.__file__).parent / "data" / "heads" / "smollm2-135m-head"
        own = self.draft if self.size == "toy" else str(head)
        return (self.target, [self.draft]) if name == "pair" else (self.small, [own])

    def llm(
        self, model: str, drafts: Sequence[str] = (), speculators: Sequence[Speculator] = (), **options: Any
    ) -> LLM:
        """Return an LLM; the weights are read again only for another model or other drafts.

        Drafts have the names that they have alone: "draft" of one. Trees have a fixed size and no lookups
        unless the options say otherwise.
        """
        options = {"tree_size": "fixed", "lookup": False, "max_context": 2048, **options}
        config = EngineConfig.from_options(model, {"drafts": tuple(drafts), **options})
        if self._open is None or model != self._key[0] or (drafts and {*drafts} != {*self._key[1:]}):
            self.close()
            self._open, self._key = LLM(config), (model, *drafts)
        found = zip(self._key[1:], self._open.config.speculation.drafts, strict=True)
        # Not a variant of the open model's config, which has the options of an earlier cell.
        chosen = tuple(path for name, path in found if name in drafts)
        return self._open.variant(config, speculators=speculators, drafts=chosen)

    def elsewhere(self, *models: str) -> None:
        """Free the models; a process of its own measures these."""
        self.close()
        self._key = models

    def known(self) -> set[str]:
        """Return the file names of all models of this run."""
        (small, heads), (target, drafts) = self.pair("head"), self.pair("pair")
        return {Path(name).name for name in (target, small, *drafts, *heads)}

    def models(self) -> list[str]:
        """Return the file names of the models that are open or measured elsewhere."""
        return [Path(name).name for name in self._key]

    def close(self) -> None:
        """Free the models."""
        if self._open is not None:
            self._open.close()
        self._open, self._key = None, ()


def answer(
    llm: LLM, questions: Sequence[str], *, temperature: float, max_tokens: int, **params: Any
) -> SpeculationFigures:
    """Return the figures of all answers; the seed of a question is its number."""
    each = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, **params)
        for seed in range(len(questions))
    ]
    return total_figures(ask(llm, questions, each))


def ranks(event: TreeEvent) -> list[int]:
    """Return the rank of each accepted guess among the guesses at its node; the first has 0."""
    below = draws_by_parent(event.tree.draws)
    guesses = [
        dict.fromkeys(draw.node for draw in below.get(node, ())) for node in (0, *event.acceptance.path)
    ]
    return [list(of).index(node) for of, node in zip(guesses, event.acceptance.path, strict=False)]
