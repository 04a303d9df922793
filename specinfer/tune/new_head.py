"""A head for a target before it has learnt anything, and the tokens it will be able to name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, overload

import torch
from torch import Tensor

from specinfer.errors import ModelError
from specinfer.heads.block import BlockHead
from specinfer.heads.checkpoint import target_embedding, target_head
from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.heads.eagle import EagleHead
from specinfer.heads.layers import HeadLayer, initialise
from specinfer.heads.vocabulary import Tables
from specinfer.models.config import Activation, Family, ModelConfig, Rope
from specinfer.models.weights import OpenModel
from specinfer.tune.lessons import Lessons, first_texts
from specinfer.tune.shards import Corpus, TunedText

USUAL_VOCABULARY: Final = 8192  # tokens that a new head can name, where nothing else is asked for
_FAINT: Final = 0.1  # of the target's output layer, to begin with
_LOUD: Final = 4.0  # times the usual deviation of what layers add
_SCALED_BY: Final = 64  # texts whose hidden states say how large these are
_LEAST: Final = 1e-6  # of a size that something is divided by


def body_of(target: ModelConfig, family: Family, layers: int) -> ModelConfig:
    """So many layers of the target's sizes; those of QWEN3 norm queries and keys."""
    rope = target.rope if target.rope is not None else Rope(10000.0)
    return ModelConfig(
        family=family,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        embedding_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        norm_eps=target.norm_eps,
        rope=Rope(rope.theta),
        layer_windows=(None,) * layers,
        tie_embeddings=False,
        qk_norm=family is Family.QWEN3,
        attention_scale=target.head_dim**-0.5,
        max_context=target.max_context,
    )


def check_trainable(target: ModelConfig) -> None:
    """Raise ModelError for targets whose layers are not what is trained here."""
    if target.activation is not Activation.SILU or target.sandwich_norms or target.rope is None:
        raise ModelError(
            f"no draft can be trained for {target.family} yet; supported: Llama, Mistral and Qwen"
        )


def likely_tokens(corpus: Corpus, vocab: int) -> Tensor:
    """All tokens, first those that the target thinks likeliest over all answers to learn from, int64 [V]."""
    masses_V = torch.zeros(vocab, dtype=torch.float64)
    for shard in corpus.shards():
        ids, logprobs = shard.labels()
        masses_V.index_add_(0, ids.flatten(), logprobs.flatten().double().exp())
    return masses_V.argsort(descending=True, stable=True)


def frequent_tokens(corpus: Corpus, count: int, vocab: int) -> list[int]:
    """The `count` tokens that the target thinks likeliest, ascending."""
    ids: list[int] = likely_tokens(corpus, vocab)[:count].sort().values.tolist()
    return ids


def scale_of(lessons: Lessons) -> Tensor:
    """`sizes_of` the first texts to learn from."""
    return sizes_of(first_texts(lessons, _SCALED_BY))


def sizes_of(texts: Iterable[TunedText]) -> Tensor:
    """What to multiply hidden states by so that each of their values is about 1 in size, float32 [N, D].

    Some values of a target's hidden states are a thousand times as large as others: left so, a head would
    learn from those alone for long.
    """
    squares: Tensor | None = None
    rows = 0
    for text in texts:
        # The first token's states are like no other's, in most targets by far the largest.
        taps_TND = text.taps_TND[1:].double()
        found_ND = taps_TND.square().sum(dim=0)
        squares = found_ND if squares is None else squares + found_ND
        rows += len(taps_TND)
    assert squares is not None
    return (squares / max(rows, 1)).sqrt().clamp(min=_LEAST).reciprocal().float()


@overload
def new_head(config: BlockConfig, target: OpenModel, ids: list[int], seed: int) -> BlockHead: ...
@overload
def new_head(config: EagleConfig, target: OpenModel, ids: list[int], seed: int) -> EagleHead: ...
def new_head(
    config: BlockConfig | EagleConfig, target: OpenModel, ids: list[int], seed: int
) -> BlockHead | EagleHead:
    """A head of random matrices, but for the target's output layer and last norm.

    Left at that, it would be sure that its anchor comes again, where embeddings and output layer are one
    table: so its guesses begin faint, and what its layers add to the embedding larger than that.
    """
    tables = Tables(target_embedding(target), target_head(target, ids))
    head: BlockHead | EagleHead
    if isinstance(config, BlockConfig):
        head = BlockHead(replace(config, draft_vocab_size=len(ids)), ids, tables)
    else:
        head = EagleHead(replace(config, draft_vocab_size=len(ids)), ids, tables)
    generator = torch.Generator().manual_seed(seed)
    initialise(head, generator)
    with torch.no_grad():
        if config.own_head:
            head.lm_head.weight.copy_(_FAINT * tables.head_UD)
        for layer in head.layers:
            assert isinstance(layer, HeadLayer)
            layer.self_attn.o_proj.weight.mul_(_LOUD)
            layer.mlp.down_proj.weight.mul_(_LOUD)
        norm_D = target.read_rows("model.norm.weight", 0, config.body.hidden_size).float()
        loudness = 1.0 if config.own_head else _FAINT
        head.norm.weight.copy_(loudness * (norm_D + target.config.norm_weight_offset))
        # What is read is about 1 in size, and so is what comes of it.
        head.fc.weight.mul_(1 / (0.02 * math.sqrt(head.fc.in_features)))
        if isinstance(head, BlockHead) and head.config.reads_last:
            head.entry.weight.mul_(1 / (0.02 * math.sqrt(head.entry.in_features)))
    return head
