"""Falcon-H1: attention and Mamba-2 of the same input in each layer, and factors for all matrices.

In GGUF files tensors are multiplied by their factors.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from specinfer.errors import ModelError
from specinfer.kernels.recurrence_config import GateNorm, LayerKind
from specinfer.models.config import Family, ModelConfig
from specinfer.models.families.mamba import (
    BAMBA_NAMES,
    GGUF_NAMES,
    MAMBA,
    NO_NORM,
    PARTS,
    mamba,
    mamba_of_gguf,
)
from specinfer.models.fields import Fields, boolean, count, positive
from specinfer.models.gguf_config import GgufFamily, GgufHead
from specinfer.models.hf_config import ALL_BIASED, HfFamily, defaults

_FALCON: Final[Fields] = {
    **defaults(eps=1e-5, context=8192, num_key_value_heads=8, mamba_rms_norm=False),
    **{**MAMBA, "mamba_d_ssm": 1024},
}
_PASSED_OVER: Final = ("mamba_expand", "mamba_norm_before_gate", "mamba_use_mlp", "mlp_expansion_factor")


def _falcon(config: ModelConfig, c: Fields) -> ModelConfig:
    size = count(c, "mamba_d_ssm", count(c, "mamba_expand") * config.hidden_size)
    recurrence = mamba(config, c, size)
    if not boolean(c, "mamba_rms_norm", False):
        recurrence = replace(recurrence, **NO_NORM)
    elif boolean(c, "mamba_norm_before_gate", True):
        recurrence = replace(recurrence, norm=GateNorm.BEFORE)
    bias = boolean(c, "projectors_bias", False)
    return replace(
        config,
        layer_kinds=(LayerKind.BOTH,) * config.num_layers,
        recurrence=replace(recurrence, out_bias=bias),
        embedding_scale=positive(c, "embedding_multiplier", 1.0),
        logit_scale=positive(c, "lm_head_multiplier", 1.0),
        weight_factors=_falcon_factors(c),
    )


def _falcon_factors(c: Fields) -> tuple[tuple[str, float], ...]:
    """The factors of Falcon-H1's tensors; an input's factor is that of the matrices that read it."""
    into, key = positive(c, "attention_in_multiplier", 1.0), positive(c, "key_multiplier", 1.0)
    gate, down = _numbers(c, "mlp_multipliers", 2)
    first = positive(c, "ssm_in_multiplier", 1.0)
    parts = dict(zip(PARTS, _numbers(c, "ssm_multipliers", 5), strict=True))
    weights = {
        **{"self_attn.q_proj": into, "self_attn.k_proj": into * key, "self_attn.v_proj": into},
        **{name: first * part for name, part in parts.items()},
    }
    both = {
        "self_attn.o_proj": positive(c, "attention_out_multiplier", 1.0),
        "mixer.out_proj": positive(c, "ssm_out_multiplier", 1.0),
        **{"mlp.gate_proj": gate, "mlp.down_proj": down},
    }
    biases = {"self_attn.k_proj": key, **parts, **both}
    found = {f"{name}.weight": factor for name, factor in {**weights, **both}.items()}
    found |= {f"{name}.bias": factor for name, factor in biases.items()}
    return tuple((name, factor) for name, factor in found.items() if factor != 1.0)


def _numbers(c: Fields, key: str, size: int) -> Sequence[float]:
    """A list of that many numbers above 0; ones if it is missing."""
    given = c.get(key)
    if given is None:
        return [1.0] * size
    if not isinstance(given, list) or len(given) != size:
        raise ModelError(f"{key} is {str(given)[:80]}; expected {size} numbers. The config is damaged.")
    return [positive({key: one}, key) for one in given]


def _falcon_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    kinds = (LayerKind.BOTH,) * config.num_layers
    return replace(config, layer_kinds=kinds, recurrence=mamba_of_gguf(config, head))


HF: Final = (
    HfFamily(
        Family.FALCON_H1,
        _FALCON,
        ALL_BIASED,
        _falcon,
        names=BAMBA_NAMES,
        passed_over=frozenset(_PASSED_OVER),
    ),
)
GGUF: Final = (GgufFamily("falcon-h1", Family.FALCON_H1, _falcon_from_gguf, inside=GGUF_NAMES),)
