"""Mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, Granite-MoE and gpt-oss.

Their attention is that of Mistral, Qwen2, Qwen3, OLMo 2 and Granite.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from specinfer.errors import ModelError
from specinfer.models.config import Activation, Experts, Family, ModelConfig, QkNorm
from specinfer.models.fields import Fields, boolean, count, integer, number, positive
from specinfer.models.gguf_config import POST_ATTENTION, GgufFamily, GgufHead
from specinfer.models.gguf_config import windows as gguf_windows
from specinfer.models.hf_config import (
    BIASED,
    USUAL,
    HfFamily,
    but_every,
    check_silu,
    defaults,
    switched_window,
    window_of,
    windows,
    with_rope,
)
from specinfer.models.sources import Names

_MIXTRAL: Final = defaults(eps=1e-5, context=131072, rope_theta=1e6, num_experts_per_tok=2)
_QWEN: Final = defaults(eps=1e-6, context=32768, decoder_sparse_step=1, norm_topk_prob=False)
_QWEN2: Final[Fields] = {
    **{**_QWEN, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
    **{"shared_expert_intermediate_size": 5632, "max_window_layers": 28},
}
_QWEN3: Final[Fields] = {**_QWEN, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_QWEN3_VL: Final[Fields] = {
    **{**_QWEN, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
    **{"norm_topk_prob": True, "rope_theta": 500000.0},
}
_OLMOE: Final = defaults(eps=1e-5, context=4096, num_experts_per_tok=8, norm_topk_prob=False)
_GRANITE: Final = defaults(eps=1e-6, context=2048, num_experts_per_tok=2)
_GPT_OSS: Final[Fields] = {
    **defaults(eps=1e-5, context=131072, rope_theta=150000.0, num_key_value_heads=8, head_dim=64),
    **{"num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True},
}
_GPT_OSS_ROPE: Final[Fields] = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}
_GPT_OSS_FORM: Final[Mapping[str, Any]] = {"attention_sinks": True, "activation": Activation.CLAMPED_SWISH}
_WHOLE_NORM: Final[Mapping[str, Any]] = {"qk_norm": QkNorm.WHOLE}


def expert_stacks(prefix: str) -> dict[str, tuple[str, ...]]:
    """Stacks of all experts in newer folders; others have one matrix for each expert."""
    return {f"{prefix}.gate_up_proj": ("gate_proj", "up_proj"), f"{prefix}.down_proj": ("down_proj",)}


def numbered_names(theirs: str, ours: str) -> dict[str, str]:
    """The names of an MLP's matrices that files number."""
    parts = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    return {f"{theirs}.{number}": f"{ours}.{name}" for number, name in parts.items()}


EXPERT_STACKS: Final = expert_stacks("mlp.experts")


def with_experts(config: ModelConfig, experts: Experts) -> ModelConfig:
    """A config with these experts; without dense layers, its MLP size is that of an expert."""
    if len(experts.dense_layers) == config.num_layers:
        return config
    size = config.intermediate_size if experts.dense_layers else experts.size
    return replace(config, intermediate_size=size, experts=experts)


def window_everywhere(config: ModelConfig, c: Fields) -> ModelConfig:
    """The config with the window of config.json in every layer."""
    return replace(config, layer_windows=windows(c, window_of(c), lambda _: True))


def _mixtral(config: ModelConfig, c: Fields) -> ModelConfig:
    config = window_everywhere(config, c)
    return with_experts(config, experts_of_inner_size(config, c, 8, normalized=True))


def _number(c: Fields, default: int) -> int:
    """The number of experts, under either of transformers' names."""
    return integer(c, "num_experts", integer(c, "num_local_experts", default))


def experts_of_inner_size(config: ModelConfig, c: Fields, default: int, *, normalized: bool) -> Experts:
    """Experts in every layer, whose size is the key that other models use for MLPs."""
    size, each = config.intermediate_size, count(c, "num_experts_per_tok")
    return Experts(_number(c, default), each, size, normalized=normalized)


def experts_of(c: Fields, number: int, *, normalized: bool = True, **own: Any) -> Experts:
    """That many experts, with the usual keys; `normalized` is a default."""
    return Experts(
        number,
        count(c, "num_experts_per_tok"),
        count(c, "moe_intermediate_size"),
        normalized=boolean(c, "norm_topk_prob", normalized),
        **own,
    )


