"""config.json as transformers 4 and 5 write it, and what is refused."""

from __future__ import annotations

import math

import pytest

from specinfer.errors import ModelError
from specinfer.models.config import Activation, Family, NormPlace, QkNorm
from specinfer.models.families.registry import config_from_hf, read_config
from specinfer.models.positions import DynamicScaling, Llama3Scaling, LongRope, Rope, YarnScaling, rope_to_hf

LLAMA = {
    **{"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    "max_position_embeddings": 512,
}
QWEN2 = {**LLAMA, "model_type": "qwen2"}
MISTRAL = {**LLAMA, "model_type": "mistral"}

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}

# config.json of google/gemma-3-4b-it: transformers fills in the rest.
GEMMA_4B = {
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "text_config": {
        **{"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"},
        **{"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}
OPT = {
    **{"model_type": "opt", "vocab_size": 50272, "hidden_size": 1024, "ffn_dim": 4096},
    **{"num_hidden_layers": 24, "num_attention_heads": 16, "max_position_embeddings": 2048},
}


def test_both_spellings_of_rope():
    """transformers 4 and 5."""
    for rope in (
        {"rope_theta": 10.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10.0, "factor": 4.0}},
    ):
        assert config_from_hf({**LLAMA, **rope}).rope == Rope(10.0, linear_factor=4.0)


def test_mistral_windows_are_on_every_layer_unless_switched_off():
    assert config_from_hf({**MISTRAL, "sliding_window": 5}).layer_windows == (5, 5, 5)
    assert config_from_hf({**MISTRAL, "sliding_window": None}).layer_windows == (None, None, None)
    assert config_from_hf(MISTRAL).window == 4096


def test_qwen_windows_need_to_be_switched_on():
    window = {"sliding_window": 5, "max_window_layers": 1}
    assert config_from_hf({**QWEN2, **window}).layer_windows == (None, None, None)
    on = {**QWEN2, **window, "use_sliding_window": True}
    assert config_from_hf(on).layer_windows == (None, 5, 5)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert config_from_hf({**on, "layer_types": kinds}).layer_windows == (5, None, 5)
    del on["sliding_window"]
    assert config_from_hf(on).layer_windows == (None, 4096, 4096)


def test_gemma3_inside_a_vision_model():
    config = config_from_hf(GEMMA_4B)
    assert config.family is Family.GEMMA3
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.layer_windows[:7] == (1024, 1024, 1024, 1024, 1024, None, 1024)
    assert config.rope == Rope(1e6, linear_factor=8.0)
    assert config.local_rope == Rope(1e4)
    assert config.embedding_scale == 2560**0.5
    assert config.tie_embeddings
    assert config.qk_norm is QkNorm.HEAD
    assert config.norm_place is NormPlace.BOTH
    assert config.activation is Activation.GELU_TANH
    assert config.eos_ids == (1, 106)


def test_the_text_part_decides_and_either_part_ties() -> None:
    for text, whole, tied in (
        ({}, {}, True),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, True),
        ({}, {"tie_word_embeddings": False}, False),
    ):
        config = config_from_hf({"model_type": "any_vl", "text_config": {**QWEN2, **text}, **whole})
        assert (config.family, config.tie_embeddings) == (Family.QWEN2, tied), (text, whole)
    qwen = {**QWEN2, "model_type": "qwen2_5_vl", "vision_config": {}, "image_token_id": 5}
    flat = {**qwen, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    assert read_config(flat).rope == Rope(1000000.0)
    images_alone = {**LLAMA, "use_bidirectional_attention": "vision"}
    assert read_config(images_alone) == config_from_hf(LLAMA)
    llava = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}
    assert (config_from_hf(llava).num_layers, config_from_hf(llava).intermediate_size) == (32, 11008)
    with pytest.raises(ModelError, match="'any_text', the text part of 'any', is of no family"):
        config_from_hf({"model_type": "any", "text_config": {**QWEN2, "model_type": "any_text"}})


def test_ministral_ends_where_its_queries_are_scaled() -> None:
    ministral = {**LLAMA, "model_type": "ministral3", "max_position_embeddings": 262144}
    assert config_from_hf(ministral).max_context == 16384
    rope = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 16384}
    assert config_from_hf({**ministral, "rope_parameters": rope}).max_context == 262144


MPT = {"model_type": "mpt", "d_model": 64, "n_layers": 2, "n_heads": 4}
FALCON = {"model_type": "falcon"}
INVERSE = {"n_embd": 8, "n_layer": 1, "n_head": 1, "scale_attn_by_inverse_layer_idx": True}
DIVIDED = [  # numbers that nothing can be divided by
    *((LLAMA, "num_attention_heads", 0), (OPT, "num_attention_heads", 0), (LLAMA, "hidden_size", 0)),
    *((LLAMA, "num_attention_heads", -4), (OPT, "hidden_size", 0), (LLAMA, "head_dim", 0)),
    *((MISTRAL, "sliding_window", 0), (MISTRAL, "sliding_window", -1), (LLAMA, "rope_theta", 0.0)),
    (LLAMA, "rope_theta", float("nan")),
]
LLAMA_3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}


