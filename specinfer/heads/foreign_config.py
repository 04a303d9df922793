"""Convert the config.json of published heads to EagleConfig or BlockConfig.

    LlamaForCausalLMEagle3    EAGLE-3 of SpecForge, AngelSlim, NVIDIA and others; P-EAGLE as vLLM serves it
    PEagleDraftModel          SpecForge's P-EAGLE
    DFlashDraftModel          DFlash and JetSpec; with projector_type dspark SpecForge's first DSpark
    DSparkDraftModel          SpecForge's DSpark: its fields are in `dflash_config`
    Qwen3DSparkModel          DeepSpec's DSpark: its fields are beside the layers'; SpecForge's for SGLang

EAGLE heads are recognised by their tensors, because their config.json files name different architectures:
LlamaForCausalLM (EAGLE's authors), Eagle3LlamaForCausalLM or LlamaEagle3DraftModel. Many configs repeat the
target's number and kind of layers, so both are read from the tensors as well: norms of queries and keys mean
qwen3, biases mean qwen2.

Published configs count layers in two ways. A top-level `eagle_aux_hidden_state_layer_ids` holds taps. Inside
SpecForge's `eagle_config`, and in every `target_layer_ids`, id i means the output of layer i (tap i + 1), and
-1 means the embeddings (tap 0). A head whose taps are one layer off still runs and guesses worse, so an error
here shows only in a comparison of acceptance rates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from specinfer.errors import ModelError
from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.heads.speculators import body_from_hf, config_from_speculators, flag, is_causal, taps_of
from specinfer.models.config import QkNorm
from specinfer.models.fields import count, integer, mapping
from specinfer.models.positions import Rope
from specinfer.models.safetensors import EAGLE_3, head_kind

_EAGLE_LAYERS: Final = "eagle_aux_hidden_state_layer_ids"
_BLOCK_LAYERS: Final = "target_layer_ids"
_VLLM_MASKS: Final = ("pard_token", "ptd_token_id")
_PARALLEL_DEPTH: Final = 8  # levels that SpecForge's P-EAGLE is trained for; its files do not state them

# Fields that affect the computation, read from `dflash_config`, the top level, or both.
_FIELDS: Final = (
    "attention_mode",
    "attention_value_scale",
    "block_size",
    "causal",
    "causal_head",  # JetSpec's name for `causal`
    "confidence_head_with_markov",
    "enable_confidence_head",
    "markov_head_type",
    "markov_rank",
    "mask_token_id",
    "output_multiplier",
    "projector_type",
    "sample_from_anchor",
    _BLOCK_LAYERS,
    "use_aux_hidden_state",
)
_EAGLES: Final = ("LlamaForCausalLMEagle3", "PEagleDraftModel")
_EARLY: Final = "EAGLE-1 or 2"  # the architecture name is LlamaForCausalLM
_LAYER: Final = re.compile(r"layers\.(\d+)\.")
_OF_TRAINING: Final = ("confidence_head_alpha", "loss_decay_gamma", "num_anchors", "num_target_layers")
_PREFIXES: Final = {"midlayer.": "layers.0.", "logit_head.": ""}  # prefixes of tensors' names


def is_head_config(c: Mapping[str, object]) -> bool:
    """Return whether a config.json describes a head, of a supported kind or of a known unsupported one."""
    return "speculators_model_type" in c or _architecture(c) is not None


def published_config(
    c: Mapping[str, object], target_layers: int, shapes: Mapping[str, tuple[int, ...]]
) -> EagleConfig | BlockConfig:
    """Return the config of the head with this config.json and tensors of these names and shapes.

    The tensors decide whether the head has its own embeddings and output layer. Raises ModelError on anything
    unsupported.
    """
    config = config_from_json(as_tensors_say(c, shapes), target_layers)
    return replace(config, own_embedding="embed_tokens.weight" in shapes, own_head="lm_head.weight" in shapes)


def config_from_json(c: Mapping[str, object], target_layers: int) -> EagleConfig | BlockConfig:
    """Return the config of the head with this config.json, for a target of `target_layers` layers.

    The result does not say whether the head has embeddings and an output layer; published_config adds that.
    Raises ModelError on anything unsupported.
    """
    architecture = _architecture(c)
    if architecture is None or "speculators_model_type" in c:
        return config_from_speculators(c, target_layers)
    if architecture in _UNREAD:
        raise ModelError(f"the head is a {architecture}; supported: {', '.join(sorted(_READERS))}")
    return _READERS[architecture](c, target_layers)


def as_tensors_say(c: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, object]:
    """Return a config.json with EAGLE's architecture and layer fields corrected from the tensors' shapes."""
    architecture, kind = _architecture(c), head_kind(shapes)
    if kind is None or "speculators_model_type" in c or architecture not in (None, *_EAGLES):
        return c
    c = {**c, **_inner(c, "model")}  # as vLLM wrote EAGLE-1
    attention = "layers.0.self_attn."
    biased = f"{attention}q_proj.bias" in shapes
    layers = len({found[1] for found in map(_LAYER.match, shapes) if found})
    kinds = c.get("layer_types")
    settings: dict[str, object] = {
        "num_hidden_layers": layers,
        "layer_types": kinds[:layers] if isinstance(kinds, list) else None,
        "model_type": "llama",
        "attention_bias": biased,
        "mlp_bias": "layers.0.mlp.down_proj.bias" in shapes,
        "tie_word_embeddings": False,
    }
    if f"{attention}q_norm.weight" in shapes:
        settings["model_type"] = "qwen3"
    elif biased and f"{attention}o_proj.bias" not in shapes:
        settings["model_type"] = "qwen2"
    if (keys := shapes.get(f"{attention}k_proj.weight")) and c.get("head_dim") is None:
        settings["head_dim"] = keys[0] // count(c, "num_key_value_heads", count(c, "num_attention_heads", 32))
    if (named := shapes.get("d2t", shapes.get("lm_head.weight"))) and c.get("draft_vocab_size") is None:
        settings["draft_vocab_size"] = named[0]
    if kind != EAGLE_3:
        return {**c, **settings, "architectures": [_EARLY], "fc_bias": "fc.bias" in shapes}
    if architecture is None:
        settings["architectures"] = [_EAGLES[0]]
        if "mask_hidden" in shapes:  # NVIDIA's P-EAGLE
            settings["ptd_token_id"] = _mask((c,), ("mask_token_id", *_VLLM_MASKS))
    return {**c, **settings}


def unchanged_name(c: Mapping[str, object], name: str) -> str | None:
    """Return a tensor's name in the layout of the speculators library.

    Returns None for DSpark's confidence head, which is not used: the guesses' probabilities serve instead.
    """
    name = name.removeprefix("draft_model.").removeprefix("model.")
    for theirs, ours in _PREFIXES.items():
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
            break
    return None if name.startswith("confidence_head.") else name


def _architecture(c: Mapping[str, object]) -> str | None:
    names = c.get("architectures")
    if not isinstance(names, list):
        return None
    known = (name for name in names if isinstance(name, str) and (name in _READERS or name in _UNREAD))
    return next(known, None)


def _eagle(c: Mapping[str, object], target_layers: int) -> EagleConfig:
    return _eagle_of(c, target_layers, _mask((c,), _VLLM_MASKS))


def _early_eagle(c: Mapping[str, object], target_layers: int) -> EagleConfig:
    body = body_from_hf(c)
    return EagleConfig(
        body=body,
        taps=(target_layers,),
        target_hidden_size=body.hidden_size,
        draft_vocab_size=body.vocab_size,
        fc_reads_token=True,
        fc_bias=flag(c, "fc_bias"),
    )


def _parallel_eagle(c: Mapping[str, object], target_layers: int) -> EagleConfig:
    mask = _mask((c, _inner(c, "dflash_config")), ("mask_token_id", *_VLLM_MASKS))
    if mask is None:
        raise ModelError(
            "mask_token_id is missing: SpecForge's P-EAGLE does not name its mask token; add the one it was "
            "trained with to config.json"
        )
    config = _eagle_of(c, target_layers, mask)
    rope = config.body.rope
    if rope is None or rope != Rope(rope.theta):
        raise ModelError(
            "rope_scaling is set, but SpecForge's P-EAGLE is trained without it; remove it from config.json"
        )
    return config


def _eagle_of(c: Mapping[str, object], target_layers: int, mask: int | None) -> EagleConfig:
    body = body_from_hf({"model_type": "llama", **c})
    own = _inner(c, "eagle_config")
    if not flag(own, "use_aux_hidden_state", True):
        raise ModelError("eagle_config.use_aux_hidden_state is false; supported: heads that read taps")
    return EagleConfig(
        body=body,
        taps=_eagle_taps(c, own, target_layers),
        target_hidden_size=count(c, "target_hidden_size", body.hidden_size),
        draft_vocab_size=count(c, "draft_vocab_size", body.vocab_size),
        depth=5 if mask is None else _PARALLEL_DEPTH,
        norm_before_residual=flag(c, "norm_before_residual", False),
        norm_before_fc=flag(c, "norm_before_fc", False),
        fc_norm=flag(c, "fc_norm", False),
        norm_output=flag(c, "norm_output", False),
        mask_token_id=mask,
    )


def _eagle_taps(c: Mapping[str, object], own: Mapping[str, object], target_layers: int) -> tuple[int, ...]:
    beside = taps_of(c, _EAGLE_LAYERS, target_layers)
    if not own.get(_EAGLE_LAYERS):  # NVIDIA writes [] for EAGLE-3's default layers
        return beside
    taps = _outputs(own, _EAGLE_LAYERS, target_layers)
    if c.get(_EAGLE_LAYERS) is not None and beside != taps:
        raise ModelError(
            f"{_EAGLE_LAYERS} is {own[_EAGLE_LAYERS]} in eagle_config, which counts layer outputs, and "
            f"{c[_EAGLE_LAYERS]} at the top level, which counts layer inputs: these are different layers"
        )
    return taps


def _mask(places: tuple[Mapping[str, object], ...], names: tuple[str, ...]) -> int | None:
    given = [
        (name, integer(place, name)) for place in places for name in names if place.get(name) is not None
    ]
    ids = {mask for _, mask in given}
    if len(ids) > 1:
        raise ModelError(f"the config gives different ids of the mask token: {given}; it is damaged")
    return next(iter(ids), None)


def _dflash(c: Mapping[str, object], target_layers: int) -> BlockConfig:
    return _block(c, target_layers, projectors=("dflash", "dspark"))


def _dspark(c: Mapping[str, object], target_layers: int) -> BlockConfig:
    return _block(c, target_layers, projectors=("dspark",))


def _block(c: Mapping[str, object], target_layers: int, projectors: tuple[str, ...]) -> BlockConfig:
    """Return the config of a block head of one of these projector types; the first is the default."""
    own = _inner(c, "dflash_config")
    fields = _fields(c, own)
    _check_fields(own, fields, projectors)
    markov = fields.get("projector_type", projectors[0]) == "dspark"
    body = body_from_hf({"model_type": "qwen3", **c})
    if body.qk_norm is QkNorm.NONE:
        raise ModelError(f"a block head has layers of {body.family}; supported: qwen3")
    rank = integer(fields, "markov_rank", 0)
    if not markov and rank:
        raise ModelError(f"markov_rank is {rank}; supported: 0 in a head of projector_type dflash")
    return BlockConfig(
        body=body,
        taps=_outputs(fields, _BLOCK_LAYERS, target_layers),
        target_hidden_size=count(c, "target_hidden_size", body.hidden_size),
        draft_vocab_size=count(c, "draft_vocab_size", body.vocab_size),
        block_size=count(fields, "block_size"),
        mask_token_id=integer(fields, "mask_token_id"),
        causal=_causal(c, fields),
        sample_from_anchor=flag(fields, "sample_from_anchor", markov),
        markov_rank=rank,
    )


def _fields(c: Mapping[str, object], own: Mapping[str, object]) -> Mapping[str, object]:
    """Return the fields of a block head that have a value, from `dflash_config` or the top level."""
    for key in _FIELDS:
        inside, beside = own.get(key), c.get(key)
        if inside is not None and beside is not None and inside != beside:
            raise ModelError(
                f"{key} is {inside!r} in dflash_config and {beside!r} at the top level; expected one value"
            )
    found = {key: own[key] if own.get(key) is not None else c.get(key) for key in _FIELDS}
    return {key: value for key, value in found.items() if value is not None}


def _check_fields(
    own: Mapping[str, object], fields: Mapping[str, object], projectors: tuple[str, ...]
) -> None:
    """Raise ModelError if a field asks for a computation that is not supported."""
    supported: dict[str, tuple[object, ...]] = {
        "projector_type": projectors,
        "markov_head_type": ("vanilla",),
        "attention_mode": ("gqa", "mha"),
        "output_multiplier": (1,),
        "attention_value_scale": (1,),
    }
    if not fields.get("markov_rank"):
        del supported["markov_head_type"]
    for key, values in supported.items():
        value = fields.get(key)
        if value is not None and value not in values:
            raise ModelError(f"{key} is {value!r}; supported: {', '.join(map(str, values))}")
    known = {*_FIELDS, *_OF_TRAINING, *supported}
    # Fields that are null, false or 0 enable nothing.
    unknown = [f"{key} = {str(value)[:40]}" for key, value in own.items() if key not in known and value]
    if unknown:
        raise ModelError(
            f"dflash_config has {', '.join(sorted(unknown))}; supported: {', '.join(sorted(known))}"
        )
    if not flag(fields, "use_aux_hidden_state", True):
        raise ModelError("use_aux_hidden_state is false; supported: heads that read taps")


def _causal(c: Mapping[str, object], fields: Mapping[str, object]) -> bool:
    given = {key: flag(fields, key) for key in ("causal", "causal_head") if key in fields}
    if len(set(given.values())) > 1:
        raise ModelError(f"causal and causal_head differ: {given}; expected one of them, or equal values")
    return next(iter(given.values())) if given else is_causal(c)


def _outputs(c: Mapping[str, object], key: str, target_layers: int) -> tuple[int, ...]:
    """Return the taps of layers that a config counts by their outputs."""
    ids = c.get(key)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ModelError(f"{key} is {ids!r}; expected a list of layers: the config is damaged or incomplete")
    if any(i >= target_layers for i in ids):
        raise ModelError(
            f"the head reads the output of layer {max(ids)}, but its target's last layer is "
            f"{target_layers - 1}: it belongs to another target"
        )
    return tuple(i + 1 for i in ids)


def _inner(c: Mapping[str, object], key: str) -> Mapping[str, object]:
    """Return the fields under `key`, or no fields."""
    return {} if c.get(key) is None else mapping(c, key)


_UNREAD: Final = ("DFlash2DraftModel", "DominoDraftModel")  # architectures that are not implemented
_READERS: Final[Mapping[str, Callable[[Mapping[str, object], int], EagleConfig | BlockConfig]]] = {
    _EAGLES[0]: _eagle,
    _EAGLES[1]: _parallel_eagle,
    _EARLY: _early_eagle,
    "DFlashDraftModel": _dflash,
    "DSparkDraftModel": _dspark,
    "Qwen3DSparkModel": _dspark,
}
