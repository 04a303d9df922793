"""Layouts of heads: config.json and the names of tensors, in the words of the `speculators` library.

The library describes a head under `speculators_model_type`: eagle3, dflash, dflash2 or dspark. Its
`transformer_layer_config` holds the fields of the layers that differ from the defaults of transformers' model
class. Other layouts are converted to its words by the tables below:

    EAGLE-3     recognized by its tensors, because config.json names many architectures, often a language
                model's, and repeats the target's number and kind of layers. Both are read from the tensors:
                norms of queries and keys mean qwen3, biases mean qwen2
    DFlash      `DFlashDraftModel`, and `DFlash2DraftModel` of the second; the head's fields are in
                `dflash_config` or beside the layers'
    DSpark      `Qwen3DSparkModel` (DeepSpec) and `DSparkDraftModel` (SpecForge); likewise

Published configs count layers in two ways. Those of the library, and a top-level
`eagle_aux_hidden_state_layer_ids`, hold taps. Inside `eagle_config`, and in every `target_layer_ids`, id i
means the output of layer i (tap i + 1), and -1 means the embeddings (tap 0). A head whose taps are one layer
off still runs and guesses worse, so an error here shows only in a comparison of acceptance rates.

A config.json that requires anything that the heads do not compute is refused with a ModelError.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from specinfer.errors import ModelError
from specinfer.heads.config import BlockConfig, EagleConfig, HeadConfig
from specinfer.models.config import ModelConfig, QkNorm
from specinfer.models.families.registry import config_from_hf
from specinfer.models.fields import boolean, count, integer, mapping
from specinfer.models.safetensors import EAGLE_3, head_kind

READS_LAST: Final = "reads_last_hidden_state"  # a field of this project: the library has no such heads
SLIDING: Final = "sliding_attention"
_TYPES: Final = ("dflash", "dflash2", "dspark", "eagle3")
_KNOWN_VERSIONS: Final = re.compile(r"0\.\d")
_EAGLE_TAPS: Final = "eagle_aux_hidden_state_layer_ids"
_BLOCK_TAPS: Final = "aux_hidden_state_layer_ids"
_BLOCKS: Final = {
    **{"DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash2"},
    **{"DSparkDraftModel": "dspark", "Qwen3DSparkModel": "dspark"},
}
# Fields of DFlash and DSpark: their names, and the library's.
_FIELDS: Final = {
    **{name: name for name in ("block_size", "mask_token_id", "sample_from_anchor")},
    **{name: name for name in ("markov_rank", "markov_head_type")},
    "target_layer_ids": _BLOCK_TAPS,
    **{name: name for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")},
    "causal": "is_causal",
    "causal_head": "is_causal",
}
# Fields with the only values that are computed.
_FIXED: Final[Mapping[str, tuple[object, ...]]] = {
    "attention_mode": ("gqa", "mha"),
    "attention_value_scale": (1,),
    "output_multiplier": (1,),
    "use_aux_hidden_state": (True,),
}
# Fields of training, and of DSpark's confidence head: the guesses' probabilities serve instead of it.
_UNUSED: Final = (
    *("confidence_head_alpha", "loss_decay_gamma", "num_anchors", "num_target_layers"),
    *("confidence_head_with_markov", "enable_confidence_head", "projector_type"),
)
_EAGLE_FLAGS: Final = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_PREFIXES: Final = {"draft_model.": "", "model.": "", "midlayer.": "layers.0."}  # of tensors' names
_LAYER: Final = re.compile(r"layers\.(\d+)\.")
_MAX_LAYERS: Final = 64
# Defaults of transformers' config classes; a config file may leave these fields out.
_SIZES: Final = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_QWEN: Final = {**_SIZES, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
_DEFAULTS: Final[Mapping[str, Mapping[str, object]]] = {
    "llama": {**_SIZES, "vocab_size": 32000, "intermediate_size": 11008},
    "qwen2": _QWEN,
    "qwen3": _QWEN,
}
Shapes = Mapping[str, tuple[int, ...]]


def is_head_config(c: Mapping[str, Any]) -> bool:
    """Return whether a config.json says that it describes a head."""
    return "speculators_model_type" in c or any(
        name in _BLOCKS or name.endswith("DraftModel") for name in _architectures(c)
    )


def tensor_name(name: str) -> str | None:
    """Return a tensor's name in the library's layout; None: it is not used."""
    for theirs, ours in _PREFIXES.items():
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
    return None if name.startswith("confidence_head.") else name


def head_config(c: Mapping[str, Any], target_layers: int, shapes: Shapes) -> HeadConfig:
    """Return the config of the head with this config.json and tensors of these names and shapes.

    `target_layers` is the number of the target's layers. The tensors decide whether the head has its own
    embeddings and output layer. Raises ModelError on anything unsupported.
    """
    described = _in_library_words(c, shapes)
    kind, version = described["speculators_model_type"], described.get("speculators_version", "0.7.0")
    if kind not in _TYPES:
        raise ModelError(f"speculators_model_type is {kind!r}; supported: {', '.join(_TYPES)}")
    if not isinstance(version, str) or not _KNOWN_VERSIONS.match(version):
        raise ModelError(f"speculators_version is {version!r}; supported: versions that begin with 0.")
    config = (_eagle if kind == "eagle3" else _block)(described, target_layers)
    return replace(config, own_embedding="embed_tokens.weight" in shapes, own_head="lm_head.weight" in shapes)


def _eagle(c: Mapping[str, Any], target_layers: int) -> HeadConfig:
    body = body_from_hf(mapping(c, "transformer_layer_config"))
    taps = _layer_ids(c, _EAGLE_TAPS) or (2, target_layers // 2, target_layers - 3)
    flags: dict[str, Any] = {name: boolean(c, name, False) for name in _EAGLE_FLAGS}
    return EagleConfig(**_common(c, body), taps=taps, depth=_depth(c), **flags)


def _block(c: Mapping[str, Any], target_layers: int) -> HeadConfig:
    layers, kind = mapping(c, "transformer_layer_config"), c["speculators_model_type"]
    markov, second, size = kind == "dspark", kind == "dflash2", count(c, "block_size")
    causal = _is_causal(layers, windows_are_causal=not boolean(c, "sliding_window_non_causal", second))
    # A block head has Qwen3 layers, with norms of queries and keys, whatever model_type says.
    body = body_from_hf({"model_type": "qwen3", **layers}, rows=0 if causal else size)
    if body.qk_norm is QkNorm.NONE:
        raise ModelError(f"a block head has layers of {body.family}; supported: qwen3")
    rank = integer(c, "markov_rank", 256) if markov else 0
    if rank and (form := c.get("markov_head_type", "vanilla")) != "vanilla":
        raise ModelError(f"markov_head_type is {form!r}; supported: vanilla")
    return BlockConfig(
        **_common(c, body),
        taps=_layer_ids(c, _BLOCK_TAPS) or (2, target_layers // 2, target_layers - 3),
        block_size=size,
        mask_token_id=integer(c, "mask_token_id"),
        causal=causal,
        sample_from_anchor=boolean(c, "sample_from_anchor", markov),
        markov_rank=rank,
        reads_last=markov and boolean(c, READS_LAST, False),
        conv_taps=integer(c, "conv_kernel_size", 2 if second else 0),
        conv_group=count(c, "conv_group_size", 16) if second or c.get("conv_kernel_size") else 1,
        selector_rank=integer(c, "selector_rank", 256 if second else 0),
        candidates=count(c, "selector_top_k", 16),
    )


def _common(c: Mapping[str, Any], body: ModelConfig) -> dict[str, Any]:
    return {
        "body": body,
        "target_hidden_size": count(c, "target_hidden_size", body.hidden_size),
        "draft_vocab_size": count(c, "draft_vocab_size", body.vocab_size),
    }


def _in_library_words(c: Mapping[str, Any], shapes: Shapes) -> Mapping[str, Any]:
    """Return a config.json in the words of the library."""
    if "speculators_model_type" in c:
        return c
    names = _architectures(c)
    for name in names:
        if name in _BLOCKS:
            return _block_words(c, _BLOCKS[name])
    kind = "P-EAGLE" if "mask_hidden" in shapes else head_kind(shapes)
    if kind != EAGLE_3:
        raise ModelError(
            f"the head is {kind or ', '.join(names)}; supported: EAGLE-3, and {', '.join(_BLOCKS)}"
        )
    return _eagle_words(c, shapes)


def _eagle_words(c: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    own = _inner(c, "eagle_config")
    if not boolean(own, "use_aux_hidden_state", True):
        raise ModelError("eagle_config.use_aux_hidden_state is false; supported: heads that read taps")
    taps = _layer_ids(c, _EAGLE_TAPS)
    if own.get(_EAGLE_TAPS):  # NVIDIA writes [] for EAGLE-3's default layers
        beside, taps = taps, _outputs(own, _EAGLE_TAPS)
        if beside is not None and beside != taps:
            raise ModelError(
                f"{_EAGLE_TAPS} is {own[_EAGLE_TAPS]} in eagle_config, which counts layer outputs, and "
                f"{c[_EAGLE_TAPS]} at the top level, which counts layer inputs: these are different layers"
            )
    named = shapes.get("d2t", shapes.get("lm_head.weight", (None,)))[0]
    return {
        **{name: c[name] for name in (*_EAGLE_FLAGS, "target_hidden_size") if c.get(name) is not None},
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**c, **_layers_by_tensors(c, shapes)},
        _EAGLE_TAPS: None if taps is None else list(taps),
        "draft_vocab_size": c.get("draft_vocab_size") or named,
    }


def _layers_by_tensors(c: Mapping[str, Any], shapes: Shapes) -> dict[str, object]:
    """Return the fields of EAGLE's layers that tensors show."""
    attention = "layers.0.self_attn."
    biased = f"{attention}q_proj.bias" in shapes
    layers = len({found[1] for found in map(_LAYER.match, shapes) if found})
    kinds = c.get("layer_types")
    shown: dict[str, object] = {
        "num_hidden_layers": layers,
        "layer_types": kinds[:layers] if isinstance(kinds, list) else None,
        "model_type": "llama",
        "attention_bias": biased,
        "mlp_bias": "layers.0.mlp.down_proj.bias" in shapes,
        "tie_word_embeddings": False,
    }
    if f"{attention}q_norm.weight" in shapes:
        shown["model_type"] = "qwen3"
    elif biased and f"{attention}o_proj.bias" not in shapes:
        shown["model_type"] = "qwen2"
    if (keys := shapes.get(f"{attention}k_proj.weight")) and c.get("head_dim") is None:
        shown["head_dim"] = keys[0] // count(c, "num_key_value_heads", count(c, "num_attention_heads", 32))
    return shown


