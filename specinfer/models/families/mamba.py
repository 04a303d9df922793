"""Hybrids with Mamba-2 layers: Granite 4 h, Bamba and Nemotron-H.

Nemotron's layers have one block each: attention, Mamba-2 or an MLP.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from specinfer.errors import ModelError
from specinfer.kernels.recurrence_config import GateNorm, LayerKind, Recurrence
from specinfer.models.config import Activation, Family, ModelConfig
from specinfer.models.families.hybrids import mixer_names, mixer_vectors, with_kinds
from specinfer.models.families.mixtures import (
    GRANITE_NAMES,
    experts_of_inner_size,
    granite_factors,
    granite_logits,
    sigmoid_experts,
    with_experts,
    with_gguf_experts,
)
from specinfer.models.fields import Fields, boolean, count, integer, number
from specinfer.models.gguf_config import INSIDE, GgufFamily, GgufHead
from specinfer.models.hf_config import (
    ALL_BIASED,
    BIASED,
    ConfigKeys,
    HfFamily,
    check_silu,
    defaults,
    no_rope,
    not_computed,
    one_rope,
)
from specinfer.models.positions import Rope
from specinfer.models.sources import GATE_UP, SHARED, Inside, Names

MAMBA: Final[Fields] = {
    **{"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4},
    **{"mamba_expand": 2, "mamba_conv_bias": True, "mamba_d_head": "auto"},
}
_GRANITE: Final[Fields] = {
    **defaults(eps=1e-6, context=2048, num_experts_per_tok=2, num_local_experts=8),
    **{"shared_intermediate_size": 1024, **MAMBA},
}
_BAMBA: Final[Fields] = {**defaults(eps=1e-5, context=262144, num_key_value_heads=8), **MAMBA}
_NEMOTRON: Final[Fields] = {
    **defaults(eps=1e-5, context=4096, num_key_value_heads=8, head_dim=128, layer_norm_epsilon=1e-5),
    **{"mlp_hidden_act": "relu2", "mamba_num_heads": 128, "mamba_head_dim": 64},
    **{"n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "n_routed_experts": 8},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688},
}
_NEMOTRON_PASSED: Final = (  # some of them without layers of experts
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("moe_shared_expert_intermediate_size", "routed_scaling_factor", "n_shared_experts"),
    *("attention_head_dim", "expand", "mamba_proj_bias", "attention_bias", "sliding_window"),
    "num_hidden_layers",
    *("n_group", "topk_group"),
)
# Granite's keys, and Nemotron-H's for the same.
_OF_GRANITE: Final = {
    **{"mamba_n_heads": "mamba_num_heads", "mamba_d_head": "mamba_head_dim", "mamba_n_groups": "n_groups"},
    **{"mamba_d_state": "ssm_state_size", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"},
    **{"mamba_proj_bias": "use_bias", "hidden_act": "mamba_hidden_act", "time_step_limit": "time_step_limit"},
}
_NEMOTRON_KEYS: Final = ConfigKeys(
    norm_eps="layer_norm_epsilon", activation="mlp_hidden_act", mlp_bias="mlp_bias"
)
_NEMOTRON_FORM: Final[Mapping[str, Any]] = {"gated_mlp": False}
_INFINITE: Final = (math.inf, {"__float__": "Infinity"})  # as transformers 4 and 5 write it
_NEMOTRON_GGUF: Final[Mapping[str, Any]] = {**_NEMOTRON_FORM, "activation": Activation.RELU2}
_PATTERN: Final = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
NO_NORM: Final[Mapping[str, Any]] = {"norm": GateNorm.NONE, "norm_groups": 1, "norm_eps": 1e-6}
_EPSILON: Final = 1e-20  # as in transformers
_KINDS: Final = {
    "full_attention": LayerKind.ATTENTION,
    "linear_attention": LayerKind.MAMBA2,
    "attention": LayerKind.ATTENTION,  # in files of transformers 4, as mamba
    "mamba": LayerKind.MAMBA2,
}
PARTS: Final = tuple(f"mixer.in_proj_{part}" for part in ("z", "x", "b", "c", "dt"))


def _names(prefix: str) -> dict[str, str | tuple[str, ...]]:
    return {f"{prefix}.in_proj": PARTS, **mixer_names(prefix)}


_FEED_FORWARD: Final = {
    "pre_ff_layernorm": "post_attention_layernorm",
    **{f"feed_forward.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
BAMBA_NAMES: Final = Names(
    outside={"model.final_layernorm": "model.norm"},
    inside={**_names("mamba"), **_FEED_FORWARD},
    whole=mixer_vectors("mamba"),
)


def mamba(config: ModelConfig, c: Fields, size: int) -> Recurrence:
    """The recurrence of a model with keys as Granite's; `size` is that of all heads."""
    check_silu(c, "hidden_act", "Mamba-2")
    heads, groups, state = count(c, "mamba_n_heads"), count(c, "mamba_n_groups"), count(c, "mamba_d_state")
    given = c.get("mamba_d_head")
    low, high = _limits(c)
    bias = boolean(c, "mamba_proj_bias", False)
    return Recurrence(
        kind=LayerKind.MAMBA2,
        taps=count(c, "mamba_d_conv"),
        channels=size + 2 * groups * state,
        heads=heads,
        groups=groups,
        key_size=state,
        value_size=size // heads if given == "auto" else count(c, "mamba_d_head", size // heads),
        conv_bias=boolean(c, "mamba_conv_bias", True),
        bias=bias,
        out_bias=bias,
        norm=GateNorm.BEHIND,
        norm_groups=groups,
        norm_eps=config.norm_eps,
        min_dt=low,
        max_dt=high,
    )


