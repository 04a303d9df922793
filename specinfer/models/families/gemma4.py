"""Gemma 4: layers with windows and layers without differ in their heads; the last ones share keys and values.

Small models have per-layer embeddings (per_layer.py), and MLPs of twice the size in layers that share. Large
ones take the values of layers without a window from their keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from specinfer.errors import ModelError
from specinfer.models.config import (
    Activation,
    Experts,
    Family,
    LayerHeads,
    ModelConfig,
    NormPlace,
    PerLayer,
    QkNorm,
)
from specinfer.models.families.gemma import HEADS, KEYS
from specinfer.models.families.mixtures import expert_stacks
from specinfer.models.fields import (
    MAX_LAYERS,
    Fields,
    count,
    integer,
    mapping,
    optional_positive,
    positive,
)
from specinfer.models.gguf_config import BOTH_SIDES, GgufFamily, GgufHead, rope_from_gguf
from specinfer.models.gguf_config import window_of as gguf_window
from specinfer.models.hf_config import HfFamily, but_every, not_computed, window_of, windows
from specinfer.models.positions import Rope, rope_from_hf
from specinfer.models.sources import Names

_UNROTATED: Final = 1e30  # divides the frequencies of pairs that are not rotated, as in llama.cpp
DEFAULTS: Final[Fields] = {
    **{**HEADS, "sliding_window": 512},
    **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144},
}
_ROPES: Final[Fields] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
FIXED: Final[Mapping[str, Any]] = {
    **{"norm_place": NormPlace.BOTH, "qk_norm": QkNorm.HEAD},
    **{"value_norm": True, "attention_scale": 1.0},
}
GGUF_FIXED: Final[Mapping[str, Any]] = {**FIXED, "activation": Activation.GELU_TANH}


def with_per_layer(
    config: ModelConfig,
    found: Sequence[int | None],
    shared: int,
    inner: Sequence[int],
    per_layer: PerLayer | None,
    **own: Any,
) -> ModelConfig:
    """The config with the windows and the MLP sizes of all layers, and what is a family's own."""
    return replace(
        config,
        layer_windows=tuple(found),
        shared_layers=shared,
        layer_inner=tuple(inner) if len(set(inner)) > 1 else (),
        per_layer=per_layer,
        embedding_scale=config.hidden_size**0.5,
        **own,
    )


def from_gguf(config: ModelConfig, head: GgufHead, shared: int, **own: Any) -> ModelConfig:
    """The same of a file."""
    c, table = head.fields, head.shapes.get("per_layer_token_embd.weight")
    if table is None and integer(c, "embedding_length_per_layer_input", 0):
        raise ModelError("the GGUF file has no per_layer_token_embd.weight; it is not complete")
    return with_per_layer(
        config,
        [gguf_window(c) if one else None for one in gguf_windows(c)],
        shared,
        [of_layer(c, "feed_forward_length", i) for i in range(config.num_layers)],
        None if table is None else PerLayer(count(c, "embedding_length_per_layer_input"), table[0]),
        **own,
    )


def _beside(c: Fields, *keys: str) -> Experts:
    """The experts beside MLPs; keys of how many there are, how many a token has, and their size."""
    number, each, size = (count(c, key) for key in keys)
    return Experts(number, each, size, normalized=True, beside=True)


def _gemma4(config: ModelConfig, c: Fields) -> ModelConfig:
    if (both := c["use_bidirectional_attention"]) not in (None, "vision"):
        raise not_computed("use_bidirectional_attention", both, Family.GEMMA4.value)
    found = windows(c, window_of(c), but_every(6))
    found = (*found[:-1], None)  # as in transformers
    heads = _global_heads(c, found)
    shared = integer(c, "num_kv_shared_layers", 0)
    inner = config.intermediate_size
    wide = bool(c.get("use_double_wide_mlp")) and shared > 0
    size = integer(c, "hidden_size_per_layer_input", 0)
    mixed = bool(c.get("enable_moe_block"))
    return with_per_layer(
        config,
        found,
        shared,
        [inner] * (config.num_layers - shared) + [2 * inner if wide else inner] * shared,
        PerLayer(size, count(c, "vocab_size_per_layer_input")) if size else None,
        experts=_beside(c, "num_experts", "top_k_experts", "moe_intermediate_size") if mixed else None,
        rope=_global_rope(mapping(_ropes(c), "full_attention"), heads.head_dim),
        local_rope=config.rope,
        global_heads=heads,
        logit_softcap=optional_positive(c, "final_logit_softcapping"),
    )


