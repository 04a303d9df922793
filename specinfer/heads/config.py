"""What a head is, as pure data; foreign formats end in speculators.py and foreign_config.py.

A *tap* is a place in the target: tap i is what its layer i is given, and tap L, behind the last of L layers,
what that one puts out. A head is given the target's hidden states at a few taps, for every token of a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specinfer.errors import ModelError
from specinfer.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersConfig:
    """What heads with layers of their own have in common."""

    output: ClassVar[str] = "lm_head"  # its output layer in a checkpoint, where it brings one

    body: ModelConfig
    taps: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    own_embedding: bool = False
    own_head: bool = True

    @property
    def vocab_size(self) -> int:
        """How many tokens its target has."""
        return self.body.vocab_size

    @property
    def hidden_size(self) -> int:
        """Of its layers."""
        return self.body.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(LayersConfig):
    """A head of EAGLE's shape: one pass a level, each fed with what the one before put out.

    Its first layer reads the embedding of the next token beside the hidden state; q, k and v are products
    with both.
    """

    kind: ClassVar[str] = "eagle"

    depth: int = 5
    norm_before_residual: bool = False  # the residual stream starts with the normed hidden state
    norm_before_fc: bool = False  # one RMSNorm over all taps together
    fc_norm: bool = False  # an RMSNorm for each tap (EAGLE-3.1)
    norm_output: bool = False  # what is fed back is normed (EAGLE-3.1)
    # Rows below the first are of this token, and of hidden states of the head's own: so all levels come from
    # one pass (P-EAGLE). None: a pass a level.
    mask_token_id: int | None = None
    # EAGLE-1 and 2: fc makes one of the token's embedding and the state, which is the target's last, normed.
    # Neither the layer it goes to nor the output layer has a norm before it.
    fc_reads_token: bool = False
    fc_bias: bool = False

    def __post_init__(self) -> None:
        _check(self)
        _check_layers(self.body)
        others = self.norm_before_residual, self.norm_before_fc, self.fc_norm, self.norm_output
        if self.fc_reads_token and (len(self.taps) > 1 or any(others) or self.mask_token_id is not None):
            raise ModelError(
                "a head of EAGLE-1 or 2 reads one hidden state, and has no norms but of its MLPs"
            )
        if self.fc_bias and not self.fc_reads_token:
            raise ModelError("fc_bias is true; allowed of EAGLE-1 and 2")
        if self.mask_token_id is not None:
            _check_mask(self.mask_token_id, self.body.vocab_size)
        if self.norm_before_fc and self.fc_norm:
            raise ModelError("a head has norm_before_fc and fc_norm; allowed: one of them, or neither")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """The rows of a block head's blocks."""

    block_size: int  # rows of a block, the anchor among them
    skipped: int  # of these, from the first on, that guess nothing
    causal: bool  # a row sees those before it alone; else all of the block
    reads_last: bool  # a row begins with what was made of the token before the anchor

    @property
    def depth(self) -> int:
        """Tokens of a block that are guessed."""
        return self.block_size - self.skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(LayersConfig):
    """A head that guesses a block of tokens in one pass (DFlash, DSpark).

    The text's keys and values are products with the target's hidden states, in every layer; the block's rows
    are the last token, the *anchor*, and mask tokens behind it. With `reads_last`, which no published head
    has, mask tokens are nothing but places.
    """

    kind: ClassVar[str] = "block"

    block_size: int  # rows of a block, the anchor among them
    mask_token_id: int
    causal: bool = True  # a row of the block sees those before it alone; else all of the block
    sample_from_anchor: bool = True  # the anchor's row guesses the token behind it; else the first mask's
    markov_rank: int = 0  # of the term by which a guess depends on the token before it; 0: there is none
    # A row begins with a product of its own with the last hidden state and the anchor; else as an embedding.
    reads_last: bool = False

    def __post_init__(self) -> None:
        least = 1 if self.sample_from_anchor else 2
        if not least <= self.block_size <= 64:
            raise ModelError(f"block_size is {self.block_size}; allowed: {least} to 64")
        _check(self)
        _check_layers(self.body)
        _check_mask(self.mask_token_id, self.body.vocab_size)
        if not 0 <= self.markov_rank <= 4096:
            raise ModelError(f"markov_rank is {self.markov_rank}; allowed: 0 to 4096")

    @property
    def skipped(self) -> int:
        """Rows of a block, from its first on, that guess nothing."""
        return 0 if self.sample_from_anchor else 1

    @property
    def block(self) -> BlockRows:
        """The rows of its blocks."""
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
    """Heads that guess a level each, all from the same hidden state (Medusa).

    That is what the target's last norm makes of its last layer's output, at the token before the tree's root;
    the tap is that output, as it is before the norm. Nothing else is read: no token, and no text.
    """

    kind: ClassVar[str] = "medusa"
    output: ClassVar[str] = "lm_heads.0"  # its output layer in a checkpoint, where it brings one

    taps: tuple[int]  # behind the target's last layer
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    depth: int  # heads: one for each level
    num_layers: int = 1  # of a head, each x + silu(W x + b)
    bias: bool = True  # whether there is a b
    shared_head: bool = False  # one output layer for all levels
    own_head: bool = True

    def __post_init__(self) -> None:
        _check(self)
        if not 0 <= self.num_layers <= 64:
            raise ModelError(f"a Medusa head has {self.num_layers} layers; allowed: 0 to 64")
        if not (self.own_head or self.shared_head):
            raise ModelError("Medusa heads that bring no output layer share one: the target's")

    @property
    def output_layers(self) -> int:
        """How many there are."""
        return 1 if self.shared_head else self.depth

    @property
    def hidden_size(self) -> int:
        """The target's."""
        return self.target_hidden_size

    @property
    def own_embedding(self) -> bool:
        """It reads no tokens."""
        return True

    @property
    def body(self) -> None:
        """It has no layers with attention, so nothing of a text is cached."""