def _limits(c: Fields) -> tuple[float, float]:
    """The limits of dt; the upper one may be infinite."""
    key = "time_step_limit"
    limits = (0.0, math.inf) if c.get(key) is None else c[key]
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise ModelError(f"{key} is {limits!r}; expected two numbers. The config is damaged.")
    low, high = (math.inf if one in _INFINITE else number({key: one}, key) for one in limits)
    return low, high


def _granite_given(c: Fields) -> Fields:
    given = {**c, "layer_types": c.get("layer_types") or c.get("layers_block_type")}
    if given["layer_types"] is None:
        given["layer_types"] = ["linear_attention"] * integer(c, "num_hidden_layers")
    if not integer(c, "num_local_experts"):
        given["intermediate_size"] = count(c, "shared_intermediate_size")
    return given


def _granite_ropes(c: Fields) -> tuple[Rope | None, Rope | None]:
    kind = c.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise ModelError(f"position_embedding_type is {kind!r}; supported: 'rope', 'nope'")
    return one_rope(c) if kind == "rope" else no_rope(c)


def _granite(config: ModelConfig, c: Fields) -> ModelConfig:
    recurrence = mamba(config, c, count(c, "mamba_expand") * config.hidden_size)
    config = granite_factors(with_kinds(config, c, _KINDS, recurrence), c)
    if not integer(c, "num_local_experts"):
        return config
    experts = experts_of_inner_size(config, c, 8, normalized=True)
    shared = count(c, "shared_intermediate_size")
    return with_experts(config, replace(experts, shared_size=shared, shared_gated=False))


def _bamba_given(c: Fields) -> Fields:
    attends = c.get("attn_layer_indices") or []
    if not isinstance(attends, list):
        raise ModelError(f"attn_layer_indices is {attends!r}; expected a list. The config is damaged.")
    layers = range(integer(c, "num_hidden_layers"))
    kinds = ["full_attention" if layer in attends else "linear_attention" for layer in layers]
    return {**c, "layer_types": kinds, "partial_rotary_factor": 0.5}


def _bamba(config: ModelConfig, c: Fields) -> ModelConfig:
    return with_kinds(config, c, _KINDS, mamba(config, c, count(c, "mamba_expand") * config.hidden_size))