def sigmoid_experts(c: Fields, number: str, **own: Any) -> Experts:
    """The same for routers with sigmoids; `number` is the key of how many there are."""
    scale = positive(c, "routed_scaling_factor", 1.0)
    return experts_of(c, count(c, number), sigmoid=True, scale=scale, **own)


def experts_of_qwen(c: Fields, layers: int, number: int, shared_size: int = 0) -> Experts:
    """The experts of a Qwen, in all layers but those that its keys except."""
    only = c.get("mlp_only_layers") or []
    if not isinstance(only, list) or not all(type(layer) is int and 0 <= layer < layers for layer in only):
        raise ModelError(f"mlp_only_layers is {only!r}; expected a list of numbers below {layers}")
    step = count(c, "decoder_sparse_step")
    dense = frozenset({*only, *(layer for layer in range(layers) if (layer + 1) % step)})
    return experts_of(c, number, normalized=False, shared_size=shared_size, dense_layers=dense)


def _qwen2(config: ModelConfig, c: Fields) -> ModelConfig:
    first = integer(c, "max_window_layers")
    config = replace(
        config,
        # transformers 5 fills in layer_types the same way.
        layer_windows=windows(c, switched_window(c), lambda layer: layer < first and layer % 2 == 0),
        qkv_bias=boolean(c, "qkv_bias", True),
    )
    size = count(c, "shared_expert_intermediate_size")
    return with_experts(config, experts_of_qwen(c, config.num_layers, _number(c, 60), size))


def _qwen3(config: ModelConfig, c: Fields) -> ModelConfig:
    config = replace(config, layer_windows=windows(c, switched_window(c), lambda _: True))
    return with_experts(config, experts_of_qwen(c, config.num_layers, _number(c, 128)))


def _olmoe(config: ModelConfig, c: Fields) -> ModelConfig:
    normalized = boolean(c, "norm_topk_prob", False)
    return with_experts(config, experts_of_inner_size(config, c, 64, normalized=normalized))


def granite_factors(config: ModelConfig, c: Fields) -> ModelConfig:
    """The config with Granite's four factors."""
    return replace(
        config,
        embedding_scale=positive(c, "embedding_multiplier", 1.0),
        attention_scale=positive(c, "attention_multiplier", 1.0),
        residual_scale=positive(c, "residual_multiplier", 1.0),
        logit_scale=1.0 / positive(c, "logits_scaling", 1.0),
    )


def granite_logits(config: ModelConfig, head: GgufHead) -> ModelConfig:
    """The config with the factor of logits of a Granite's GGUF file."""
    return replace(config, logit_scale=1.0 / positive(head.fields, "logit_scale", 1.0))


def _granite(config: ModelConfig, c: Fields) -> ModelConfig:
    return with_experts(granite_factors(config, c), experts_of_inner_size(config, c, 8, normalized=True))


def _gpt_oss(config: ModelConfig, c: Fields) -> ModelConfig:
    for key, known in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if (value := number(c, key, known)) != known:
            raise ModelError(f"{key} is {value}; supported for gpt-oss: {known}")
    check_silu(c, "hidden_act", "gpt-oss")
    config = replace(config, layer_windows=windows(c, window_of(c), but_every(2)))
    return with_experts(config, replace(experts_of_inner_size(config, c, 128, normalized=True), bias=True))


