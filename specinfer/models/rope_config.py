"""Converts rotary embeddings in config.json and GGUF metadata to Rope, and back.

transformers 4 writes rope_theta, rope_scaling and partial_rotary_factor next to the other fields;
transformers 5 writes all of them into rope_parameters, with an entry per kind of layer if layers differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from specinfer.errors import ModelError
from specinfer.models.fields import (
    Fields,
    boolean,
    count,
    number,
    optional_number,
    optional_positive,
    positive,
)
from specinfer.models.positions import DynamicScaling, Llama3Scaling, LongRope, Rope, YarnScaling

# Tensors of GGUF files that are part of the config.
ROPE_TENSORS: Final = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def rope_from_hf(c: Fields, head_dim: int) -> Rope:
    """The embedding of a model with a single one.

    Raises ModelError for anything unsupported.
    """
    parameters = c.get("rope_parameters")
    if parameters is None:
        parameters = c.get("rope_scaling")
    return _rope(parameters, positive(c, "rope_theta", 10000.0), c, head_dim)


def ropes_by_layer_type(c: Fields, head_dim: int, *, theta: float, local_theta: float) -> tuple[Rope, Rope]:
    """The embeddings of layers without a window, and of layers with one.

    Raises ModelError for anything unsupported.
    """
    parameters = c.get("rope_parameters")
    if parameters is None:
        of_all = _rope(c.get("rope_scaling"), theta, c, head_dim)
        local = _rope(None, local_theta, c, head_dim)
    else:
        if not isinstance(parameters, dict):
            raise ModelError(f"rope_parameters is {parameters!r}; expected one entry per layer type")
        if unknown := sorted(map(str, parameters.keys() - {"full_attention", "sliding_attention"})):
            raise ModelError(
                f"rope_parameters holds {unknown}; expected an entry for 'full_attention' and one for "
                "'sliding_attention'"
            )
        of_all = _rope(parameters.get("full_attention"), theta, c, head_dim)
        local = _rope(parameters.get("sliding_attention"), local_theta, c, head_dim)
    if of_all.rotated != local.rotated:
        raise ModelError("partial_rotary_factor differs between layers; supported: one for all layers")
    return of_all, local


def longest_text(rope: Rope | None, given: int) -> int:
    """The maximum tokens of a text, for a config with a maximum of `given` tokens.

    Configs often hold the context before its extension by YaRN or dynamic scaling. For LongRoPE it is the
    original context, unless more is requested (`ModelConfig.for_texts_of`).
    """
    if rope is not None and rope.longrope is not None:
        return min(given, rope.longrope.original_context)
    scaling = None if rope is None else rope.yarn or rope.dynamic
    return given if scaling is None else max(given, int(scaling.factor * scaling.original_context))


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """The default factor of cos and sin for YaRN."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_to_hf(rope: Rope) -> dict[str, object] | None:
    """rope_scaling as read by transformers 4 and 5; None if there is none.

    Raises ModelError for embeddings that it cannot express.
    """
    if rope.rotated is not None or rope.divisors is not None or rope.longrope is not None:
        raise ModelError(
            "rotary embeddings of a part of each head, with divisors or with longrope cannot be written"
        )
    if rope.linear_factor != 1.0:
        return {"rope_type": "linear", "factor": rope.linear_factor}
    if rope.dynamic is not None:
        return {"rope_type": "dynamic", "factor": rope.dynamic.factor}
    if rope.llama3 is not None:
        return {
            "rope_type": "llama3",
            "factor": rope.llama3.factor,
            "low_freq_factor": rope.llama3.low_freq_factor,
            "high_freq_factor": rope.llama3.high_freq_factor,
            "original_max_position_embeddings": rope.llama3.original_context,
        }
    if rope.yarn is not None:
        return {
            "rope_type": "yarn",
            "factor": rope.yarn.factor,
            "original_max_position_embeddings": rope.yarn.original_context,
            "attention_factor": rope.yarn.attention_factor,
            "beta_fast": rope.yarn.beta_fast,
            "beta_slow": rope.yarn.beta_slow,
            "truncate": rope.yarn.truncate,
        }
    return None


def _rope(parameters: object, theta: float, c: Fields, head_dim: int) -> Rope:
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict):
        raise ModelError(f"the rope parameters are {parameters!r}; expected a JSON object")
    theta = positive(parameters, "rope_theta", theta)
    share = positive(parameters, "partial_rotary_factor", positive(c, "partial_rotary_factor", 1.0))
    if share > 1:
        raise ModelError(f"partial_rotary_factor is {share}; allowed: more than 0, up to 1")
    rotated = int(head_dim * share)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    nested = any(isinstance(value, dict) for value in parameters.values())
    if not isinstance(kind, str) or kind not in _SCALINGS or nested:
        shown = {key: value for key, value in parameters.items() if not isinstance(value, list)}
        raise ModelError(f"the rope scaling is {shown!r}; supported: {', '.join(_SCALINGS)}")
    return _SCALINGS[kind](parameters, c, theta, None if rotated == head_dim else rotated)


