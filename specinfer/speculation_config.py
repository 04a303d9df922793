"""SpeculationConfig: speculators, the shape and size of token trees, and the verifier."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import Literal, Self

from specinfer.errors import ConfigError
from specinfer.option import check_options, option
from specinfer.tree.draw import PAIRS, DraftDraw, DrawRule, Verifier, draw_rule
from specinfer.tree.token_tree import Expansion

Quantization = Literal["none", "int8", "int4", "gguf"]
QuantizationOption = Literal["auto", Quantization]
TreeSize = Literal["cost", "fixed"]
Clock = Literal["measured", "curve"]
Lookup = bool | Literal["auto"]

DEFAULT_EXPANSION = Expansion((1, 1, 3, 1, 1))  # default tree shape
MAX_DEPTH = 8  # levels of a draft's tree with a learned shape, if the model is in memory
MAX_DEPTH_STREAMED = 48  # the same with streamed layers, where a pass waits for its weights
MAX_ROWS = 2048  # limit of "auto" for rows of a pass and for nodes of a tree
SELF = "self"  # name of the draft that is the target itself in fewer bits
OWN_HEAD = "mtp"  # name of the draft head in the target's own files
AUTO = "auto"  # name of the draft that the engine chooses
LONGEST_MATCH = 32  # tokens; comparing more does not improve a guess
MIN_LOOKUP_MEMORY = 1 << 20  # bytes; a smaller number was probably meant as tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Options of speculation: speculators, tree shape and size, and verifier.

    The fields are documented in docs/reference.md. Raises ConfigError for a value outside its range and for
    values that contradict each other.
    """

    drafts: tuple[str, ...] = option(
        (),
        "A draft model, self (the target in 4 bits), mtp (its own head), or auto; repeatable.",
        more="A model of any vocabulary, a [head](heads.md) on the target's hidden states, or a "
        "[pool](boost-tuning.md) of both. The guesses of several are merged into one tree. `self`: the "
        "target itself in int4, or in int8 with `draft_quantization` int8 ([offloading.md](offloading.md)); "
        "write `./self` for a folder of that name. `mtp`: the [head](heads.md) in the target's own files. "
        "`auto`: that head, or a [known draft](which_draft.md) that is on this machine, which is the default "
        "of the commands; `--no-draft`: none.",
        flag="draft",
    )
    draft_quantization: QuantizationOption = option(
        "auto", "The same for drafts; auto: each by its own file."
    )
    draft_lora: tuple[str, ...] = option(
        (),
        "FOLDER: a low-rank adapter, saved by PEFT, for all rows of a draft model.",
        more="With several drafts: NAME=FOLDER, where NAME is `draft1`, `draft2`, ... in the order of "
        "`drafts`; repeatable ([lora.md](lora.md#speculation)).",
    )
    lookup: Lookup = option(
        "auto",
        "Look guesses up in the request's text and in earlier answers.",
        more="Only answers with the same `cache_salt` are searched. `auto`: on, if native kernels are "
        "available.",
        switch=True,
    )
    lookup_min: int = option(1, "Minimum tokens that must match for a lookup.", minimum=1, rare=True)
    lookup_depth: int | None = option(
        None,
        "Maximum depth of looked-up trees, predictions and forced text, in tokens.",
        shown=f"16, and 15 for predictions; {MAX_DEPTH_STREAMED} where layers are streamed",
        minimum=1,
        rare=True,
    )
    lookup_nodes: int | None = option(
        None,
        "Maximum nodes of a looked-up tree, the root included.",
        shown="32; 128 where layers are streamed",
        minimum=2,
        rare=True,
    )
    lookup_memory: int = option(
        16 << 20,
        "Memory for earlier answers; 0 keeps none.",
        more="Bytes for all cache salts together, about 64 per token.",
        size=True,
        rare=True,
    )
    expansion: Expansion | Literal["learned"] | None = option(
        None,
        "Shape of a draft's tree: K1,K2,... children per frontier node, level by level; or learned: by "
        "acceptance probability.",
        more="A learned shape has up to 8 levels ([policy.md](policy.md#drafts)) and needs "
        '`tree_size="cost"`. Sampled trees (`mss`) need a shape fixed in advance, and then have `1,1,3,1,1`.',
        shown='`learned`, and `1,1,3,1,1` with `tree_size="fixed"`',
    )
    max_nodes: int | Literal["auto"] | None = option(
        None,
        "Maximum nodes of one request's tree in one step, the root included; or auto.",
        more="The likeliest nodes of [all speculators](add_a_speculator.md#4-in-an-engine) are kept. `auto`: "
        "as many rows as a pass has on this machine before it takes 1.5 times as long as with one, 64 to "
        "2048.",
        shown="64; auto where layers are streamed",
        minimum=1,
    )
    tree_size: TreeSize = option(
        "cost", "cost: verify the part of a tree that is fastest on this machine; fixed: the whole tree."
    )
    clock: Clock = option(
        "measured",
        "Costs of passes: measured, updated by the time of steps; curve, fixed at start to repeat mss texts.",
        more="With `measured`, speculation switches off where it is slower ([policy.md](policy.md)).",
        rare=True,
    )
    verifier: Verifier = option(
        "coupled",
        "Rule that accepts guesses: coupled or mss.",
        more="`mss` is the paper's multi-step speculative sampling.",
    )
    draw: DraftDraw | None = option(
        None,
        "How drafts draw: coupled or top_k; with mss without_replacement, iid or top_k.",
        more="Combinations that are not lossless are refused.",
        shown="the verifier's own",
        rare=True,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafts", _names("drafts", self.drafts, "model names"))
        if AUTO in self.drafts and len(self.drafts) > 1:
            raise ConfigError(
                f"drafts is {', '.join(self.drafts)}; allowed with {AUTO!r}: no other name; leave one out, "
                f"or write ./{AUTO} for a folder of that name"
            )
        folders: object = self.draft_lora
        if isinstance(folders, Mapping):
            folders = [f"{name}={folder}" for name, folder in folders.items()]
        object.__setattr__(self, "draft_lora", _names("draft_lora", folders, "folders"))
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
                "expansion is 'learned' with tree_size 'fixed'; allowed there: widths, for example "
                f"{DEFAULT_EXPANSION}, as a learned shape needs costs; set widths, or leave one option out"
            )
        if self.draw is not None and self.draw not in PAIRS[self.verifier].draws:
            raise ConfigError(
                f"draw is {self.draw!r} with the {self.verifier} verifier; allowed there: "
                f"{', '.join(PAIRS[self.verifier].draws)}, as other draws would change the distribution of "
                "the text"
            )
        if self.lookup_min > LONGEST_MATCH:
            raise ConfigError(f"lookup_min is {self.lookup_min}; allowed: 1 to {LONGEST_MATCH} tokens")
        if 0 < self.lookup_memory < MIN_LOOKUP_MEMORY:
            raise ConfigError(
                f"lookup_memory is {self.lookup_memory}; allowed: 0, or {MIN_LOOKUP_MEMORY} bytes and more; "
                f"{self.lookup_memory} tokens take about {64 * self.lookup_memory} bytes"
            )

    @property
    def draw_rule(self) -> DrawRule:
        """Draw rule of draft models."""
        rules = PAIRS[self.verifier].draws
        return rules[self.draw] if self.draw is not None else draw_rule(self.verifier)

    @property
    def learns_shape(self) -> bool:
        """True if the policy chooses the shape of drafts' trees."""
        return self.tree_size == "cost" and not isinstance(self.expansion, Expansion)

    @property
    def fixed_expansion(self) -> Expansion:
        """Shape of trees whose shape is not learned."""
        return self.expansion if isinstance(self.expansion, Expansion) else DEFAULT_EXPANSION

    @property
    def node_limit(self) -> int:
        """Maximum nodes of a request's tree; for "auto" the largest that it may choose."""
        nodes = 64 if self.max_nodes is None else self.max_nodes
        return MAX_ROWS if nodes == "auto" else nodes

    @property
    def shape(self) -> str:
        """The effective `expansion` as text: "learned" or widths."""
        return "learned" if self.learns_shape else str(self.fixed_expansion)

    def with_tree_size(self, size: TreeSize) -> Self:
        """Return this config with another tree size; "fixed" replaces a learned shape by the default."""
        keeps = size == "cost" or isinstance(self.expansion, Expansion)
        return replace(self, tree_size=size, expansion=self.expansion if keeps else None)

    @property
    def enabled(self) -> bool:
        """True if a draft or the lookup is configured; predictions and grammars are used in any case."""
        return bool(self.drafts or self.lookup)


def _names(name: str, value: object, kind: str) -> tuple[str, ...]:
    """Return one name or several as a tuple; raises ConfigError for other values."""
    if isinstance(value, (str, PathLike)):
        value = (value,)
    names = (
        tuple(fspath(n) if isinstance(n, PathLike) else n for n in value)
        if isinstance(value, Iterable)
        else (None,)
    )
    if not all(isinstance(n, str) and n for n in names):
        raise ConfigError(f"{name} is {value!r}; allowed: {kind}, each a non-empty string")
    return names


# Ordinary decoding: one-node trees, which leave no place for guesses from a grammar or a prediction.
NO_SPECULATION = SpeculationConfig(lookup=False, max_nodes=1, tree_size="fixed")