def _global_heads(c: Fields, found: tuple[int | None, ...]) -> LayerHeads:
    """The heads of layers without a window: transformers writes them by layer, published files once."""
    same = bool(c.get("attention_k_eq_v"))
    kv_heads = count(c, "num_key_value_heads")
    if c.get("per_layer_config") is None:
        own = count(c, "num_global_key_value_heads", kv_heads) if same else kv_heads
        return LayerHeads(count(c, "global_head_dim", 512), own, same)
    by_layer = mapping(c, "per_layer_config")
    of_all = by_layer.get(str(len(found) - 1), {})  # the last layer has no window
    expected = {str(i): of_all for i, window in enumerate(found) if window is None and of_all}
    if not isinstance(of_all, dict) or by_layer != expected:
        raise ModelError(
            "per_layer_config of config.json differs between layers of one kind; supported: one head_dim and "
            "one num_key_value_heads for all layers without a window"
        )
    size, own = count(c, "head_dim"), count(of_all, "num_key_value_heads", kv_heads)
    return LayerHeads(count(of_all, "head_dim", size), own, same)


def _ropes(c: Fields) -> Fields:
    return _ROPES if c.get("rope_parameters") is None else mapping(c, "rope_parameters")


def _local_rope(c: Fields) -> tuple[Rope, None]:
    parameters = {"rope_theta": 1e4, **mapping(_ropes(c), "sliding_attention"), "partial_rotary_factor": 1.0}
    return rope_from_hf({**c, "rope_parameters": parameters}, count(c, "head_dim")), None


def _global_rope(parameters: Fields, head_dim: int) -> Rope:
    if parameters.get("rope_type") != "proportional":
        return rope_from_hf({"rope_parameters": {**parameters, "partial_rotary_factor": 1.0}}, head_dim)
    share, pairs = positive(parameters, "partial_rotary_factor", 1.0), head_dim // 2
    rotated = int(share * head_dim // 2)
    if not 0 < rotated <= pairs:
        raise ModelError(f"partial_rotary_factor is {share}; allowed: more than 0, up to 1")
    return Rope(
        positive(parameters, "rope_theta", 1e4),
        linear_factor=positive(parameters, "factor", 1.0),
        divisors=(1.0,) * rotated + (_UNROTATED,) * (pairs - rotated),
    )


def _of_local_layers(head: GgufHead) -> GgufHead:
    """The head as if all layers had a window: metadata of the two kinds have two keys, or a list."""
    c = head.fields
    found, size = gguf_windows(c), count(c, "attention.key_length_swa", count(c, "attention.key_length"))
    own: dict[str, object] = {
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.head_count_kv": of_layer(c, "attention.head_count_kv", found.index(True)),
        "feed_forward_length": of_layer(c, "feed_forward_length", 0),
        "rope.dimension_count": count(c, "rope.dimension_count_swa", size),
        "rope.freq_base": positive(c, "rope.freq_base_swa", 1e4),
    }
    fields = {f"{head.architecture}.{key}": value for key, value in own.items()}
    return replace(head, metadata={**head.metadata, **fields}, rope={})


def of_layer(c: Fields, key: str, layer: int) -> int:
    """A layer's count, which may be one of a list."""
    value = c.get(key)
    return count({key: value[layer]} if isinstance(value, list) and layer < len(value) else c, key)


def gguf_windows(c: Fields) -> list[bool]:
    """For each layer True if it has a window."""
    layers, pattern = integer(c, "block_count", limit=MAX_LAYERS), c.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != layers or not any(pattern) or all(pattern):
        raise ModelError(
            f"attention.sliding_window_pattern of the GGUF file is {str(pattern)[:80]}; expected a list for "
            f"{layers} layers, with windows in some of them"
        )
    return [bool(one) for one in pattern]


def _gemma4_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    c, layer = head.fields, gguf_windows(head.fields).index(False)
    kv_heads = of_layer(c, "attention.head_count_kv", layer)
    same, experts = f"blk.{layer}.attn_v.weight" not in head.shapes, integer(c, "expert_count", 0)
    keys = "expert_count", "expert_used_count", "expert_feed_forward_length"
    return from_gguf(
        config,
        head,
        integer(c, "attention.shared_kv_layers", 0),
        experts=_beside(c, *keys) if experts else None,
        rope=rope_from_gguf(c, config.max_context, 1e6, head.rope, None),
        local_rope=config.rope,
        global_heads=LayerHeads(count(c, "attention.key_length"), kv_heads, same),
    )


HF: Final = (
    HfFamily(
        Family.GEMMA4,
        {**DEFAULTS, "use_bidirectional_attention": None},
        KEYS,
        _gemma4,
        {**FIXED, "output_factor": True},
        ropes=_local_rope,
        names=Names(
            inside={"router.proj": "mlp.gate"},
            expert_stacks=expert_stacks("experts"),
            whole={"router.scale": "mlp.router_scale", "router.per_expert_scale": "mlp.expert_scale"},
        ),
        also=("gemma4_text",),
    ),
)
GGUF: Final = (
    GgufFamily(
        "gemma4",
        Family.GEMMA4,
        _gemma4_from_gguf,
        {**GGUF_FIXED, "output_factor": True},
        BOTH_SIDES,
        given=_of_local_layers,
    ),
)
