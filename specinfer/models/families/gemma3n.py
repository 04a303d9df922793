"""Gemma 3n: several residual streams (altup.py), per-layer embeddings, layers that share keys and values."""

from dataclasses import replace
from statistics import NormalDist
from typing import Final

from specinfer.errors import ModelError
from specinfer.models.altup_config import AltUp
from specinfer.models.config import Family, ModelConfig, PerLayer
from specinfer.models.families.gemma import KEYS, ropes
from specinfer.models.families.gemma4 import (
    DEFAULTS,
    FIXED,
    GGUF_FIXED,
    from_gguf,
    of_layer,
    with_per_layer,
)
from specinfer.models.fields import Fields, boolean, count, integer, number, optional_positive, positive
from specinfer.models.gguf_config import BOTH_SIDES, GgufFamily, GgufHead
from specinfer.models.hf_config import HfFamily, but_every, window_of, windows
from specinfer.models.positions import Rope

_STREAMS: Final = 4  # number of streams in GGUF files, whose stacks have a fixed size
_SPARSE: Final = 0.95  # share of gates that become 0 in the first 10 layers
_DEFAULTS: Final[Fields] = {
    **{**DEFAULTS, "max_position_embeddings": 32768, "vocab_size": 262400, "num_key_value_heads": 2},
    **{"final_logit_softcapping": 30.0, "num_kv_shared_layers": 15, "altup_num_inputs": 4},
    **{"altup_active_idx": 0, "altup_correct_scale": True, "laurel_rank": 64},
}


def _with_inner_sizes(c: Fields) -> Fields:
    """The config with the first layer's MLP size as that of all, and their list under another key."""
    sizes = c.get("intermediate_size", 16384)
    if not isinstance(sizes, list):
        return {**c, "intermediate_size": sizes}
    return {**c, "intermediate_size": sizes[0] if sizes else None, "inner_sizes": sizes}


def _of_all_layers(values: object, key: str, layers: int) -> list[object]:
    if not isinstance(values, list) or len(values) != layers:
        raise ModelError(f"{key} is {str(values)[:80]}; expected a list for {layers} layers")
    return values


def _gemma3n(config: ModelConfig, c: Fields) -> ModelConfig:
    layers = config.num_layers
    sizes = _of_all_layers(
        c.get("inner_sizes", [config.intermediate_size] * layers), "intermediate_size", layers
    )
    given = c.get("activation_sparsity_pattern")
    if given is None:
        sparse = 10 if layers > 10 else 0
        given = [_SPARSE] * sparse + [0.0] * (layers - sparse)
    shares = [
        number({"": share}, "") for share in _of_all_layers(given, "activation_sparsity_pattern", layers)
    ]
    if not all(0 <= share < 1 for share in shares):
        raise ModelError(
            f"activation_sparsity_pattern has {min(shares)} to {max(shares)}; allowed: 0 to below 1"
        )
    return with_per_layer(
        config,
        windows(c, window_of(c), but_every(5)),
        integer(c, "num_kv_shared_layers"),
        [count({"": size}, "") for size in sizes],
        PerLayer(count(c, "hidden_size_per_layer_input"), count(c, "vocab_size_per_layer_input")),
        logit_softcap=optional_positive(c, "final_logit_softcapping"),
        altup=AltUp(
            count(c, "altup_num_inputs"),
            integer(c, "altup_active_idx"),
            scaled=boolean(c, "altup_correct_scale", True),
            rank=count(c, "laurel_rank"),
            # Normal values have that share below that number of standard deviations.
            sparsity=tuple(NormalDist().inv_cdf(share) if share else 0.0 for share in shares),
        ),
    )


def _with_one_size(head: GgufHead) -> GgufHead:
    """The head with the first layer's MLP size as that of all."""
    size = of_layer(head.fields, "feed_forward_length", 0)
    return replace(head, metadata={**head.metadata, f"{head.architecture}.feed_forward_length": size})


def _gemma3n_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    c, shapes, layers = head.fields, head.shapes, config.num_layers
    needed = "per_layer_token_embd.weight", "blk.0.laurel_l.weight"
    if lacking := [name for name in needed if name not in shapes]:
        raise ModelError(f"the GGUF file has no {lacking[0]}; it is not complete")
    if (streams := count(c, "altup.num_inputs")) != _STREAMS:
        raise ModelError(f"altup.num_inputs of the GGUF file is {streams}; supported: {_STREAMS}")
    rope = config.rope
    assert rope is not None
    factors = _of_all_layers(
        c.get("activation_sparsity_scale", [0.0] * layers), "activation_sparsity_scale", layers
    )
    return from_gguf(
        config,
        head,
        integer(c, "attention.shared_kv_layers"),
        local_rope=Rope(positive(c, "rope.freq_base_swa", 1e4), rotated=rope.rotated),
        logit_softcap=positive(c, "final_logit_softcapping", 30.0),
        altup=AltUp(
            streams,
            integer(c, "altup.active_idx"),
            scaled=True,
            rank=shapes[needed[1]][0],
            sparsity=tuple(max(0.0, float(factor)) for factor in factors if isinstance(factor, float)),
        ),
    )


HF: Final = (
    HfFamily(
        Family.GEMMA3N,
        _DEFAULTS,
        KEYS,
        _gemma3n,
        FIXED,
        given=_with_inner_sizes,
        ropes=ropes,
        also=("gemma3n_text",),
    ),
)
GGUF: Final = (
    GgufFamily(
        "gemma3n",
        Family.GEMMA3N,
        _gemma3n_from_gguf,
        GGUF_FIXED,
        BOTH_SIDES,
        theta=1e6,
        given=_with_one_size,
    ),
)
