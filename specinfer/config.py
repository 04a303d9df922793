"""EngineConfig: every option of the engine, composed, frozen, passed down, never mutated."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike, fspath
from typing import Any, Final, Literal, get_args

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
Lookup = bool | Literal["auto"]

USUAL_EXPANSION = Expansion((1, 1, 3, 1, 1))  # where there has to be one, and nobody says which
DEEPEST = 8  # levels of a draft's tree whose shape is learned
LONGEST_MATCH = 32  # tokens that are compared; a longer match is no better a guess
LEAST_LOOKUP_MEMORY = 1 << 20  # bytes; less is hardly a memory, and most likely meant as tokens

# Speculators that were two and are one: options, requests and metrics may still call it so.
OLD_NAMES: Final = {"ngram": "lookup", "suffix": "lookup"}
OLD_OPTIONS: Final = {
    **OLD_NAMES,
    **{"ngram_min": "lookup_min", "ngram_depth": "lookup_depth"},
    **{f"suffix_{part}": f"lookup_{part}" for part in ("depth", "nodes", "memory")},
}
GONE_OPTIONS: Final = {  # options, and why nobody needs them
    "ngram_max": "longer matches are always looked for first",
    "ngram_branches": "guesses are trees, of at most lookup_nodes nodes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Who guesses, in which shape, and how the guesses are verified."""

    drafts: tuple[str, ...] = ()  # models, each named as `model` is
    draft_quantization: Quantization = "none"  # how their matrices are kept, as `quantization`
    draft_vocabulary: int | str | None = None  # tokens drafts can name: how many, or a file of ids; None: all
    # What drafts of another vocabulary guess: tokens both have, or text; auto: text unless a law is needed.
    draft_tokens: DraftTokens = "auto"
    # Guesses looked up in the text and in earlier answers; auto: where native kernels can be had for it.
    lookup: Lookup = "auto"
    lookup_min: int = 1  # tokens that must match, at least
    lookup_depth: int = 16  # tokens of a guess
    lookup_nodes: int = 32  # of a guessed tree, the root included
    lookup_memory: int = 16 << 20  # bytes for earlier answers, over all cache salts; 0 keeps none
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
        if not isinstance(self.lookup, bool) and self.lookup != "auto":
            raise ConfigError(f"lookup is {self.lookup!r}; allowed: True, False or 'auto'")
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
        _at_least("lookup_min", self.lookup_min, 1)
        _at_least("lookup_depth", self.lookup_depth, 1)
        _at_least("lookup_nodes", self.lookup_nodes, 2)
        _at_least("lookup_memory", self.lookup_memory, 0)
        if self.lookup_min > LONGEST_MATCH:
            raise ConfigError(f"lookup_min is {self.lookup_min}; allowed: 1 to {LONGEST_MATCH} tokens")
        if 0 < self.lookup_memory < LEAST_LOOKUP_MEMORY:
            raise ConfigError(
                f"lookup_memory is {self.lookup_memory}; allowed: 0, or {LEAST_LOOKUP_MEMORY} and more. It "
                f"counts bytes, no longer tokens: so many tokens take about {64 * self.lookup_memory}"
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
        return bool(self.drafts or self.lookup)


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

        Old names are taken (`new_names`). Raises ConfigError on an unknown option, naming the nearest known
        one, and on a wrong value.
        """
        options = new_names(options)
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


def new_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options under the names they have now; raises ConfigError for one that is gone or given twice.

    `ngram` and `suffix` switch the same speculator on: it is on where one of the two is.
    """
    renamed: dict[str, Any] = {}
    for old, value in options.items():
        if old in GONE_OPTIONS:
            raise ConfigError(f"{old} is no option any more: {GONE_OPTIONS[old]}; leave it out")
        name = OLD_OPTIONS.get(old, old)
        if name == "lookup":
            value = renamed.get(name) or value
        elif renamed.get(name, value) != value:
            raise ConfigError(f"{name} is {renamed[name]!r} and {value!r}, once by an old name; give it once")
        renamed[name] = value
    return renamed


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
NO_SPECULATION = SpeculationConfig(lookup=False, max_nodes=1, tree_size="fixed")