def _nemotron_given(c: Fields) -> Fields:
    kinds = c.get("layers_block_type") or c.get("layer_types")
    pattern = c.get("hybrid_override_pattern")
    if kinds is None and isinstance(pattern, str):
        kinds = [_PATTERN.get(letter, letter) for letter in pattern]
    if not isinstance(kinds, list):
        raise ModelError(f"layers_block_type is {kinds!r}; expected a list. The config is damaged.")
    return {**c, "layer_types": kinds, "num_hidden_layers": len(kinds)}


def _nemotron(config: ModelConfig, c: Fields) -> ModelConfig:
    if c.get("moe_latent_size") is not None:
        raise not_computed("moe_latent_size", c["moe_latent_size"], config.family.value)
    if integer(c, "n_group", 1) != integer(c, "topk_group", 1):
        raise not_computed("n_group", c["n_group"], config.family.value)
    # Without time_step_min: transformers applies it to whole prompts, but not where it decodes.
    given = {ours: c.get(theirs) for ours, theirs in _OF_GRANITE.items()}
    values = count(c, "mamba_num_heads") * count(c, "mamba_head_dim")
    return _of_blocks(config, c, mamba(config, given, values))


def _of_blocks(config: ModelConfig, c: Fields, recurrence: Recurrence) -> ModelConfig:
    """The config with a layer for each of the blocks in `layer_types`, and with experts if one has them."""
    config = with_kinds(config, c, {**_KINDS, "mlp": LayerKind.NONE, "moe": LayerKind.NONE}, recurrence)
    kinds = c["layer_types"]
    assert isinstance(kinds, list), "with_kinds has read it"
    without = frozenset(layer for layer, kind in enumerate(kinds) if kind in _KINDS)
    config = replace(config, layers_without_mlp=without)
    if "moe" not in kinds:
        return config
    experts = sigmoid_experts(
        c,
        "n_routed_experts",
        shared_size=count(c, "moe_shared_expert_intermediate_size"),
        dense_layers=frozenset(layer for layer, kind in enumerate(kinds) if kind != "moe"),
        bias=config.mlp_bias,
        shared_gated=False,
        gated=False,
        choice_bias=True,
        epsilon=_EPSILON,
    )
    return with_experts(config, experts)


def mamba_of_gguf(config: ModelConfig, head: GgufHead) -> Recurrence:
    """The recurrence of a file; llama.cpp computes its norm behind the gate."""
    c, inside = head.fields, {name.removeprefix("blk.").partition(".")[2] for name in head.shapes}
    keys = {"n_heads": "time_step_rank", "n_groups": "group_count", "d_state": "state_size"}
    given = {f"mamba_{ours}": c.get(f"ssm.{theirs}") for ours, theirs in keys.items()}
    given |= {"mamba_d_conv": c.get("ssm.conv_kernel"), "mamba_d_head": "auto"}
    recurrence = mamba(config, given, count(c, "ssm.inner_size"))
    return replace(
        recurrence,
        conv_bias="ssm_conv1d.bias" in inside,
        bias="ssm_in.bias" in inside,
        out_bias="ssm_out.bias" in inside,
        **({} if "ssm_norm.weight" in inside else NO_NORM),
    )


def _blocks_of(config: ModelConfig, head: GgufHead) -> list[str]:
    """The first block of each layer of a file, by its tensors."""
    marks = {"ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe"}
    return [
        next((kind for name, kind in marks.items() if f"blk.{layer}.{name}.weight" in head.shapes), "mlp")
        for layer in range(config.num_layers)
    ]


def _granite_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    c, kinds = head.fields, {"layer_types": _blocks_of(config, head)}
    config = with_kinds(granite_logits(config, head), kinds, _KINDS, mamba_of_gguf(config, head))
    if not boolean(c, "rope.scaling.finetuned", True):  # llama.cpp's switch of rope
        config = replace(config, rope=None)
    if integer(c, "expert_count", 0):
        return with_gguf_experts(config, head, normalized=True)
    shared = count(c, "expert_shared_feed_forward_length", config.intermediate_size)
    return replace(config, intermediate_size=shared)