def scaled(base: dict[str, object], **changes: object) -> dict[str, object]:
    return {"rope_scaling": base | changes}


def gemma(**changes: object) -> dict[str, object]:
    return {**GEMMA_4B, "text_config": {**GEMMA_4B["text_config"], **changes}}


YARN = {"rope_type": "yarn", "factor": 4.0}
REFUSED = [
    ({"model_type": "mamba"}, "model_type 'mamba' is a recurrent hybrid, .*models.md lists"),
    ({"model_type": None}, "model_type None is of no family"),
    ({"hidden_act": "swiglu"}, "activation is 'swiglu'; supported: gelu, .*relu, relu2, silu"),
    (
        scaled({"rope_type": "ntk", "long_factor": [1.0] * 8}),
        "rope_type': 'ntk'}; supported: default, linear, llama3, dynamic, yarn, longrope, mrope$",
    ),
    (scaled(LONGROPE, short_factor=None), "short_factor is None; expected a list of numbers"),
    (scaled(LONGROPE, long_factor=[1.0, 0.0] * 4), "long_factor is 0.0; expected more"),
    (scaled(LONGROPE, long_factor=[1.0] * 7), "long factors are 7, for 8 frequencies"),
    (scaled(LONGROPE, short_factor=[1.0] * 9), "short factors are 9, for 8 freq"),
    (scaled(LONGROPE, attention_factor=0), "attention_factor is 0"),
    (scaled(YARN, rope_type=["yarn"]), "supported: default, linear"),
    (scaled(YARN, truncate=1), "truncate is 1; expected true"),
    (scaled(YARN, attention_factor=0), "attention_factor is 0"),
    ({"rope_theta": 1, **scaled(YARN)}, "YaRN needs more than 1"),
    (scaled({"rope_type": "dynamic", "factor": 0.5}), r"factor is 0\.5; allowed for dynamic"),
    ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor is 1\.5; allowed: more than 0, up to 1"),
    ({"partial_rotary_factor": 0.2}, "rotate 3 of a head's 16 elements; allowed: an even number"),
    ({"partial_rotary_factor": 0.001}, "rotate 0 of a head's 16 elements"),
    (
        {"partial_rotary_factor": 0.125, **scaled({"rope_type": "dynamic", "factor": 2})},
        "dynamic rope scaling of 2 rotated elements",
    ),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; expected at most 16384"),
    ({"hidden_size": 10**400}, "hidden_size is an integer of 1329 bits; expected an integer"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps is an integer of 1329 bits; expected a number"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf; expected a number"),
    ({"hidden_size": "64"}, "hidden_size is '64'; expected an integer"),
    ({"vocab_size": None}, "vocab_size is None; expected an integer"),
    ({"num_key_value_heads": 3}, "4 query heads and 3 key-value heads"),
    ({"num_hidden_layers": 0}, "num_layers is 0; expected at least 1"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    ({**OPT, "word_embed_proj_dim": 512}, "word_embed_proj_dim = 512, which specinfer does not compute"),
    ({**OPT, "do_layer_norm_before": False}, "do_layer_norm_before = False, which specinfer does not comp"),
    *(({**base, key: value}, rf"{key} is {value}; expected .*is damaged") for base, key, value in DIVIDED),
    (gemma(sliding_window_pattern=0), "sliding_window_pattern is 0"),
    *((gemma(query_pre_attn_scalar=value), f"query_pre_attn_scalar is {value}") for value in (0, -1)),
    *((scaled({"rope_type": kind, "factor": 0.0}), r"factor is 0\.0") for kind in ("linear", "llama3")),
    (scaled(LLAMA_3, low_freq_factor=5.0), r"factor is 5\.0; expected at most high_freq_factor, 4\.0"),
    (scaled(LLAMA_3, original_max_position_embeddings=0), "original_max_position_embeddings is 0"),
    *(
        ({"eos_token_id": ids}, r"eos_token_id is .*; expected a token id, or a list")
        for ids in ("2", [1, "2"], True, -5, 2**70, [1, -1], 2.0)
    ),
    ({**MISTRAL, "layer_types": ["chunked_attention"] * 3}, "'chunked_attention'"),
    ({**MISTRAL, "layer_types": ["full_attention"] * 2}, "2 layers, but the model has 3"),
    ({**MPT, "attn_config": {"alibi": False}}, "alibi = False; supported for MPT: True"),
    ({**MPT, "attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max = 16; supported for MPT: 8"),
    ({**MPT, "attn_config": {"qk_ln": True}}, "qk_ln = True; supported for MPT: False"),
    ({**MPT, "no_bias": False}, "no_bias = False; supported for MPT: True"),
    ({**FALCON, "new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn = False and"),
    ({**FALCON, "num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2; supported: the"),
    ({"model_type": "cohere", "use_qk_norm": True}, "sets use_qk_norm = True, which specinfer does not comp"),
    ({"model_type": "stablelm", "qk_layernorm": True}, "sets qk_layernorm = True"),
    ({"model_type": "gpt2", **INVERSE}, "sets scale_attn_by_inverse_layer_idx = True"),
    ({"model_type": "smollm3", "no_rope_layers": [1]}, r"is \[1\]; expected 0 or 1 for each of 3 layers"),
]


def test_the_unsupported_is_refused():
    for change, message in REFUSED:
        with pytest.raises(ModelError, match=message):
            config_from_hf({**LLAMA, **change})
    moe = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "use_qk_norm": True}
    mixture = config_from_hf({**LLAMA, "model_type": "qwen3_moe", **moe})
    assert mixture.qk_norm is QkNorm.HEAD, "it computes this norm"


def test_yarn_and_dynamic_scaling_extend_the_context():
    config = config_from_hf({**LLAMA, **scaled(YARN)})
    usual = 1 + 0.1 * math.log(4)
    assert config.rope == Rope(10000.0, yarn=YarnScaling(4.0, 512, attention_factor=usual))
    assert config.max_context == 2048
    whole = scaled(YARN, original_max_position_embeddings=64)
    assert config_from_hf({**LLAMA, **whole}).max_context == 512
    config = config_from_hf({**LLAMA, **scaled({"rope_type": "dynamic", "factor": 3.0})})
    assert config.rope == Rope(10000.0, dynamic=DynamicScaling(3.0, 512))
    assert config.max_context == 1536


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_longrope_is_of_short_texts_until_somebody_asks_for_long_ones(kind):
    phi = {**LLAMA, "model_type": "phi3", "original_max_position_embeddings": 64}
    config = config_from_hf({**phi, "rope_scaling": {**LONGROPE, "type": kind, "rope_type": kind}})
    scale = math.sqrt(1 + math.log(512 / 64) / math.log(64))
    short = LongRope((1.0,) * 8, (2.0,) * 8, 64, 512, pytest.approx(scale))
    assert (config.rope, config.max_context) == (Rope(10000.0, longrope=short), 64)
    assert config.rope.longrope.divisors == (1.0,) * 8
    assert config.for_texts_of(64) is config
    longer = config.for_texts_of(65)
    assert (longer.rope.longrope.divisors, longer.max_context) == ((2.0,) * 8, 512)
    assert longer.rope.attention_factor == config.rope.attention_factor
    assert config_from_hf(phi).for_texts_of(1000).max_context == 512


def test_scalings_are_read_and_written_as_they_are_read():
    rope = config_from_hf({**LLAMA, "rope_theta": 5e5, **scaled(LLAMA_3)}).rope
    assert rope == Rope(500000.0, llama3=Llama3Scaling(8.0, 1.0, 4.0, 8192))
    for scaling in (
        None,
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False},
        LLAMA_3 | {"original_max_position_embeddings": 64},
    ):
        rope = config_from_hf({**LLAMA, "rope_scaling": scaling}).rope
        assert config_from_hf({**LLAMA, "rope_scaling": rope_to_hf(rope)}).rope == rope, scaling


@pytest.mark.parametrize(
    ("base", "more", "unknown"),
    [
        (LLAMA, {}, ""),
        (LLAMA, {"use_fancy_gate": True, "a_scale": 0.5}, "use_fancy_gate, a_scale"),
        (LLAMA, {"use_fancy_gate": False, "a_scale": 1.0, "torch_dtype": "bfloat16"}, ""),
        (LLAMA, {"_model_name_or_path": "org/model", "_commit_hash": "0a1b"}, ""),
        (GEMMA_4B, {"mm_tokens": 3}, ""),  # beside the text's config
        (GEMMA_4B, {"text_config": {**GEMMA_4B["text_config"], "a_scale": 0.5}}, "a_scale"),
    ],
)
def test_keys_that_nothing_reads_are_logged(
    base: dict[str, object], more: dict[str, object], unknown: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_config({**base, **more}) == config_from_hf(base)
    line = f"config.json sets {unknown}, which specinfer does not know and ignores"
    assert caplog.messages == ([line] if unknown else [])


@pytest.mark.parametrize(
    "key", ["residual_multiplier", "num_experts", "clip_qkv", "scoring_func", "qk_layernorm"]
)
def test_a_switch_of_another_family_is_refused(key: str) -> None:
    with pytest.raises(ModelError, match=f"^config.json sets {key} = 0.5, which specinfer does not compute"):
        read_config({**LLAMA, key: 0.5})
