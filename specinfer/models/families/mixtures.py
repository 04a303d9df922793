"""Mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, Granite-MoE and gpt-oss.

Their attention is that of Mistral, Qwen2, Qwen3, OLMo 2 and Granite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from specinfer.errors import ModelError
from specinfer.models.config import Activation, Experts, Family, ModelConfig, QkNorm
from specinfer.models.fields import Fields, boolean, count, integer, number, positive
from specinfer.models.gguf_config import INSIDE, GgufFamily, GgufHead, decoder_from_gguf
from specinfer.models.gguf_config import window_of as gguf_window
from specinfer.models.hf_config import BIASED, HfFamily, defaults, refuse, rotary_from_hf, window_of, windows
from specinfer.models.sources import Names

_MIXTRAL: Final = defaults(eps=1e-5, context=131072, rope_theta=1e6, num_experts_per_tok=2)
_QWEN: Final = defaults(eps=1e-6, context=32768, decoder_sparse_step=1, norm_topk_prob=False)
_QWEN2: Final[Fields] = {
    **_QWEN,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "max_window_layers": 28,
}
_QWEN3: Final[Fields] = {
    **_QWEN,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_OLMOE: Final = defaults(eps=1e-5, context=4096, num_experts_per_tok=8, norm_topk_prob=False)
_GRANITE: Final = defaults(eps=1e-6, context=2048, num_experts_per_tok=2)
_GPT_OSS: Final = defaults(
    eps=1e-5,
    context=131072,
    rope_theta=150000.0,
    num_key_value_heads=8,
    head_dim=64,
    num_experts_per_tok=4,
    sliding_window=128,
    attention_bias=True,
)
_GPT_OSS_ROPE: Final[Fields] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# Files have one matrix for each expert, or, in newer folders, stacks of all.
_STACKS: Final = {
    "mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.experts.down_proj": ("down_proj",),
}


def _mixture(config: ModelConfig, experts: Experts) -> ModelConfig:
    """A config with these experts; without dense layers, its MLP size is that of an expert."""
    if len(experts.dense_layers) == config.num_layers:
        return config
    size = config.intermediate_size if experts.dense_layers else experts.size
    return replace(config, intermediate_size=size, experts=experts)


def _shared(family: Family, c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    refuse(c, "attn_logit_softcapping", "use_bidirectional_attention")
    return rotary_from_hf(family, c, ids, BIASED)


def _mixtral(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_MIXTRAL, **c}
    shared = replace(_shared(Family.MIXTRAL, c, ids), qkv_bias=False, o_bias=False)
    shared = replace(shared, layer_windows=windows(c, window_of(c), lambda _: True))
    return _mixture(shared, _of_inner_size(shared, c, 8, normalized=True))


def _number(c: Fields, default: int) -> int:
    """The number of experts, under either of transformers' names."""
    return integer(c, "num_experts", integer(c, "num_local_experts", default))


def _of_inner_size(config: ModelConfig, c: Fields, default: int, *, normalized: bool) -> Experts:
    """Experts in every layer, whose size is the key that other models use for MLPs."""
    size, each = config.intermediate_size, count(c, "num_experts_per_tok")
    return Experts(_number(c, default), each, size, normalized=normalized)


def _of_qwen(c: Fields, layers: int, number: int, shared_size: int = 0) -> Experts:
    only = c.get("mlp_only_layers") or []
    if not isinstance(only, list) or not all(type(layer) is int and 0 <= layer < layers for layer in only):
        raise ModelError(f"mlp_only_layers is {only!r}; expected a list of numbers below {layers}")
    step = count(c, "decoder_sparse_step")
    dense = {layer for layer in range(layers) if (layer + 1) % step}
    return Experts(
        number,
        count(c, "num_experts_per_tok"),
        count(c, "moe_intermediate_size"),
        normalized=boolean(c, "norm_topk_prob", False),
        shared_size=shared_size,
        dense_layers=frozenset({*only, *dense}),
    )


