"""SpeculationConfig: who guesses, in which shape, and how the guesses are verified."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import Final, Literal

from specinfer.errors import ConfigError
from specinfer.option import check_options, option
from specinfer.tree.draw import PAIRS, DraftDraw, DrawRule, Verifier, draw_rule
from specinfer.tree.expansion import Expansion

Quantization = Literal["none", "int8", "int4", "gguf"]
TreeSize = Literal["cost", "fixed"]
Clock = Literal["measured", "curve"]
DraftTokens = Literal["auto", "shared", "text"]
Lookup = bool | Literal["auto"]

USUAL_EXPANSION = Expansion((1, 1, 3, 1, 1))  # where there has to be one, and nobody says which
DEEPEST = 8  # levels of a draft's tree whose shape is learned, in a model that is in memory
DEEPEST_STREAMED = 48  # the same, where a pass waits for its weights
_STREAMED: Final = f"{DEEPEST_STREAMED} where layers are streamed"
MOST_ROWS = 2048  # of a pass, and nodes of a tree, where costs decide how many
SELF = "self"  # the draft that is the target itself, in fewer bits
LONGEST_MATCH = 32  # tokens that are compared; a longer match is no better a guess
LEAST_LOOKUP_MEMORY = 1 << 20  # bytes; less is hardly a memory, and most likely meant as tokens

# Speculators that were two and are one: options, requests and metrics may still call it so.
OLD_NAMES: Final = {"ngram": "lookup", "suffix": "lookup"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Who guesses, in which shape, and how the guesses are verified."""

    drafts: tuple[str, ...] = option(
        (),
        "A draft model, or self: the target in 4 bits; repeatable.",
        more="Of any vocabulary, a [head](heads.md) that reads the target, or a [pool](boost-tuning.md) of "
        "both; several are merged into one tree. `self`: the target's own twin in int4, or int8 if "
        "`draft_quantization` says so ([offloading.md](offloading.md)); a folder of that name is `./self`.",
        flag="draft",
    )
    draft_quantization: Quantization = option("none", "As --quantization, of draft models.")
    draft_vocabulary: int | str | None = option(
        None,
        "Cut a draft's output layer to N common tokens, or to the token ids in a file.",
        shown="all",
    )
    draft_tokens: DraftTokens = option(
        "auto",
        "What drafts of another vocabulary guess: shared tokens, text, or auto.",
        more="`shared` tokens are those that both have; `text` is spelled again in the target's. `auto` is "
        "`text` under the coupled verifier, unless `draft_vocabulary` is set "
        "([how](losslessness.md#drafts-with-another-vocabulary)).",
    )
    lookup: Lookup = option(
        "auto",
        "Look guesses up in the text and in earlier answers.",
        more="Those of the same `cache_salt`. `auto`: where native kernels can be had for it.",
        switch=True,
        old=tuple(OLD_NAMES),
    )
    lookup_min: int = option(1, "Tokens that must match, at least.", least=1, old=("ngram_min",))
    lookup_depth: int | None = option(
        None, "Tokens of a guess.", shown=f"16; {_STREAMED}", least=1, old=("ngram_depth", "suffix_depth")
    )
    lookup_nodes: int | None = option(
        None,
        "Of a guessed tree, the root included.",
        shown="32; 128 where layers are streamed",
        least=2,
        old=("suffix_nodes",),
    )
    lookup_memory: int = option(
        16 << 20,
        "For earlier answers; 0 keeps none.",
        more="Bytes, over all cache salts, about 64 a token.",
        size=True,
        old=("suffix_memory",),
    )
    prediction_depth: int | None = option(
        None, "Tokens guessed at once from a request's prediction.", shown=f"15; {_STREAMED}", least=1
    )
    prediction_branches: int = option(4, "Ways to go on that are guessed after a difference.", least=1)
    forced_depth: int | None = option(
        None, "Tokens guessed at once where a grammar leaves no choice.", shown=f"16; {_STREAMED}", least=1
    )
    expansion: Expansion | Literal["learned"] | None = option(
        None,
        "Children of each frontier node of a draft's tree, level by level: K1,K2,...; or learned: where "
        "guesses are likely, the default where trees are sized by cost.",
        more="A learned shape is up to 8 levels deep ([policy.md](policy.md#drafts)) and needs "
        '`tree_size="cost"`; trees of samples (`mss`), whose shape nothing they hold may decide, are '
        "`1,1,3,1,1` then.",
        shown='`learned`, and `1,1,3,1,1` with `tree_size="fixed"`',
    )
    max_nodes: int | Literal["auto"] | None = option(
        None,
        "Of one request's tree in one step, the root included; or auto.",
        more="They are the likeliest of what [all have guessed](add_a_speculator.md#4-the-door). `auto`: as "
        "many rows as a pass has on this machine before it takes 1.5 times as long as with one, 64 to 2048.",
        shown="64; auto where layers are streamed",
        least=1,
    )
    tree_size: TreeSize = option(
        "cost", "cost: of these trees the part that is fastest here; fixed: all of them."
    )
    clock: Clock = option(
        "measured",
        "measured: costs follow what steps take; curve: as measured at first, to repeat texts of mss.",
        more="By the measured clock speculation is off where it loses ([policy.md](policy.md)).",
    )
    verifier: Verifier = option(
        "coupled",
        "Which rule accepts guesses.",
        more="`mss` is the paper's multi-step speculative sampling.",
    )
    draw: DraftDraw | None = option(
        None,
        "How drafts draw: coupled or top_k; with mss without_replacement, iid or top_k.",
        more="Pairs that are not lossless are refused.",
        shown="the verifier's own",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafts", _model_names("drafts", self.drafts))
        object.__setattr__(self, "draft_vocabulary", _vocabulary(self.draft_vocabulary))
        if self.expansion is not None and self.expansion != "learned":
            try:
                object.__setattr__(self, "expansion", Expansion.of(self.expansion))
            except ConfigError as error:
                raise ConfigError(f"{error}; or learned") from None
        check_options(self)
        if not isinstance(self.lookup, bool) and self.lookup != "auto":
            raise ConfigError(f"lookup is {self.lookup!r}; allowed: True, False or 'auto'")
        if self.expansion == "learned" and self.tree_size == "fixed":
            raise ConfigError(
                "expansion is 'learned' with tree_size 'fixed': such a shape is found by costs; allowed "
                f"there: widths, for example {USUAL_EXPANSION}; give some, or leave one of the two out"
            )
        if self.draw is not None and self.draw not in PAIRS[self.verifier].draws:
            raise ConfigError(
                f"draw is {self.draw!r} with the {self.verifier} verifier; allowed there: "
                f"{', '.join(PAIRS[self.verifier].draws)}: any other pair would change the output law"
            )
        if self.lookup_min > LONGEST_MATCH:
            raise ConfigError(f"lookup_min is {self.lookup_min}; allowed: 1 to {LONGEST_MATCH} tokens")
        if 0 < self.lookup_memory < LEAST_LOOKUP_MEMORY:
            raise ConfigError(
                f"lookup_memory is {self.lookup_memory}; allowed: 0, or {LEAST_LOOKUP_MEMORY} and more. It "
                f"counts bytes, no longer tokens: so many tokens take about {64 * self.lookup_memory}"
            )

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
    def most_nodes(self) -> int:
        """The nodes of a request's tree, at most."""
        nodes = 64 if self.max_nodes is None else self.max_nodes
        return MOST_ROWS if nodes == "auto" else nodes

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


# Ordinary decoding: one-node trees, whatever a request's grammar or prediction would let somebody guess.
NO_SPECULATION = SpeculationConfig(lookup=False, max_nodes=1, tree_size="fixed")
