"""The metadata of a GGUF file -> ModelConfig.

Anything it asks for that the decoder does not compute is refused with a ModelError; nothing is skipped in
silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specinfer.errors import ModelError
from specinfer.models.config import Activation, Family, ModelConfig, Rope, YarnScaling
from specinfer.models.fields import MOST_LAYERS, all_ids, count, integer, number, optional_positive, positive
from specinfer.models.hf_rope import longest_text, yarn_attention_factor


def config_from_gguf(
    metadata: Mapping[str, object],
    shapes: Mapping[str, Sequence[int]],
    rope_divisors: tuple[float, ...] | None = None,
) -> ModelConfig:
    """The config of a GGUF file; raises ModelError on anything unsupported.

    `shapes` are the file's tensors by name, rows first ([out, in]); some facts stand only there.
    `rope_divisors` is its rope_freqs.weight, where it has one.
    """
    arch = metadata.get("general.architecture")
    families = {"llama": Family.LLAMA, "qwen2": Family.QWEN2, "qwen3": Family.QWEN3}
    families["gemma3"] = Family.GEMMA3
    if not isinstance(arch, str) or arch not in families:
        raise ModelError(
            f"the GGUF architecture is {arch!r}; supported: {', '.join(sorted(families))} "
            "(Mistral files say llama). docs/add_a_model.md says how to add one."
        )
    if integer(metadata, f"{arch}.expert_count", 0):
        raise ModelError("the GGUF file is a mixture of experts; supported: dense models")
    return _decoder_from_gguf(families[arch], arch, metadata, shapes, rope_divisors)


def _decoder_from_gguf(
    family: Family,
    arch: str,
    metadata: Mapping[str, object],
    shapes: Mapping[str, Sequence[int]],
    rope_divisors: tuple[float, ...] | None,
) -> ModelConfig:
    gemma = family is Family.GEMMA3
    c = {key[len(arch) + 1 :]: value for key, value in metadata.items() if key.startswith(f"{arch}.")}
    hidden = count(c, "embedding_length")
    heads = count(c, "attention.head_count")
    layers = integer(c, "block_count", most=MOST_LAYERS)
    head_dim = count(c, "attention.key_length", hidden // heads)
    if integer(c, "attention.value_length", head_dim) != head_dim:
        raise ModelError("the GGUF file has key and value heads of different sizes, which is not supported")
    rotated = count(c, "rope.dimension_count", head_dim)
    context = integer(c, "context_length")
    rope = _rope(c, context, 1e6 if gemma else 1e4, rope_divisors, None if rotated == head_dim else rotated)
    if gemma and count(c, "rope.dimension_count_swa", rotated) != rotated:
        raise ModelError("layers of the GGUF file rotate different parts of a head; supported: all the same")
    if {"rope_factors_long.weight", "rope_factors_short.weight"} & shapes.keys():
        raise ModelError(
            "the GGUF file scales rope by longrope; supported: none, linear, yarn, or a rope_freqs tensor"
        )
    if gemma and rope.yarn is not None:
        raise ModelError("the GGUF file is a Gemma 3 with YaRN, which is not supported")
    if c.get("attn_logit_softcapping"):
        raise ModelError("the GGUF file caps attention scores, which is not supported")
    if "token_embd.weight" not in shapes:
        raise ModelError("the GGUF file has no token_embd.weight; it is not a complete language model")
    window = integer(c, "attention.sliding_window", 0) or None
    windows: tuple[int | None, ...] = (window,) * layers
    scalar = float(head_dim)
    if gemma:
        pattern = count(c, "attention.sliding_window_pattern", 6)
        windows = tuple(window if (i + 1) % pattern else None for i in range(layers))
        # No key holds query_pre_attn_scalar; of the Gemma 3 models only the 27B's differs from head_dim.
        scalar = hidden / heads if layers == 62 else scalar
    return ModelConfig(
        family=family,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        embedding_size=hidden,
        intermediate_size=integer(c, "feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=integer(c, "attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=number(c, "attention.layer_norm_rms_epsilon"),
        rope=rope,
        local_rope=Rope(positive(c, "rope.freq_base_swa", 1e4), rotated=rope.rotated) if gemma else None,
        layer_windows=windows,
        tie_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        norm_weight_offset=0.0,  # the converter has added Gemma's 1 already
        sandwich_norms=gemma,
        activation=Activation.GELU_TANH if gemma else Activation.SILU,
        attention_scale=scalar**-0.5,
        logit_softcap=optional_positive(c, "final_logit_softcapping"),
        max_context=longest_text(rope, context),
        eos_ids=tuple(
            dict.fromkeys(
                token
                for kind in ("eos", "eot", "eom")
                for token in all_ids((metadata,), f"tokenizer.ggml.{kind}_token_id")
            )
        ),
    )


def _rope(
    c: Mapping[str, object],
    context: int,
    theta: float,
    divisors: tuple[float, ...] | None,
    rotated: int | None,
) -> Rope:
    """The embedding as llama.cpp computes it; `context` is the longest text's, `divisors` are rope_freqs."""
    theta = positive(c, "rope.freq_base", theta)
    kind = c.get("rope.scaling.type", "linear" if "rope.scale_linear" in c else "none")
    scale = positive(c, "rope.scaling.attn_factor", 1.0)
    if divisors is not None:
        if kind not in ("none", "llama3"):
            raise ModelError(f"the GGUF file has rope_freqs and {kind!r} scaling; supported: one of them")
        return Rope(theta, divisors=divisors, rotated=rotated)
    if kind == "yarn":
        factor = positive(c, "rope.scaling.factor")
        if number(c, "rope.scaling.yarn_ext_factor", 1.0) != 1:
            raise ModelError("rope.scaling.yarn_ext_factor is not 1, which is not supported")
        log = number(c, "rope.scaling.yarn_log_multiplier", 0.0)
        scale *= positive(c, "rope.scaling.yarn_attn_factor", 1.0)
        scale *= yarn_attention_factor(factor) / (yarn_attention_factor(factor, log) if log else 1.0)
        return Rope(
            theta,
            yarn=YarnScaling(
                factor,
                count(c, "rope.scaling.original_context_length", context),
                attention_factor=scale,
                beta_fast=positive(c, "rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=positive(c, "rope.scaling.yarn_beta_slow", 1.0),
            ),
            rotated=rotated,
        )
    if scale != 1:
        raise ModelError(f"rope.scaling.attn_factor is {scale} without YaRN, which is not supported")
    if kind == "none":
        return Rope(theta, rotated=rotated)
    if kind == "linear":
        factor = positive(c, "rope.scaling.factor", positive(c, "rope.scale_linear", 1.0))
        return Rope(theta, linear_factor=factor, rotated=rotated)
    raise ModelError(
        f"the GGUF rope scaling is {kind!r}; supported: none, linear, yarn, or a rope_freqs tensor"
    )
