"""EngineConfig: every option of the engine, composed, frozen, passed down, never mutated."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike, fspath
from typing import Any, Literal, get_args

from specinfer.errors import ConfigError
from specinfer.tree.draw import DrawRule
from specinfer.tree.expansion import Expansion
from specinfer.tree.pairs import PAIRS, DraftDraw, Verifier, draw_rule

Dtype = Literal["auto", "bfloat16", "float32"]
KernelChoice = Literal["auto", "native", "torch"]
Quantization = Literal["none", "int8", "int4"]
GenerationConfig = Literal["auto", "none"]
SpecialTokens = Literal["text", "special"]  # what their names are where users write them
TreeSize = Literal["cost", "fixed"]
Clock = Literal["measured", "curve"]
DraftTokens = Literal["auto", "shared", "text"]

USUAL_EXPANSION = Expansion((1, 1, 3, 1, 1))  # where there has to be one, and nobody says which
DEEPEST = 8  # levels of a draft's tree whose shape is learned
LEAST_SUFFIX_MEMORY = 1 << 20  # bytes; less is hardly a memory, and most likely meant as tokens


def _switch(purpose: str, *, on: bool = False) -> bool:
    """An option that switches a speculator on and off (speculate/table.py); `on` is its default."""
    switch: bool = field(default=on, metadata={"switch": purpose})
    return switch


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Who guesses, in which shape, and how the guesses are verified."""

    drafts: tuple[str, ...] = ()  # models, each named as `model` is
    draft_quantization: Quantization = "none"  # how their matrices are kept, as `quantization`
    draft_vocabulary: int | str | None = None  # tokens drafts can name: how many, or a file of ids; None: all
    # What drafts of another vocabulary guess: tokens both have, or text; auto: text unless a law is needed.
    draft_tokens: DraftTokens = "auto"
    ngram: bool = _switch("Look guesses up in the text itself.", on=True)
    ngram_min: int = 1  # tokens that must match, at least
    ngram_max: int = 4  # and at most; longer matches are tried first
    ngram_branches: int = 1  # earlier occurrences that become branches
    ngram_depth: int = 7  # tokens of a branch
    suffix: bool = _switch("Look guesses up in the text and in earlier answers, as trees.")
    suffix_depth: int = 16  # tokens of a guess
    suffix_nodes: int = 32  # of a guessed tree, the root included
    suffix_memory: int = 16 << 20  # bytes for earlier answers, over all cache salts; 0 keeps none
    prediction_depth: int = 15  # tokens guessed at once from a request's `prediction`
    prediction_branches: int = 4  # ways to go on that are guessed after a difference
    forced_depth: int = 16  # tokens guessed at once where a grammar leaves no choice
    # How drafts' trees grow, level by level; learned: where guesses are likely, as the policy finds; trees of
    # samples, whose shape nothing they hold may decide, are USUAL_EXPANSION then. None: learned where trees
    # are sized by cost, else USUAL_EXPANSION.
    expansion: Expansion | Literal["learned"] | None = None
    max_nodes: int = 64  # of one request's tree in one step, the root included
    tree_size: TreeSize = "cost"  # cost: of all that, what is expected to be fastest here; fixed: all of it
    clock: Clock = (
        "measured"  # what a step takes, for tree sizes: measured while it runs; curve: as at the start
    )
    verifier: Verifier = "coupled"
    draw: DraftDraw | None = None  # how drafts draw; None: the verifier's own rule

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafts", _model_names("drafts", self.drafts))
        _choice("draft_quantization", self.draft_quantization, get_args(Quantization))
        object.__setattr__(self, "draft_vocabulary", _vocabulary(self.draft_vocabulary))
        _choice("draft_tokens", self.draft_tokens, get_args(DraftTokens))
        if self.expansion is not None and self.expansion != "learned":
            try:
                object.__setattr__(self, "expansion", Expansion.of(self.expansion))
            except ConfigError as error:
                raise ConfigError(f"{error}; or learned") from None
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed: True or False")
        _choice("tree_size", self.tree_size, get_args(TreeSize))
        if self.expansion == "learned" and self.tree_size == "fixed":
            raise ConfigError(
                "expansion is 'learned' with tree_size 'fixed': such a shape is found by costs; allowed "
                f"there: widths, for example {USUAL_EXPANSION}; give some, or leave one of the two out"
            )
        _choice("clock", self.clock, get_args(Clock))
        _choice("verifier", self.verifier, tuple(PAIRS))
        if self.draw is not None and self.draw not in tuple(PAIRS[self.verifier].draws):
            raise ConfigError(
                f"draw is {self.draw!r} with the {self.verifier} verifier; allowed there: "
                f"{', '.join(PAIRS[self.verifier].draws)}: any other pair would change the output law"
            )
        _at_least("max_nodes", self.max_nodes, 1)
        _at_least("ngram_min", self.ngram_min, 1)
        _at_least("ngram_max", self.ngram_max, self.ngram_min)
        _at_least("ngram_branches", self.ngram_branches, 1)
        _at_least("ngram_depth", self.ngram_depth, 1)
        _at_least("suffix_depth", self.suffix_depth, 1)
        _at_least("suffix_nodes", self.suffix_nodes, 2)
        _at_least("suffix_memory", self.suffix_memory, 0)
        if 0 < self.suffix_memory < LEAST_SUFFIX_MEMORY:
            raise ConfigError(
                f"suffix_memory is {self.suffix_memory}; allowed: 0, or {LEAST_SUFFIX_MEMORY} and more. It "
                f"counts bytes, no longer tokens: so many tokens take about {64 * self.suffix_memory}"
            )
        _at_least("prediction_depth", self.prediction_depth, 1)
        _at_least("prediction_branches", self.prediction_branches, 1)
        _at_least("forced_depth", self.forced_depth, 1)

    @property
    def draw_rule(self) -> DrawRule:
        """The rule the draft models draw by."""
        rules = PAIRS[self.verifier].draws
        return rules[self.draw] if self.draw is not None else draw_rule(self.verifier)

    @property
    def learns_shape(self) -> bool:
        """Whether drafts' trees grow as the policy finds; a fixed tree size leaves it nothing to find."""
        return self.tree_size == "cost" and not isinstance(self.expansion, Expansion)

    @property
    def fixed_expansion(self) -> Expansion:
        """The shape of trees that have one."""
        return self.expansion if isinstance(self.expansion, Expansion) else USUAL_EXPANSION

    @property
    def deepest(self) -> int:
        """The most levels that drafts' trees have where a request does not say."""
        return DEEPEST if self.learns_shape else self.fixed_expansion.depth

    @property
    def shape(self) -> str:
        """How drafts' trees grow, as it is written: what `expansion` says or comes to."""
        return "learned" if self.learns_shape else str(self.fixed_expansion)

    def with_tree_size(self, size: TreeSize) -> SpeculationConfig:
        """The same with trees of this size; a learned shape, which fixed ones have not, is not asked for."""
        keeps = size == "cost" or isinstance(self.expansion, Expansion)
        return replace(self, tree_size=size, expansion=self.expansion if keeps else None)

    @property
    def enabled(self) -> bool:
        """Whether anybody is asked to guess; what a request brings along is guessed from in any case."""
        return bool(self.drafts) or any(getattr(self, name) for name in SWITCHES)


