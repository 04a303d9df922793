"""Configurations of draft heads, independent of any file format.

layouts.py converts the published formats to these classes.

A *tap* is a point of the target where a head reads hidden states: tap i is the input of layer i, and tap L is
the output of the last of L layers. A head reads the hidden states of every token at a few taps.
"""

from dataclasses import dataclass

from specinfer.errors import ModelError
from specinfer.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersConfig:
    """Fields of all heads."""

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
    """An EAGLE-3 head: one pass for each level, whose input is the hidden state from the pass before.

    The first layer reads the embedding of the next token beside the hidden state: its q, k and v projections
    take both, concatenated.
    """

    depth: int = 5
    norm_before_residual: bool = False  # the residual stream starts with the normed hidden state
    norm_before_fc: bool = False  # one RMSNorm over all taps together
    fc_norm: bool = False  # an RMSNorm for each tap (EAGLE-3.1)
    norm_output: bool = False  # the hidden state is normed before the next pass reads it (EAGLE-3.1)

    def __post_init__(self) -> None:
        _check(self)
        if self.norm_before_fc and self.fc_norm:
            raise ModelError("a head has norm_before_fc and fc_norm; at most one of them is allowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(LayersConfig):
    """A head that guesses a block of tokens in one pass (DFlash, DSpark).

    In every layer the keys and values of the text are projections of the target's hidden states. The rows of
    a block are the last token (the *anchor*) and mask tokens after it. With `reads_last`, which no published
    head has, mask tokens carry a position only.
    """

    block_size: int  # rows of a block, including the anchor
    mask_token_id: int
    causal: bool = True  # True: a row attends to earlier rows only; False: to the whole block
    sample_from_anchor: bool = True  # the anchor's row makes the first guess; False: the first mask's row
    markov_rank: int = 0  # rank of the term that makes a guess depend on the token before it; 0: no such term
    # True: a row starts from its own projection of the last hidden state and the anchor's embedding.
    # False: it starts from an embedding.
    reads_last: bool = False
    # DFlash 2 (dflash2.py); 0 taps: no convolutions; rank 0: no selector.
    conv_taps: int = 0
    conv_group: int = 1  # channels that share a delta
    selector_rank: int = 0
    candidates: int = 16  # tokens that the selector chooses among

    def __post_init__(self) -> None:
        smallest = 1 if self.sample_from_anchor else 2
        if not smallest <= self.block_size <= 64:
            raise ModelError(f"block_size is {self.block_size}; allowed: {smallest} to 64")
        _check(self)
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ModelError(
                f"mask_token_id is {self.mask_token_id}; allowed: 0 to {self.vocab_size - 1}, the tokens of "
                "the target"
            )
        if not 0 <= self.markov_rank <= 4096:
            raise ModelError(f"markov_rank is {self.markov_rank}; allowed: 0 to 4096")
        if not 0 <= self.conv_taps <= self.block_size or self.hidden_size % self.conv_group:
            raise ModelError(
                f"conv_kernel_size is {self.conv_taps} and conv_group_size {self.conv_group}; allowed: up to "
                f"block_size, {self.block_size}, and a divisor of hidden_size, {self.hidden_size}"
            )
        if self.selector_rank and (
            self.draft_vocab_size != self.vocab_size or self.candidates > self.vocab_size or self.markov_rank
        ):
            raise ModelError(
                f"a head with a selector has draft_vocab_size {self.draft_vocab_size}, selector_top_k "
                f"{self.candidates} and markov_rank {self.markov_rank}; allowed: all {self.vocab_size} "
                "tokens, at most as many candidates, and rank 0"
            )

    @property
    def skipped(self) -> int:
        """Leading rows of a block that make no guess."""
        return 0 if self.sample_from_anchor else 1

    @property
    def has_more(self) -> bool:
        """True if the engine alone computes it: with convolutions, a selector or windows."""
        return bool(self.conv_taps or self.selector_rank or self.body.window)

    @property
    def depth(self) -> int:
        """Tokens of a block that are guessed."""
        return self.block_size - self.skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig(LayersConfig):
    """The layer of a model's files that predicts a further token: one pass for each level, as EAGLE's.

    It reads the output of the target's last layer, and has the target's embeddings and output layer.
    """

    hidden_first: bool = False  # its product reads the state, then the embedding; else the embedding first
    depth: int = 5  # levels that it learns


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantConfig(LayersConfig):
    """Gemma 4's assistant: one pass for each level, over the target's own keys and values.

    A row reads a token's embedding beside a hidden state, as in EAGLE. The layers have queries alone, and
    attend to the last layers of the target that have keys, with or without a window as they do. With
    `clusters` of equal size the tokens of the `chosen` likeliest clusters have logits, and others have none.
    """

    clusters: int = 0  # 0: all tokens have logits
    chosen: int = 0

    def __post_init__(self) -> None:
        if self.clusters and (self.vocab_size % self.clusters or self.chosen > self.clusters):
            raise ModelError(
                f"num_centroids is {self.clusters} and centroid_intermediate_top_k {self.chosen}, for "
                f"{self.vocab_size} tokens; allowed: a divisor of their number, and no more than it"
            )

    def sources(self, target: ModelConfig) -> list[int | None]:
        """Return the target's layer whose keys and values each layer attends to; None: it has none."""
        windowed = [window is not None for window in target.layer_windows]
        last = {windowed[i]: i for i in range(target.num_layers - target.shared_layers)}
        return [last.get(window is not None) for window in self.body.layer_windows]


HeadConfig = EagleConfig | BlockConfig  # heads that have their own keys and values
AnyHeadConfig = HeadConfig | AssistantConfig


def check_target(head: LayersConfig, target: ModelConfig, name: str) -> None:
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
    if isinstance(head, AssistantConfig):
        _check_caches(head, target, name)
        return
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
    if not head.own_head and (target.logit_scale != 1.0 or target.logit_softcap is not None):
        raise ModelError(
            f"head {name} uses its target's output layer, but {target.family} also scales or caps its "
            "logits; use a head that has an output layer"
        )
    if not head.own_embedding and (target.embedding_scale != 1.0 or target.learned_positions):
        raise ModelError(
            f"head {name} uses its target's embeddings, but {target.family} scales them or adds positions; "
            "use a head that has embeddings"
        )


def _check_caches(head: AssistantConfig, target: ModelConfig, name: str) -> None:
    for layer, source in enumerate(head.sources(target)):
        own = head.body.heads_of(layer)
        found = None if source is None else target.heads_of(source)
        if found is None or (own.num_kv_heads, own.head_dim) != (found.num_kv_heads, found.head_dim):
            raise ModelError(
                f"head {name} attends to {own.num_kv_heads} key-value heads of {own.head_dim} in its layer "
                f"{layer}, and its target has {'no such layer' if found is None else found}; it belongs to "
                "another target"
            )


def _check(head: HeadConfig) -> None:
    body = head.body
    if not head.taps or any(tap < 0 for tap in head.taps) or len(set(head.taps)) != len(head.taps):
        raise ModelError(f"a head reads layers {list(head.taps)}; allowed: different layers, each 0 or more")
    if not 0 < head.draft_vocab_size <= head.vocab_size:
        raise ModelError(
            f"draft_vocab_size is {head.draft_vocab_size}; allowed: 1 to the target's {head.vocab_size}"
        )
    if not 1 <= head.depth <= 64:
        raise ModelError(f"a head guesses {head.depth} tokens; allowed: 1 to 64")
    if body.rope is None or not body.plain_layers:
        raise ModelError(f"a head has layers of {body.family}; supported: llama, qwen2 and qwen3")
    if body.rope.rotated is not None:
        raise ModelError(
            "a head's layers use partial rotary embeddings; only full rotary embeddings are supported"
        )