def _block_words(c: Mapping[str, Any], kind: str) -> dict[str, Any]:
    own = _inner(c, "dflash_config")
    found = {**c, **{name: value for name, value in own.items() if value is not None}}
    known = (*_FIELDS, *_FIXED, *_UNUSED)
    for name in known:
        if name in own and own[name] is not None and c.get(name) not in (None, own[name]):
            raise ModelError(
                f"{name} is {own[name]!r} in dflash_config and {c[name]!r} at the top level; expected one "
                "value"
            )
    for name, values in (*_FIXED.items(), ("projector_type", (kind,))):
        if found.get(name) is not None and found[name] not in values:
            raise ModelError(f"{name} is {found[name]!r}; supported: {', '.join(map(str, values))}")
    # Fields that are null, false or 0 enable nothing.
    unknown = [f"{name} = {str(value)[:40]}" for name, value in own.items() if name not in known and value]
    if unknown:
        raise ModelError(
            f"dflash_config has {', '.join(sorted(unknown))}; supported: {', '.join(sorted(known))}"
        )
    words = {"markov_rank": 0, "speculators_model_type": kind}
    for theirs, ours in _FIELDS.items():
        if (value := found.get(theirs)) is not None:
            if ours == "is_causal" and words.get(ours, value) != value:
                raise ModelError(f"causal and causal_head differ: {words[ours]} and {value}")
            words[ours] = value
    if kind != "dspark" and words["markov_rank"]:
        raise ModelError(f"markov_rank is {words['markov_rank']}; supported: 0 in a DFlash head")
    layers = {**c, "is_causal": words.pop("is_causal", c.get("is_causal"))}
    return {
        **{name: c.get(name) for name in ("target_hidden_size", "draft_vocab_size")},
        **words,
        _BLOCK_TAPS: list(_outputs(found, "target_layer_ids")),
        "transformer_layer_config": layers,
    }


