"""The tensors a head has, by the names of checkpoints, with their shapes."""

from __future__ import annotations

from typing import Literal

from specinfer.heads.config import AnyHeadConfig, BlockConfig, EagleConfig, MedusaConfig
from specinfer.models.config import ModelConfig

_Kind = Literal["plain", "reads token", "behind fc"]  # of a layer
Shapes = dict[str, tuple[int, ...]]


def head_shapes(config: AnyHeadConfig) -> Shapes:
    """The tensors that compute, those of the target's that the head uses left out; ids of tokens apart."""
    if isinstance(config, MedusaConfig):
        return _of_medusa(config)
    body, taps, size = config.body, len(config.taps), config.body.hidden_size
    early = isinstance(config, EagleConfig) and config.fc_reads_token
    shapes: Shapes = {"fc.weight": (size, taps * config.target_hidden_size + (size if early else 0))}
    if not early:
        shapes["norm.weight"] = (size,)
    if config.own_embedding:
        shapes["embed_tokens.weight"] = (body.vocab_size, size)
    if config.own_head:
        shapes["lm_head.weight"] = (config.draft_vocab_size, size)
    for number in range(body.num_layers):
        kind: _Kind = "plain"
        if isinstance(config, EagleConfig) and number == 0:
            kind = "behind fc" if early else "reads token"
        shapes |= _layer(body, f"layers.{number}", kind)
    return shapes | (_of_eagle(config) if isinstance(config, EagleConfig) else _of_block(config))


def _of_medusa(config: MedusaConfig) -> Shapes:
    size, shapes = config.hidden_size, Shapes()
    for layer in (f"blocks.{i}.layers.{j}" for i in range(config.depth) for j in range(config.num_layers)):
        shapes[f"{layer}.weight"] = (size, size)
        if config.bias:
            shapes[f"{layer}.bias"] = (size,)
    for i in range(config.output_layers if config.own_head else 0):
        shapes[f"lm_heads.{i}.weight"] = (config.draft_vocab_size, size)
    return shapes


def _of_eagle(config: EagleConfig) -> Shapes:
    taps, size = len(config.taps), config.target_hidden_size
    shapes: Shapes = {"input_norm.weight": (taps * size,)} if config.norm_before_fc else {}
    if config.fc_bias:
        shapes["fc.bias"] = (config.hidden_size,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (size,) for i in range(taps)}
    if config.mask_token_id is not None:
        shapes["mask_hidden"] = (1, 1, taps * size)
    return shapes


def _of_block(config: BlockConfig) -> Shapes:
    size, rank = config.body.hidden_size, config.markov_rank
    shapes: Shapes = {"hidden_norm.weight": (size,)}
    if rank:
        shapes["markov_head.markov_w1.weight"] = (config.body.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (config.draft_vocab_size, rank)
    if config.reads_last:
        shapes |= {"entry_norm.weight": (size,), "entry.weight": (config.block_size * size, 2 * size)}
    if config.confidence:
        width = size + (rank if config.confidence_reads_token else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def _layer(body: ModelConfig, prefix: str, kind: _Kind) -> Shapes:
    """A layer: a decoder's, or an EAGLE's first, with two norms before it (EAGLE-3) or none."""
    size, inner = body.hidden_size, body.intermediate_size
    q, kv = body.num_heads * body.head_dim, body.num_kv_heads * body.head_dim
    width = 2 * size if kind == "reads token" else size
    norms = ["post_attention_layernorm"]
    if kind != "behind fc":
        norms += ["input_layernorm"]
    if kind == "reads token":
        norms += ["hidden_norm"]
    shapes: Shapes = {f"{prefix}.{name}.weight": (size,) for name in norms}
    if body.qk_norm:
        shapes |= {f"{prefix}.self_attn.{x}_norm.weight": (body.head_dim,) for x in "qk"}
    for name, rows, columns, bias in (
        ("self_attn.q_proj", q, width, body.qkv_bias),
        ("self_attn.k_proj", kv, width, body.qkv_bias),
        ("self_attn.v_proj", kv, width, body.qkv_bias),
        ("self_attn.o_proj", size, q, body.o_bias),
        ("mlp.gate_proj", inner, size, body.mlp_bias),
        ("mlp.up_proj", inner, size, body.mlp_bias),
        ("mlp.down_proj", size, inner, body.mlp_bias),
    ):
        shapes[f"{prefix}.{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{prefix}.{name}.bias"] = (rows,)
    return shapes