# The options that switch a speculator on, with what each is for.
SWITCHES = {f.name: f.metadata["switch"] for f in fields(SpeculationConfig) if "switch" in f.metadata}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The block-managed KV cache."""

    block_size: int = 16  # cache positions per block
    memory: int | None = None  # bytes for all KV caches together; None: from what is free
    prefix_reuse: bool = True  # requests that begin alike, with the same cache_salt, share blocks

    def __post_init__(self) -> None:
        _at_least("block_size", self.block_size, 1)
        if self.memory is not None:
            _at_least("kv_cache_memory", self.memory, 1)
        if not isinstance(self.prefix_reuse, bool):
            raise ConfigError(f"prefix_reuse is {self.prefix_reuse!r}; allowed: True or False")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The request scheduler."""

    max_batch_size: int = 16  # requests that run in one step
    max_step_tokens: int = 512  # rows of one target pass: prompt chunks and tree nodes together
    max_context: int | None = None  # prompt + output tokens; None: the model's own limit

    def __post_init__(self) -> None:
        _at_least("max_batch_size", self.max_batch_size, 1)
        _at_least("max_step_tokens", self.max_step_tokens, 1)
        if self.max_context is not None:
            _at_least("max_context", self.max_context, 2)
        if self.max_step_tokens < self.max_batch_size:
            raise ConfigError(
                f"max_step_tokens is {self.max_step_tokens}, less than max_batch_size "
                f"({self.max_batch_size}); every running request needs at least one row: raise it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: its target, its speculators, its memory."""

    model: str
    dtype: Dtype = "auto"  # auto: bfloat16 where the device multiplies it natively, else float32
    device: str = "auto"  # auto: the first CUDA device, else the CPU
    quantization: Quantization = "none"  # none: matrices in `dtype`; int8, int4: fewer bits, on the CPU only
    kernels: KernelChoice = "auto"  # auto: native ones on a CPU where they can be built, else PyTorch's
    threads: int | None = None  # that compute on the CPU; None: the physical cores this process may use
    chat_template: str | None = None  # a file with a Jinja template in place of the model's own
    generation_config: GenerationConfig = "auto"  # auto: sample as the model recommends where nobody says how
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(
                f"model is {self.model!r}; allowed: a folder, a GGUF file, a hub id or a catalogue name"
            )
        _choice("dtype", self.dtype, get_args(Dtype))
        _choice("kernels", self.kernels, get_args(KernelChoice))
        _choice("quantization", self.quantization, get_args(Quantization))
        if self.threads is not None:
            _at_least("threads", self.threads, 1)
        _choice("generation_config", self.generation_config, get_args(GenerationConfig))
        if self.chat_template is not None:
            if not isinstance(self.chat_template, (str, PathLike)) or not fspath(self.chat_template):
                raise ConfigError(
                    f"chat_template is {self.chat_template!r}; allowed: the path of a file, or None"
                )
            object.__setattr__(self, "chat_template", fspath(self.chat_template))
        if not isinstance(self.device, str):
            raise ConfigError(f"device is {self.device!r}; allowed: auto, cpu, cuda, cuda:N")

    @classmethod
    def from_options(cls, model: str, options: Mapping[str, Any]) -> EngineConfig:
        """An EngineConfig from flat options, as LLM(...) and the command line have them.

        Raises ConfigError as `with_options` does.
        """
        return cls(model=model).with_options(options)

    def with_options(self, options: Mapping[str, Any]) -> EngineConfig:
        """The same but for these flat options: fields of this class and of its three parts.

        Raises ConfigError on an unknown option, naming the nearest known one, and on a wrong value.
        """
        parts = {"speculation": SpeculationConfig, "cache": CacheConfig, "scheduler": SchedulerConfig}
        owner = {f.name: (part, f.name) for part, kind in parts.items() for f in fields(kind)}
        owner["kv_cache_memory"] = owner.pop("memory")[0], "memory"
        own = {f.name for f in fields(self)} - {"model", *parts}
        known = own | set(owner)
        of_parts: dict[str, dict[str, Any]] = {part: {} for part in parts}
        top: dict[str, Any] = {}
        for name, value in options.items():
            if name in own:
                top[name] = value
            elif name in owner:
                part, attribute = owner[name]
                of_parts[part][attribute] = value
            else:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
                raise ConfigError(f"unknown option {name!r}; {hint}")
        changed = {part: replace(getattr(self, part), **values) for part, values in of_parts.items()}
        return replace(self, **top, **changed)


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")


def _model_names(name: str, value: object) -> tuple[str, ...]:
    """One name, or several, as several."""
    if isinstance(value, (str, PathLike)):
        value = (value,)
    names = (
        tuple(fspath(n) if isinstance(n, PathLike) else n for n in value)
        if isinstance(value, Iterable)
        else (None,)
    )
    if not all(isinstance(n, str) and n for n in names):
        raise ConfigError(f"{name} is {value!r}; allowed: model names, each a non-empty string")
    return names


def _vocabulary(value: object) -> int | str | None:
    """A number of tokens, or its text, or the path of a file of ids; 0 is all, like None."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value or None
    if isinstance(value, (str, PathLike)) and fspath(value):
        return str(fspath(value))
    if value is None:
        return None
    raise ConfigError(
        f"draft_vocabulary is {value!r}; allowed: how many tokens to keep, or the path of a file of token ids"
    )


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}; allowed: an integer >= {least}")


# Ordinary decoding: one-node trees, whatever a request's grammar or prediction would let somebody guess.
NO_SPECULATION = SpeculationConfig(ngram=False, max_nodes=1, tree_size="fixed")
