"""Llama 4: mixtures whose experts read inputs times their scores, in all layers or in some.

Every fourth layer has no rope. The other layers attend within chunks of a text, and those scale the queries
of late positions. Texts end before either begins, so that neither is computed.
"""

from dataclasses import replace
from typing import Final

from specinfer.errors import ModelError
from specinfer.models.config import Family, ModelConfig, QkNorm
from specinfer.models.families.llama import without_rope
from specinfer.models.families.mixtures import (
    expert_stacks,
    sigmoid_experts,
    with_experts,
    with_gguf_experts,
)
from specinfer.models.fields import Fields, boolean, count
from specinfer.models.gguf_config import GgufFamily, GgufHead
from specinfer.models.hf_config import BIASED, HfFamily, defaults, windows
from specinfer.models.sources import SHARED, Names

_CHUNK: Final = 8192
_LLAMA4: Final[Fields] = {
    **defaults(eps=1e-5, context=131072, rope_theta=500000.0, num_key_value_heads=8, head_dim=128),
    **{"intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 16},
    **{"num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "no_rope_layer_interval": 4},
    **{"attention_chunk_size": _CHUNK, "floor_scale": _CHUNK, "attn_temperature_tuning": True},
    "use_qk_norm": True,
}
_PASSED_OVER: Final = (
    *("attention_chunk_size", "floor_scale", "attn_temperature_tuning", "attn_scale"),  # as texts end early
    *("max_position_embeddings", "interleave_moe_layer_step", "intermediate_size_mlp"),
)
_UNNORMED: Final = 128  # the number of experts of the model without norms of q and k
_STACKS: Final = expert_stacks("feed_forward.experts")
_MLP: Final = ("gate_proj", "up_proj", "down_proj")


def _llama4(config: ModelConfig, c: Fields) -> ModelConfig:
    ends, kinds = [config.max_context], c.get("layer_types")
    if c.get("attention_chunk_size") is not None:
        ends.append(count(c, "attention_chunk_size"))
    if c.get("attn_temperature_tuning"):
        ends.append(count(c, "floor_scale") - 1)
    if isinstance(kinds, list):
        kinds = ["full_attention" if kind == "chunked_attention" else kind for kind in kinds]
    layers, step, mixed = range(config.num_layers), count(c, "interleave_moe_layer_step"), c.get("moe_layers")
    if mixed is None:
        mixed = layers[step - 1 :: step]
    if not isinstance(mixed, list | range):
        raise ModelError(f"moe_layers is {mixed!r}; expected a list of layers. The config is damaged.")
    config = replace(
        config,
        intermediate_size=count(c, "intermediate_size_mlp"),
        layer_windows=windows({**c, "layer_types": kinds}, None, lambda _: False),
        layers_without_rope=without_rope(c, config.num_layers),
        qk_norm=QkNorm.PLAIN if boolean(c, "use_qk_norm", True) else QkNorm.NONE,
        max_context=min(ends),
    )
    size = count(c, "intermediate_size")
    experts = sigmoid_experts(
        {**c, "moe_intermediate_size": size, "norm_topk_prob": False},
        "num_local_experts",
        dense_layers=frozenset(layer for layer in layers if layer not in mixed),
        shared_size=size,
        shared_gated=False,
        scales_inputs=True,
    )
    return with_experts(config, experts)


def _llama4_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    """Files have no keys of chunks, of layers without rope and of norms; values are llama.cpp's."""
    if head.fields.get("attention.sliding_window") is not None:
        raise ModelError("the GGUF file is of a Llama 4 without chunks, which is not supported")
    config = replace(
        config,
        layers_without_rope=without_rope(_LLAMA4, config.num_layers),
        qk_norm=QkNorm.NONE if count(head.fields, "expert_count") == _UNNORMED else QkNorm.PLAIN,
        max_context=min(config.max_context, _CHUNK - 1),
    )
    return with_gguf_experts(config, head, normalized=False, sigmoid=True, scales_inputs=True)


HF: Final = (
    HfFamily(
        Family.LLAMA4,
        _LLAMA4,
        BIASED,
        _llama4,
        names=Names(
            inside={
                "feed_forward.router": "mlp.gate",
                **{f"feed_forward.{name}": f"mlp.{name}" for name in _MLP},
                **{f"feed_forward.shared_expert.{name}": f"{SHARED}{name}" for name in _MLP},
            },
            expert_stacks=_STACKS,
            turned_stacks=(*_STACKS,),
            neighbours=True,
        ),
        passed_over=frozenset(_PASSED_OVER),
    ),
)
GGUF: Final = (GgufFamily("llama4", Family.LLAMA4, _llama4_from_gguf, neighbours=True),)