def _nemotron_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    c, sizes = head.fields, dict[str, int]()
    for name, shape in head.shapes.items():
        sizes.setdefault(name.partition(".")[2].partition(".")[2], shape[0])
    keys = {
        **{"n_routed_experts": "count", "num_experts_per_tok": "used_count"},
        **{"norm_topk_prob": "weights_norm", "routed_scaling_factor": "weights_scale"},
        "moe_intermediate_size": "feed_forward_length",
    }
    given = {ours: c.get(f"expert_{theirs}") for ours, theirs in keys.items()}
    given["moe_shared_expert_intermediate_size"] = sizes.get("ffn_up_shexp.weight")
    dense = sizes.get("ffn_up.weight", config.intermediate_size)  # the file's list is of mixtures, if any
    given["layer_types"] = _blocks_of(config, head)
    return _of_blocks(replace(config, intermediate_size=dense), given, mamba_of_gguf(config, head))


_NEMOTRON_NAMES: Final = Names(
    outside={"model.embeddings": "model.embed_tokens", "model.norm_f": "model.norm"},
    inside={
        "norm": "input_layernorm",
        **_names("mixer"),
        **{f"mixer.{name}_proj": f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
        **{f"mixer.{name}_proj": f"mlp.{name}_proj" for name in ("up", "down")},
        **{f"mixer.shared_experts.{name}_proj": f"{SHARED}{name}_proj" for name in ("up", "down")},
        **{f"mixer.experts.*.{name}_proj": f"mlp.experts.*.{name}_proj" for name in ("up", "down")},
        "mixer.gate": "mlp.gate",
    },
    expert_stacks={"mixer.experts.up_proj": ("up_proj",), "mixer.experts.down_proj": ("down_proj",)},
    whole={**mixer_vectors("mixer"), "mixer.gate.e_score_correction_bias": "mlp.gate.choice_bias"},
)
HF: Final = (
    HfFamily(
        Family.GRANITE_HYBRID,
        _GRANITE,
        BIASED,
        _granite,
        given=_granite_given,
        ropes=_granite_ropes,
        names=replace(
            GRANITE_NAMES,
            inside={
                **GRANITE_NAMES.inside,
                **_names("mamba"),
                "shared_mlp.input_linear": tuple(SHARED + name.removeprefix("mlp.") for name in GATE_UP),
                "shared_mlp.output_linear": f"{SHARED}down_proj",
            },
            whole=mixer_vectors("mamba"),
        ),
        passed_over=frozenset({"num_experts_per_tok", *MAMBA}),  # without experts, or with attention alone
    ),
    HfFamily(
        Family.BAMBA,
        _BAMBA,
        ALL_BIASED,
        _bamba,
        given=_bamba_given,
        names=BAMBA_NAMES,
        passed_over=frozenset({"attn_rotary_emb"}),  # half of each head, in transformers
    ),
    HfFamily(
        Family.NEMOTRON_H,
        _NEMOTRON,
        _NEMOTRON_KEYS,
        _nemotron,
        _NEMOTRON_FORM,
        given=_nemotron_given,
        ropes=no_rope,
        names=_NEMOTRON_NAMES,
        others=("mtp.",),
        next_names=None,
        passed_over=frozenset(_NEMOTRON_PASSED),
    ),
)
GGUF_NAMES: Final[Inside] = {**INSIDE, "ssm_in": PARTS}
GGUF: Final = (
    GgufFamily(
        "granitehybrid", Family.GRANITE_HYBRID, _granite_from_gguf, inside=GGUF_NAMES, neighbours=True
    ),
    *(
        GgufFamily(name, Family.NEMOTRON_H, _nemotron_from_gguf, _NEMOTRON_GGUF, GGUF_NAMES, rope=False)
        for name in ("nemotron_h", "nemotron_h_moe")
    ),
)