_STACKED: Final = Names(expert_stacks=EXPERT_STACKS)
GRANITE_NAMES: Final = Names(
    inside={"block_sparse_moe.router.layer": "mlp.gate", "block_sparse_moe.router": "mlp.gate"},
    expert_stacks={
        "block_sparse_moe.input_linear.weight": ("gate_proj", "up_proj"),
        "block_sparse_moe.output_linear.weight": ("down_proj",),
        **expert_stacks("block_sparse_moe.experts"),
    },
)
HF: Final = (
    HfFamily(
        Family.MIXTRAL,
        _MIXTRAL,
        USUAL,
        _mixtral,
        names=Names(
            inside={
                "block_sparse_moe.gate": "mlp.gate",
                **numbered_names("block_sparse_moe.experts.*", "mlp.experts.*"),
                **numbered_names("mlp.experts.*", "mlp.experts.*"),
            },
            expert_stacks=EXPERT_STACKS,
        ),
    ),
    HfFamily(Family.QWEN2_MOE, _QWEN2, USUAL, _qwen2, names=_STACKED),
    HfFamily(
        Family.QWEN3_MOE,
        _QWEN3_VL,
        BIASED,
        _qwen3,
        {"qk_norm": QkNorm.HEAD},
        names=Names(expert_stacks=EXPERT_STACKS, turned_stacks=(*EXPERT_STACKS,)),
        also=("qwen3_vl_moe_text",),
    ),
    HfFamily(Family.QWEN3_MOE, _QWEN3, BIASED, _qwen3, {"qk_norm": QkNorm.HEAD}, names=_STACKED),
    HfFamily(Family.OLMOE, _OLMOE, BIASED, _olmoe, _WHOLE_NORM, names=_STACKED),
    HfFamily(Family.GRANITE_MOE, _GRANITE, BIASED, _granite, names=GRANITE_NAMES),
    HfFamily(
        Family.GPT_OSS,
        _GPT_OSS,
        BIASED,
        _gpt_oss,
        _GPT_OSS_FORM,
        given=lambda c: with_rope(c, _GPT_OSS_ROPE),
        names=Names(
            inside={"mlp.router": "mlp.gate"},
            expert_stacks={
                **EXPERT_STACKS,
                "mlp.experts.gate_up_proj.weight": ("gate_proj", "up_proj"),  # in MXFP4
                "mlp.experts.down_proj.weight": ("down_proj",),
                "mlp.experts.gate_up_proj_bias": ("gate_proj", "up_proj"),
                "mlp.experts.down_proj_bias": ("down_proj",),
            },
            in_turns=True,
            turned_stacks=(*EXPERT_STACKS,),
        ),
    ),
)


_SOFTMAX: Final = 1  # llama.cpp's numbers
_SIGMOID: Final = 2


def with_gguf_experts(config: ModelConfig, head: GgufHead, *, normalized: bool, **own: Any) -> ModelConfig:
    """The config with the experts of a file; `normalized` is llama.cpp's default for that architecture.

    `own` are fields that all of its models have.
    """
    c, shapes = head.fields, head.shapes
    kind, scale = integer(c, "expert_gating_func", _SOFTMAX), positive(c, "expert_weights_scale", 1.0)
    if kind not in (_SOFTMAX, _SIGMOID) or (kind == _SOFTMAX and scale != 1):
        raise ModelError("the GGUF file has a router other than softmax and sigmoid, which is not supported")
    shared = next((shape[0] for name, shape in shapes.items() if name.endswith("ffn_up_shexp.weight")), 0)
    layers = range(config.num_layers)
    experts = Experts(
        count(c, "expert_count"),
        count(c, "expert_used_count"),
        count(c, "expert_feed_forward_length", config.intermediate_size),
        normalized=boolean(c, "expert_weights_norm", normalized),
        shared_size=shared,
        shared_gated=not shared or any(name.endswith("ffn_gate_inp_shexp.weight") for name in shapes),
        dense_layers=frozenset(i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in shapes),
        sigmoid=kind == _SIGMOID,
        choice_bias=any(name.endswith("exp_probs_b.bias") for name in shapes),
        scale=scale,
    )
    return with_experts(config, replace(experts, **own))


def _olmoe_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    if head.fields.get("attention.clamp_kqv"):
        raise ModelError("the GGUF file clips queries after their norm, which is not supported")
    return with_gguf_experts(config, head, normalized=False)


def _granite_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    return with_gguf_experts(granite_logits(config, head), head, normalized=True)


def _gpt_oss_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    config, rope = with_gguf_experts(config, head, normalized=True, bias=True), config.rope
    if rope is not None and rope.yarn is not None:  # as in training; files have no key for it
        rope = replace(rope, yarn=replace(rope.yarn, truncate=False))
    return replace(config, rope=rope, layer_windows=gguf_windows(config, head, but_every(2)))


GGUF: Final = (
    GgufFamily("qwen2moe", Family.QWEN2_MOE, partial(with_gguf_experts, normalized=False)),
    GgufFamily("qwen3moe", Family.QWEN3_MOE, partial(with_gguf_experts, normalized=True)),
    GgufFamily("qwen3vlmoe", Family.QWEN3_MOE, partial(with_gguf_experts, normalized=True)),
    GgufFamily("olmoe", Family.OLMOE, _olmoe_from_gguf, _WHOLE_NORM),
    GgufFamily("granitemoe", Family.GRANITE_MOE, _granite_from_gguf, neighbours=True),
    GgufFamily("gpt-oss", Family.GPT_OSS, _gpt_oss_from_gguf, _GPT_OSS_FORM, POST_ATTENTION),
)
