"""Positions as pure data: ALiBi, and rotary embeddings with their scalings, from and to config.json.

transformers 4 writes rope_theta, rope_scaling and partial_rotary_factor next to the other fields;
transformers 5 writes all of them into rope_parameters, with an entry per kind of layer if layers differ.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from specinfer.errors import ModelError
from specinfer.models.fields import (
    Fields,
    boolean,
    count,
    optional_number,
    optional_positive,
    positive,
)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's rope scaling: divides long wavelengths by `factor` and keeps short ones."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: divides frequencies with few turns within the original context by `factor`, and keeps others."""

    factor: float
    original_context: int
    attention_factor: float  # factor of cos and sin
    beta_fast: float = 32.0  # frequencies with more turns than this are kept
    beta_slow: float = 1.0  # those with fewer are divided; there is a ramp in between
    truncate: bool = True  # the ends of the ramp are whole frequencies


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK scaling beyond the original context: theta grows with a token's position.

    The token at position p is rotated as in a text of p + 1 tokens that ends with it. So a rotation depends
    on its position alone, and cached keys stay valid.
    """

    factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE: divides each frequency by its own factor, from one of two sets.

    One set is for texts up to the original context, the other for longer ones. Cached keys must stay valid
    while a text grows, so an open model uses one set (`ModelConfig.for_texts_of`).
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    extended_context: int  # maximum length of a text
    attention_factor: float  # factor of cos and sin, for both sets
    extended: bool = False  # False: the short set

    @property
    def divisors(self) -> tuple[float, ...]:
        """The factors that frequencies are divided by."""
        return self.long if self.extended else self.short


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding; at most one of the scalings is set."""

    theta: float
    linear_factor: float = 1.0  # positions are divided by it
    llama3: Llama3Scaling | None = None
    divisors: tuple[float, ...] | None = None  # one per frequency (GGUF rope_freqs)
    yarn: YarnScaling | None = None
    dynamic: DynamicScaling | None = None
    longrope: LongRope | None = None
    # Number of rotated elements of a head; None: all. Pair i is elements i and i + head_dim / 2 in any case,
    # since model files are read in that order (sources.py).
    rotated: int | None = None

    @property
    def attention_factor(self) -> float:
        """The factor of cos and sin."""
        scaling = self.yarn or self.longrope
        return 1.0 if scaling is None else scaling.attention_factor


@dataclass(frozen=True, slots=True)
class Alibi:
    """ALiBi (Press et al., 2022): each head's scores decrease with the distance of a key, in place of rope.

    Distances are along a row's own path.
    """

    slopes: tuple[float, ...]  # per query head
    # Falcon adds slope * position of the key to scores before scaling, both rounded to bfloat16.
    rounded: bool = False

    @classmethod
    def of(cls, heads: int, *, steepest: float = 8.0, rounded: bool = False) -> Self:
        """The paper's slopes for `heads` heads: 2 ** (-steepest * i / heads), i = 1, 2, ...

        If `heads` is not a power of two, they are every other slope of the next power, then as many of the
        rest as needed. `steepest` is MPT's `alibi_bias_max`.
        """
        power = 1 << (heads - 1).bit_length()
        all_of_them = [2.0 ** (-steepest * i / power) for i in range(1, power + 1)]
        chosen = all_of_them if power == heads else all_of_them[1::2] + all_of_them[::2]
        return cls(tuple(chosen[:heads]), rounded)


def check_rope(rope: Rope, head_dim: int) -> None:
    """Raise ModelError if an embedding does not fit heads of that size."""
    rotated = head_dim if rope.rotated is None else rope.rotated
    if head_dim % 2:
        raise ModelError(f"head size {head_dim} is odd; rotary embeddings need an even one")
    if rotated % 2 or not 2 <= rotated <= head_dim:
        raise ModelError(
            f"rotary embeddings rotate {rotated} of a head's {head_dim} elements; allowed: an even number"
        )
    if rope.divisors is not None and len(rope.divisors) != rotated // 2:
        raise ModelError(
            f"rope_freqs has {len(rope.divisors)} values for {rotated // 2} frequencies; "
            "the file is damaged, get it again"
        )
    if rope.longrope is not None:
        for name, factors in (("long", rope.longrope.long), ("short", rope.longrope.short)):
            if len(factors) != rotated // 2:
                raise ModelError(
                    f"longrope's {name} factors are {len(factors)}, for {rotated // 2} frequencies; "
                    "the config is damaged, get it again"
                )
    if rope.yarn is not None and rope.theta <= 1:
        raise ModelError(f"rope_theta is {rope.theta}; YaRN needs more than 1")
    if rope.dynamic is not None and rotated < 4:
        raise ModelError(f"dynamic rope scaling of {rotated} rotated elements; allowed: 4 or more")


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
    if (scaling := rope.llama3 or rope.yarn) is not None:
        fields = asdict(scaling)
        fields["original_max_position_embeddings"] = fields.pop("original_context")
        return {"rope_type": "yarn" if rope.llama3 is None else "llama3", **fields}
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
    return Rope(theta, **_SCALINGS[kind](parameters, c), rotated=None if rotated == head_dim else rotated)


def _plain(p: Fields, c: Fields) -> dict[str, Any]:
    """The fields of a Rope for parameters `p` of a config `c`."""
    return {}


def _linear(p: Fields, c: Fields) -> dict[str, Any]:
    return {"linear_factor": positive(p, "factor")}


def _llama3(p: Fields, c: Fields) -> dict[str, Any]:
    factor = positive(p, "factor")
    low, high = positive(p, "low_freq_factor"), positive(p, "high_freq_factor")
    if low > high:  # equal ones leave nothing in between, as in Llama 4
        raise ModelError(f"low_freq_factor is {low}; expected at most high_freq_factor, {high}")
    return {"llama3": Llama3Scaling(factor, low, high, _original(p, c))}


def _dynamic(p: Fields, c: Fields) -> dict[str, Any]:
    factor = positive(p, "factor")
    if factor < 1:
        raise ModelError(f"factor is {factor}; allowed for dynamic rope scaling: 1 or more")
    # transformers reads no other length for this kind.
    return {"dynamic": DynamicScaling(factor, count(c, "max_position_embeddings"))}


def _yarn(p: Fields, c: Fields) -> dict[str, Any]:
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
    yarn = YarnScaling(
        factor,
        original,
        attention_factor=scale,
        beta_fast=optional_positive(p, "beta_fast") or 32.0,
        beta_slow=optional_positive(p, "beta_slow") or 1.0,
        truncate=boolean(p, "truncate", True),
    )
    return {"yarn": yarn}


def _longrope(p: Fields, c: Fields) -> dict[str, Any]:
    original, extended = _original(p, c), count(c, "max_position_embeddings")
    scale = optional_positive(p, "attention_factor")
    factor = positive(p, "factor", extended / original)
    longrope = LongRope(
        _factors(p, "short_factor"),
        _factors(p, "long_factor"),
        original,
        max(original, extended),
        longrope_attention_factor(factor, original) if scale is None else scale,
    )
    return {"longrope": longrope}


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


_SCALINGS: Mapping[str, Callable[[Fields, Fields], dict[str, Any]]] = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "mrope": _plain,  # its three positions are equal in texts
}
