"""GGUF metadata as a config, and what is refused."""

from __future__ import annotations

import math

import pytest

from specinfer.errors import ModelError
from specinfer.models.config import Family
from specinfer.models.families.registry import gguf_family
from specinfer.models.gguf_config import GgufHead
from specinfer.models.positions import LongRope, Rope, YarnScaling

GGUF = {
    **{"general.architecture": "llama", "llama.context_length": 512, "llama.embedding_length": 64},
    **{"llama.block_count": 3, "llama.feed_forward_length": 96, "llama.attention.head_count": 4},
    **{"llama.attention.head_count_kv": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5},
    **{"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 9},
}
SHAPES = {"token_embd.weight": (100, 64)}


def config_from_gguf(metadata, shapes, rope=None):
    family = gguf_family(metadata)
    return family.config(GgufHead(family.architecture, metadata, shapes, rope or {}))


def as_architecture(arch, **more):
    metadata = {key.replace("llama.", f"{arch}."): value for key, value in GGUF.items()}
    return {**metadata, "general.architecture": arch, **{f"{arch}.{k}": v for k, v in more.items()}}


def test_gguf():
    config = config_from_gguf(GGUF, SHAPES)
    assert config.family is Family.LLAMA
    assert (config.vocab_size, config.hidden_size, config.num_layers, config.head_dim) == (100, 64, 3, 16)
    assert config.tie_embeddings
    assert config.rope == Rope(10000.0)
    assert config.eos_ids == (2, 9)
    untied = config_from_gguf(GGUF, {**SHAPES, "output.weight": (100, 64), "blk.0.attn_q.bias": (64,)})
    assert not untied.tie_embeddings
    assert untied.qkv_bias
    assert not untied.o_bias


def test_gguf_rope_scaling():
    linear = {**GGUF, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    assert config_from_gguf(linear, SHAPES).rope == Rope(10000.0, linear_factor=2.0)
    divisors = (1.0,) * 8
    assert config_from_gguf(GGUF, SHAPES, {"rope_freqs.weight": divisors}).rope == Rope(
        10000.0, divisors=divisors
    )


YARN = {**GGUF, "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}


def test_gguf_yarn_extends_the_context():
    """llama.cpp: the original context is the file's where no key says another."""
    usual = 1 + 0.1 * math.log(4)
    config = config_from_gguf(YARN, SHAPES)
    assert config.rope == Rope(10000.0, yarn=YarnScaling(4.0, 512, attention_factor=usual))
    assert config.max_context == 2048
    said = YARN | {"llama.rope.scaling.original_context_length": 128, "llama.rope.scaling.attn_factor": 0.5}
    config = config_from_gguf(said, SHAPES)
    assert config.rope == Rope(10000.0, yarn=YarnScaling(4.0, 128, attention_factor=usual / 2))
    assert config.max_context == 512
    log = config_from_gguf(YARN | {"llama.rope.scaling.yarn_log_multiplier": 0.5}, SHAPES).rope
    assert log.yarn.attention_factor == pytest.approx(usual / (1 + 0.05 * math.log(4)))


def test_a_file_of_ministral_ends_where_its_queries_are_scaled():
    said = {"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0}
    said |= {"rope.scaling.original_context_length": 64, "rope.scaling.yarn_log_multiplier": 1.0}
    plain = config_from_gguf(as_architecture("mistral3", **said), SHAPES)
    scaled = config_from_gguf(
        as_architecture("mistral3", **said, **{"attention.temperature_scale": 0.1}), SHAPES
    )
    assert (plain.max_context, scaled.max_context) == (1024, 64)
    assert scaled.rope == Rope(10000.0, yarn=YarnScaling(16.0, 64, attention_factor=1.0))


def test_gguf_longrope_is_known_by_its_tensors():
    both = {"rope_factors_short.weight": (1.0,) * 8, "rope_factors_long.weight": (2.0,) * 8}
    said = {"llama.rope.scaling.original_context_length": 128, "llama.rope.scaling.attn_factor": 1.19}
    config = config_from_gguf(GGUF | said, SHAPES, both)
    assert config.rope == Rope(10000.0, longrope=LongRope((1.0,) * 8, (2.0,) * 8, 128, 512, 1.19))
    assert (config.max_context, config.for_texts_of(129).max_context) == (128, 512)
    for tensors in ({"rope_factors_long.weight": (2.0,) * 8}, both | {"rope_freqs.weight": (1.0,) * 8}):
        with pytest.raises(ModelError, match=r"rope_factors_long.* supported: rope_factors_short and"):
            config_from_gguf(GGUF, SHAPES, tensors)


def changed(**changes):
    """The metadata of the Llama with these changes; None: without the key."""
    made = {**GGUF, **{f"llama.{key.replace('__', '.')}": value for key, value in changes.items()}}
    return {key: value for key, value in made.items() if value is not None}


def test_unsupported_gguf_is_refused():
    for metadata, message in (
        ({**GGUF, "general.architecture": "rwkv"}, "architecture 'rwkv' is a recurrent hybrid"),
        (changed(rope__scaling__type="longrope"), "rope scaling is 'longrope'; supported: none, linear"),
        (changed(rope__scaling__type="yarn"), r"rope\.scaling\.factor is None"),
        (YARN | {"llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is not 1"),
        (changed(rope__scaling__attn_factor=1.19), r"attn_factor is 1\.19 without YaRN"),
        (changed(rope__dimension_count=7), "rotate 7 of a head's 16 elements"),
        (changed(rope__dimension_count=32), "rotate 32 of a head's 16 elements"),
        (changed(attention__value_length=8), "different sizes"),
        (changed(expert_count=8), "expert_used_count is None"),
        (changed(attention__head_count=0), r"attention\.head_count is 0; expected at least 1"),
        (changed(embedding_length=0), "embedding_length is 0"),
        (changed(attention__head_count=65), r"attention\.key_length is 0"),
        (changed(rope__freq_base=0.0), r"rope\.freq_base is 0\.0"),
        (changed(rope__scaling__type="linear", rope__scaling__factor=0.0), r"rope\.scaling\.factor is 0\.0"),
        (as_architecture("gemma3", **{"attention.sliding_window_pattern": 0}), "sliding_window_pattern is 0"),
        (changed(block_count=None), "block_count is None"),
    ):
        with pytest.raises(ModelError, match=message):
            config_from_gguf(metadata, SHAPES)
    with pytest.raises(ModelError, match="3 values for 8 frequencies"):
        config_from_gguf(GGUF, SHAPES, {"rope_freqs.weight": (1.0, 1.0, 1.0)})