def _layer_ids(c: Mapping[str, Any], key: str) -> tuple[int, ...] | None:
    """Return the layers under `key`, or None."""
    ids = c.get(key)
    if ids is not None and (not isinstance(ids, list) or not all(type(i) is int for i in ids)):
        raise ModelError(f"{key} is {ids!r}; expected a list of layers: the config is damaged")
    return None if ids is None else tuple(ids)


def _outputs(c: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Return the taps of layers that a config counts by their outputs."""
    ids = _layer_ids(c, key)
    if ids is None:
        raise ModelError(f"{key} is None; expected a list of layers: the config is incomplete")
    return tuple(i + 1 for i in ids)


def _architectures(c: Mapping[str, Any]) -> list[str]:
    names = c.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _inner(c: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the fields under `key`, or no fields."""
    return {} if c.get(key) is None else mapping(c, key)


def _depth(c: Mapping[str, Any]) -> int:
    """Return the number of tokens that an EAGLE head guesses: 5, unless the file says another."""
    match c.get("speculators_config"):
        case {"proposal_methods": [{"speculative_tokens": int(tokens)}, *_]} if not isinstance(tokens, bool):
            return tokens
        case _:
            return 5


def body_from_hf(config: Mapping[str, Any], rows: int = 0) -> ModelConfig:
    """Return the config of a head's layers; those with a window also see `rows` rows of a block.

    Raises ModelError for layers that heads do not support, such as experts.
    """
    kind = config.get("model_type", "qwen3")
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        raise ModelError(
            f"a head's layers are of model_type {kind!r}; supported: {', '.join(sorted(_DEFAULTS))}"
        )
    layers = count(config, "num_hidden_layers", 1)
    if layers > _MAX_LAYERS:
        raise ModelError(f"a head has {layers} layers; allowed: 1 to {_MAX_LAYERS}")
    given = {key: value for key, value in config.items() if value is not None}
    body = config_from_hf({**_DEFAULTS[kind], **given, "model_type": kind, "eos_token_id": None})
    windows = tuple(
        None if window is None or window >= body.max_context else window + rows
        for window in body.layer_windows
    )
    return replace(body, layer_windows=windows, eos_ids=())


def _is_causal(config: Mapping[str, Any], *, windows_are_causal: bool) -> bool:
    """Return whether a block's rows attend to earlier rows only.

    `is_causal` decides; without it, layers with a sliding window are causal. vLLM and the library read
    configs in the same way. Raises ModelError if layers differ.
    """
    given = config.get("is_causal")
    if isinstance(given, bool):
        return given
    if given is not None:
        raise ModelError(f"is_causal is {given!r}; expected true or false")
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or not kinds:
        return False
    causal = {windows_are_causal and kind == SLIDING for kind in kinds}
    if len(causal) > 1:
        raise ModelError(
            f"layers of a block head have different layer_types: {kinds}; supported: the same for all"
        )
    return causal.pop()
