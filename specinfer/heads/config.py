"""Configurations of draft heads, independent of any file format.

speculators.py and foreign_config.py convert the published formats to these classes.

A *tap* is a point of the target where a head reads hidden states: tap i is the input of layer i, and tap L is
the output of the last of L layers. A head reads the hidden states of every token at a few taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specinfer.errors import ModelError
from specinfer.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersConfig:
    """Fields of all heads that have transformer layers."""

    output: ClassVar[str] = "lm_head"  # the output layer in a checkpoint, if it has one

    body: ModelConfig
    taps: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    own_embedding: bool = False
    own_head: bool = True

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        return self.body.vocab_size

    @property
    def hidden_size(self) -> int:
        """Hidden size of the head's layers."""
        return self.body.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(LayersConfig):
    """An EAGLE head: one pass for each level, whose input is the hidden state from the pass before.

    The first layer reads the embedding of the next token beside the hidden state: its q, k and v projections
    take both, concatenated.
    """

    kind: ClassVar[str] = "eagle"

    depth: int = 5
    norm_before_residual: bool = False  # the residual stream starts with the normed hidden state
    norm_before_fc: bool = False  # one RMSNorm over all taps together
    fc_norm: bool = False  # an RMSNorm for each tap (EAGLE-3.1)
    norm_output: bool = False  # the hidden state is normed before the next pass reads it (EAGLE-3.1)
    # P-EAGLE computes all levels in one pass: the rows after the first read this token and learned hidden
    # states. None: one pass for each level.
    mask_token_id: int | None = None
    # EAGLE-1 and 2: fc projects the token's embedding and the target's last hidden state, after its norm, to
    # one vector. The first layer and the output layer have no norm before them.
    fc_reads_token: bool = False
    fc_bias: bool = False

    def __post_init__(self) -> None:
        _check(self)
        _check_layers(self.body)
        others = self.norm_before_residual, self.norm_before_fc, self.fc_norm, self.norm_output
        if self.fc_reads_token and (len(self.taps) > 1 or any(others) or self.mask_token_id is not None):
            raise ModelError(
                "an EAGLE-1 or EAGLE-2 head reads one hidden state and has no norms except before its MLPs"
            )
        if self.fc_bias and not self.fc_reads_token:
            raise ModelError("fc_bias is true; only EAGLE-1 and EAGLE-2 heads may have it")
        if self.mask_token_id is not None:
            _check_mask(self.mask_token_id, self.body.vocab_size)
        if self.norm_before_fc and self.fc_norm:
            raise ModelError("a head has norm_before_fc and fc_norm; at most one of them is allowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """Layout of a block head's rows."""

    block_size: int  # rows of a block, including the anchor
    skipped: int  # leading rows without a guess
    causal: bool  # True: a row attends to earlier rows only; False: to the whole block
    reads_last: bool  # each row starts from the hidden state of the token before the anchor

    @property
    def depth(self) -> int:
        """Tokens of a block that are guessed."""
        return self.block_size - self.skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(LayersConfig):
    """A head that guesses a block of tokens in one pass (DFlash, DSpark).

    In every layer the keys and values of the text are projections of the target's hidden states. The rows of
    a block are the last token (the *anchor*) and mask tokens after it. With `reads_last`, which no published
    head has, mask tokens carry a position only.
    """

    kind: ClassVar[str] = "block"

    block_size: int  # rows of a block, including the anchor
    mask_token_id: int
    causal: bool = True  # True: a row attends to earlier rows only; False: to the whole block
    sample_from_anchor: bool = True  # the anchor's row makes the first guess; False: the first mask's row
    markov_rank: int = 0  # rank of the term that makes a guess depend on the token before it; 0: no such term
    # True: a row starts from its own projection of the last hidden state and the anchor's embedding.
    # False: it starts from an embedding.
    reads_last: bool = False

    def __post_init__(self) -> None:
        smallest = 1 if self.sample_from_anchor else 2
        if not smallest <= self.block_size <= 64:
            raise ModelError(f"block_size is {self.block_size}; allowed: {smallest} to 64")
        _check(self)
        _check_layers(self.body)
        _check_mask(self.mask_token_id, self.body.vocab_size)
        if not 0 <= self.markov_rank <= 4096:
            raise ModelError(f"markov_rank is {self.markov_rank}; allowed: 0 to 4096")

    @property
    def skipped(self) -> int:
        """Leading rows of a block that make no guess."""
        return 0 if self.sample_from_anchor else 1

    @property
    def block(self) -> BlockRows:
        """Layout of the rows of a block."""
        return BlockRows(
            block_size=self.block_size,
            skipped=self.skipped,
            causal=self.causal,
            reads_last=self.reads_last,
        )

    @property
    def depth(self) -> int:
        """Tokens of a block that are guessed."""
        return self.block_size - self.skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """Medusa heads: one head for each level, all reading the same hidden state.

    That is the target's last hidden state after its final norm, at the token before the tree's root. The tap
    is the state before the norm. A Medusa head reads no tokens.
    """

    kind: ClassVar[str] = "medusa"
    output: ClassVar[str] = "lm_heads.0"  # the output layer in a checkpoint, if it has one

    taps: tuple[int]  # the output of the target's last layer
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    depth: int  # number of heads, one for each level
    num_layers: int = 1  # layers of a head, each x + silu(W x + b)
    bias: bool = True  # layers have the bias b
    shared_head: bool = False  # one output layer for all levels
    own_head: bool = True

    def __post_init__(self) -> None:
        _check(self)
        if not 0 <= self.num_layers <= 64:
            raise ModelError(f"a Medusa head has {self.num_layers} layers; allowed: 0 to 64")
        if not (self.own_head or self.shared_head):
            raise ModelError(
                "Medusa heads without an output layer use the target's, so shared_head must be true"
            )

    @property
    def output_layers(self) -> int:
        """Number of output layers."""
        return 1 if self.shared_head else self.depth

    @property
    def hidden_size(self) -> int:
        """Hidden size of the target."""
        return self.target_hidden_size

    @property
    def own_embedding(self) -> bool:
        """True: Medusa heads read no tokens and need no embedding."""
        return True

    @property
    def body(self) -> None:
        """None: Medusa heads have no attention layers and no KV cache."""


HeadConfig = EagleConfig | BlockConfig | MedusaConfig


def check_target(head: HeadConfig, target: ModelConfig, name: str) -> None:
    """Raise ModelError unless the head `name` fits this target."""
    sizes = {
        "hidden states of": (head.target_hidden_size, target.hidden_size),
        "a vocabulary of": (head.vocab_size, target.vocab_size),
    }
    for label, (expected, got) in sizes.items():
        if expected != got:
            raise ModelError(
                f"head {name} was trained for {label} {expected}, but the target has {got}: it belongs to "
                "another target"
            )
    deepest = max(head.taps)
    if deepest > target.num_layers:
        raise ModelError(
            f"head {name} reads layer {deepest} of its target, which has {target.num_layers}; it belongs to "
            "another target"
        )
    borrows = not (head.own_embedding and head.own_head)
    if borrows and head.hidden_size != target.hidden_size:
        raise ModelError(
            f"head {name} has a hidden size of {head.hidden_size}, the target {target.hidden_size}: it "
            "cannot use the target's embeddings or output layer, and it does not bring both"
        )
    changed = target.logit_scale != 1.0 or target.embedding_size != target.hidden_size
    if not head.own_head and (changed or target.logit_softcap is not None):
        raise ModelError(
            f"head {name} uses its target's output layer, but {target.family} also scales, caps or projects "
            "its logits; use a head that has an output layer"
        )
    if not head.own_embedding and (target.embedding_scale != 1.0 or target.learned_positions):
        raise ModelError(
            f"head {name} uses its target's embeddings, but {target.family} scales them or adds positions; "
            "use a head that has embeddings"
        )


def _check_mask(token: int, vocab: int) -> None:
    if not 0 <= token < vocab:
        raise ModelError(f"mask_token_id is {token}; allowed: 0 to {vocab - 1}, the tokens of the target")


def _check(head: HeadConfig) -> None:
    if not head.taps or any(tap < 0 for tap in head.taps) or len(set(head.taps)) != len(head.taps):
        raise ModelError(f"a head reads layers {list(head.taps)}; allowed: different layers, each 0 or more")
    if not 0 < head.draft_vocab_size <= head.vocab_size:
        raise ModelError(
            f"draft_vocab_size is {head.draft_vocab_size}; allowed: 1 to the target's {head.vocab_size}"
        )
    if head.target_hidden_size < 1:
        raise ModelError(f"target_hidden_size is {head.target_hidden_size}; allowed: 1 or more")
    if not 1 <= head.depth <= 64:
        raise ModelError(f"a head guesses {head.depth} tokens; allowed: 1 to 64")


def _check_layers(body: ModelConfig) -> None:
    if body.window is not None:
        raise ModelError(
            f"a head's layers have a sliding window of {body.window}; only full attention is supported"
        )
    if body.rope is None or not body.plain_layers:
        raise ModelError(f"a head has layers of {body.family}; supported: llama, qwen2 and qwen3")
    if body.rope.rotated is not None:
        raise ModelError(
            "a head's layers use partial rotary embeddings; only full rotary embeddings are supported"
        )