def _qwen2(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_QWEN2, **c}
    shared, first = _shared(Family.QWEN2_MOE, c, ids), integer(c, "max_window_layers")
    window = window_of(c) if c.get("use_sliding_window", False) else None
    shared = replace(
        shared,
        # transformers 5 fills in layer_types the same way.
        layer_windows=windows(c, window, lambda layer: layer < first and layer % 2 == 0),
        qkv_bias=boolean(c, "qkv_bias", True),
        o_bias=False,
    )
    size = count(c, "shared_expert_intermediate_size")
    return _mixture(shared, _of_qwen(c, shared.num_layers, _number(c, 60), size))


def _qwen3(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_QWEN3, **c}
    shared = _shared(Family.QWEN3_MOE, c, ids)
    window = window_of(c) if c.get("use_sliding_window", False) else None
    shared = replace(
        shared, layer_windows=windows(c, window, lambda _: window is not None), qk_norm=QkNorm.HEAD
    )
    return _mixture(shared, _of_qwen(c, shared.num_layers, _number(c, 128)))


def _olmoe(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_OLMOE, **c}
    refuse(c, "clip_qkv")  # it would clip after the norm, whereas other models clip before it
    shared = replace(_shared(Family.OLMOE, c, ids), qk_norm=QkNorm.WHOLE)
    normalized = boolean(c, "norm_topk_prob", False)
    return _mixture(shared, _of_inner_size(shared, c, 64, normalized=normalized))


def _granite(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_GRANITE, **c}
    shared = replace(
        _shared(Family.GRANITE_MOE, c, ids),
        embedding_scale=positive(c, "embedding_multiplier", 1.0),
        residual_scale=positive(c, "residual_multiplier", 1.0),
        attention_scale=positive(c, "attention_multiplier", 1.0),
        logit_scale=1 / positive(c, "logits_scaling", 1.0),
    )
    return _mixture(shared, _of_inner_size(shared, c, 8, normalized=True))


def _gpt_oss(c: Fields, ids: Sequence[Fields]) -> ModelConfig:
    c = {**_GPT_OSS, **c}
    if c.get("rope_parameters") is None and c.get("rope_scaling") is None:
        c = {**c, "rope_scaling": _GPT_OSS_ROPE}
    for key, known in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if (value := number(c, key, known)) != known:
            raise ModelError(f"{key} is {value}; supported for gpt-oss: {known}")
    shared = _shared(Family.GPT_OSS, c, ids)
    if shared.activation is not Activation.SILU:
        raise ModelError(f"hidden_act is {c['hidden_act']!r}; supported for gpt-oss: 'silu'")
    shared = replace(
        shared,
        layer_windows=windows(c, window_of(c), lambda layer: layer % 2 == 0),
        attention_sinks=True,
        activation=Activation.CLAMPED_SWISH,
    )
    return _mixture(shared, replace(_of_inner_size(shared, c, 128, normalized=True), bias=True))


HF: Final = (
    HfFamily(
        ("mixtral",),
        _mixtral,
        Names(
            inside={
                **{f"{block}.gate": "mlp.gate" for block in ("block_sparse_moe", "mlp")},
                **{
                    f"{block}.experts.*.{theirs}": f"mlp.experts.*.{ours}"
                    for block in ("block_sparse_moe", "mlp")
                    for theirs, ours in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))
                },
            },
            expert_stacks=_STACKS,
        ),
    ),
    HfFamily(("qwen2_moe",), _qwen2, Names(expert_stacks=_STACKS)),
    HfFamily(("qwen3_moe",), _qwen3, Names(expert_stacks=_STACKS)),
    HfFamily(("olmoe",), _olmoe, Names(expert_stacks=_STACKS)),
    HfFamily(
        ("granitemoe",),
        _granite,
        Names(
            inside={
                "block_sparse_moe.router.layer": "mlp.gate",
                "block_sparse_moe.router": "mlp.gate",
            },
            expert_stacks={
                "block_sparse_moe.input_linear.weight": ("gate_proj", "up_proj"),
                "block_sparse_moe.output_linear.weight": ("down_proj",),
                "block_sparse_moe.experts.gate_up_proj": ("gate_proj", "up_proj"),
                "block_sparse_moe.experts.down_proj": ("down_proj",),
            },
        ),
    ),
    HfFamily(
        ("gpt_oss",),
        _gpt_oss,
        Names(
            inside={"mlp.router": "mlp.gate"},
            expert_stacks={
                **_STACKS,
                "mlp.experts.gate_up_proj.weight": ("gate_proj", "up_proj"),  # in MXFP4
                "mlp.experts.down_proj.weight": ("down_proj",),
                "mlp.experts.gate_up_proj_bias": ("gate_proj", "up_proj"),
                "mlp.experts.down_proj_bias": ("down_proj",),
            },
            in_turns=True,
            turned_stacks=(*_STACKS,),
        ),
    ),
)