def _plain(p: Fields, c: Fields, theta: float, rotated: int | None) -> Rope:
    return Rope(theta, rotated=rotated)


def _linear(p: Fields, c: Fields, theta: float, rotated: int | None) -> Rope:
    return Rope(theta, linear_factor=positive(p, "factor"), rotated=rotated)


def _llama3(p: Fields, c: Fields, theta: float, rotated: int | None) -> Rope:
    factor = positive(p, "factor")
    low, high = positive(p, "low_freq_factor"), positive(p, "high_freq_factor")
    if low >= high:
        raise ModelError(f"low_freq_factor is {low}; expected less than high_freq_factor, {high}")
    return Rope(theta, llama3=Llama3Scaling(factor, low, high, _original(p, c)), rotated=rotated)


def _dynamic(p: Fields, c: Fields, theta: float, rotated: int | None) -> Rope:
    factor = positive(p, "factor")
    if factor < 1:
        raise ModelError(f"factor is {factor}; allowed for dynamic rope scaling: 1 or more")
    # transformers reads no other length for this kind.
    return Rope(theta, dynamic=DynamicScaling(factor, count(c, "max_position_embeddings")), rotated=rotated)


def _yarn(p: Fields, c: Fields, theta: float, rotated: int | None) -> Rope:
    original = _original(p, c)
    factor = positive(p, "factor", count(c, "max_position_embeddings") / original)
    scale = optional_number(p, "attention_factor")
    if scale is None:
        scale = yarn_attention_factor(factor)
        both = optional_number(p, "mscale"), optional_number(p, "mscale_all_dim")
        if both[0] and both[1]:
            scale = yarn_attention_factor(factor, both[0]) / yarn_attention_factor(factor, both[1])
    if not scale > 0:
        raise ModelError(f"attention_factor is {scale}; allowed: more than 0")
    return Rope(
        theta,
        yarn=YarnScaling(
            factor,
            original,
            attention_factor=scale,
            beta_fast=optional_positive(p, "beta_fast") or 32.0,
            beta_slow=optional_positive(p, "beta_slow") or 1.0,
            truncate=boolean(p, "truncate", True),
        ),
        rotated=rotated,
    )


def _longrope(p: Fields, c: Fields, theta: float, rotated: int | None) -> Rope:
    original, extended = _original(p, c), count(c, "max_position_embeddings")
    scale = optional_positive(p, "attention_factor")
    factor = positive(p, "factor", extended / original)
    return Rope(
        theta,
        longrope=LongRope(
            _factors(p, "short_factor"),
            _factors(p, "long_factor"),
            original,
            max(original, extended),
            longrope_attention_factor(factor, original) if scale is None else scale,
        ),
        rotated=rotated,
    )


def longrope_attention_factor(factor: float, original: int) -> float:
    """The default factor of cos and sin for LongRoPE."""
    return 1.0 if factor <= 1 or original <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _factors(p: Fields, key: str) -> tuple[float, ...]:
    values = p.get(key)
    if not isinstance(values, list):
        raise ModelError(f"{key} is {str(values)[:80]}; expected a list of numbers. The config is damaged.")
    return tuple(positive({key: value}, key) for value in values)


def _original(p: Fields, c: Fields) -> int:
    """The context before its extension; the field next to the parameters wins, as in transformers."""
    name = "original_max_position_embeddings"
    return count(c, name, count(p, name, count(c, "max_position_embeddings")))


_SCALINGS: Mapping[str, Callable[[Fields, Fields, float, int | None], Rope]] = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
}


def rope_from_gguf(
    c: Fields,
    context: int,
    theta: float,
    tensors: Mapping[str, tuple[float, ...]],
    rotated: int | None,
) -> Rope:
    """The embedding as computed by llama.cpp; `context` is the maximum length, `tensors` are ROPE_TENSORS."""
    theta = positive(c, "rope.freq_base", theta)
    divisors, short, long = map(tensors.get, ROPE_TENSORS)
    kind = c.get("rope.scaling.type", "linear" if "rope.scale_linear" in c else "none")
    scale = positive(c, "rope.scaling.attn_factor", 1.0)
    if short is not None or long is not None:
        if short is None or long is None or divisors is not None or kind not in ("none", "longrope"):
            raise ModelError(
                f"the GGUF file has {', '.join(tensors)} and {kind!r} scaling; supported: rope_factors_short "
                "and rope_factors_long together, without other scaling"
            )
        original = count(c, "rope.scaling.original_context_length", context)
        return Rope(
            theta, longrope=LongRope(short, long, original, max(original, context), scale), rotated=rotated
        )
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