HeadConfig = EagleConfig | BlockConfig | MedusaConfig


def check_target(head: HeadConfig, target: ModelConfig, name: str) -> None:
    """Raise ModelError unless the head called `name` reads such a target."""
    wanted = {
        "hidden states of": (head.target_hidden_size, target.hidden_size),
        "a vocabulary of": (head.vocab_size, target.vocab_size),
    }
    for what, (wants, has) in wanted.items():
        if wants != has:
            raise ModelError(
                f"head {name} was trained for {what} {wants}, the target has {has}; it belongs to another "
                "target"
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
            f"head {name} uses its target's output layer, beside which {target.family} scales, caps or "
            "projects; supported: heads with an output layer of their own"
        )
    if not head.own_embedding and (target.embedding_scale != 1.0 or target.learned_positions):
        raise ModelError(
            f"head {name} uses its target's embeddings; supported: those of Llama, Mistral and Qwen, which "
            f"{target.family} scales or adds positions to"
        )


def _check_mask(token: int, vocab: int) -> None:
    if not 0 <= token < vocab:
        raise ModelError(f"mask_token_id is {token}; allowed: a token of the target's, 0 to {vocab - 1}")


def _check(head: HeadConfig) -> None:
    if not head.taps or any(tap < 0 for tap in head.taps) or len(set(head.taps)) != len(head.taps):
        raise ModelError(f"a head reads layers {list(head.taps)}; allowed: different ones, each 0 or more")
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
            f"a head's layers have a sliding window of {body.window}; supported: layers that see all"
        )
    if body.rope is None or not body.plain_layers:
        raise ModelError(f"a head has layers of {body.family}; supported: llama, qwen2 and qwen3")
    if body.rope.rotated is not None:
        raise ModelError("a head's layers rotate a part of each attention head; supported: all of it")