def _experts_of_gguf(head: GgufHead, *, normalized: bool, layers: int) -> Experts:
    """The experts, with llama.cpp's defaults for that architecture."""
    c, shapes = head.fields, head.shapes
    if integer(c, "expert_gating_func", 1) != 1 or positive(c, "expert_weights_scale", 1.0) != 1:
        raise ModelError("the GGUF file has a router other than softmax, which is not supported")
    shared = next((shape[0] for name, shape in shapes.items() if name.endswith("ffn_up_shexp.weight")), 0)
    return Experts(
        count(c, "expert_count"),
        count(c, "expert_used_count"),
        count(c, "expert_feed_forward_length", count(c, "feed_forward_length")),
        normalized=boolean(c, "expert_weights_norm", normalized),
        shared_size=shared,
        dense_layers=frozenset(i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" not in shapes),
    )


def _from_gguf(family: Family, head: GgufHead, *, normalized: bool) -> ModelConfig:
    """The config of a mixture with Llama's shape."""
    made = decoder_from_gguf(family, head)
    return _mixture(made, _experts_of_gguf(head, normalized=normalized, layers=made.num_layers))


def mixtral_from_gguf(head: GgufHead) -> ModelConfig:
    """The config of a Mixtral model, whose architecture in files is llama."""
    return _from_gguf(Family.MIXTRAL, head, normalized=True)


def _olmoe_from_gguf(head: GgufHead) -> ModelConfig:
    if head.fields.get("attention.clamp_kqv"):
        raise ModelError("the GGUF file clips queries after their norm, which is not supported")
    return replace(_from_gguf(Family.OLMOE, head, normalized=False), qk_norm=QkNorm.WHOLE)


def _granite_from_gguf(head: GgufHead) -> ModelConfig:
    divided = positive(head.fields, "logit_scale", 1.0)
    return replace(_from_gguf(Family.GRANITE_MOE, head, normalized=True), logit_scale=1 / divided)


def _gpt_oss_from_gguf(head: GgufHead) -> ModelConfig:
    found, window = _from_gguf(Family.GPT_OSS, head, normalized=True), gguf_window(head.fields)
    rope = found.rope
    if rope is not None and rope.yarn is not None:  # as in training; files have no key for it
        rope = replace(rope, yarn=replace(rope.yarn, truncate=False))
    return replace(
        found,
        rope=rope,
        layer_windows=tuple(None if layer % 2 else window for layer in range(found.num_layers)),
        attention_sinks=True,
        activation=Activation.CLAMPED_SWISH,
        experts=None if found.experts is None else replace(found.experts, bias=True),
    )


GGUF: Final = (
    GgufFamily("qwen2moe", lambda head: _from_gguf(Family.QWEN2_MOE, head, normalized=False)),
    GgufFamily("qwen3moe", lambda head: _from_gguf(Family.QWEN3_MOE, head, normalized=True)),
    GgufFamily("olmoe", _olmoe_from_gguf),
    GgufFamily("granitemoe", _granite_from_gguf, neighbours=True),
    GgufFamily("gpt-oss", _gpt_oss_from_gguf, {**INSIDE, "post_attention_norm": "post_attention_layernorm"}),
)
