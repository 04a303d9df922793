"""config.json of the `speculators` library <-> EagleConfig, BlockConfig.

Layer ids are taps as they are here: id i is what layer i is given. Anything the file asks for that heads do
not compute is refused with a ModelError; nothing is skipped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from specinfer.errors import ModelError
from specinfer.heads.body_config import body_from_hf, body_to_hf, is_causal
from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.models.fields import count, integer, mapping

TYPES: Final = ("dflash", "dspark", "eagle3", "peagle")
_CLASSES: Final = {"eagle3": "Eagle3", "peagle": "PEagle", "dspark": "DSpark", "dflash": "DFlash"}
_VERSION: Final = "0.7.0"  # of the library whose files these are; its layout has been the same from 0.1 on
# Words of ours: the library has no such heads.
_READS_LAST: Final = "reads_last_hidden_state"
_KNOWN_VERSIONS: Final = re.compile(r"0\.\d")


def config_from_speculators(c: Mapping[str, object], target_layers: int) -> EagleConfig | BlockConfig:
    """The head that a config.json describes, for a target of so many layers.

    Whether it brings embeddings and output layer is seen in its tensors, not here. Raises ModelError on
    anything unsupported.
    """
    kind, version = c.get("speculators_model_type"), c.get("speculators_version", _VERSION)
    if kind not in TYPES:
        raise ModelError(f"speculators_model_type is {kind!r}; supported: {', '.join(TYPES)}")
    if not isinstance(version, str) or not _KNOWN_VERSIONS.match(version):
        raise ModelError(f"speculators_version is {version!r}; supported: those that begin with 0.")
    layers = mapping(c, "transformer_layer_config")
    if kind in ("eagle3", "peagle"):
        return _eagle(c, layers, target_layers, one_pass=kind == "peagle")
    return _block(c, layers, target_layers, markov=kind == "dspark")


def _eagle(
    c: Mapping[str, object], layers: Mapping[str, object], target_layers: int, *, one_pass: bool
) -> EagleConfig:
    body = body_from_hf(layers)
    return EagleConfig(
        body=body,
        taps=taps_of(c, "eagle_aux_hidden_state_layer_ids", target_layers),
        target_hidden_size=count(c, "target_hidden_size", body.hidden_size),
        draft_vocab_size=count(c, "draft_vocab_size"),
        depth=_depth(c, 8 if one_pass else 5),
        mask_token_id=integer(c, "mask_token_id") if one_pass else None,
        norm_before_residual=flag(c, "norm_before_residual"),
        norm_before_fc=flag(c, "norm_before_fc", False),
        fc_norm=flag(c, "fc_norm", False),
        norm_output=flag(c, "norm_output", False),
    )


def _block(
    c: Mapping[str, object], layers: Mapping[str, object], target_layers: int, *, markov: bool
) -> BlockConfig:
    # Layers of a block are Qwen3's whatever they are called: with norms of queries and keys.
    body = body_from_hf({**layers, "model_type": layers.get("model_type", "qwen3")})
    if not body.qk_norm:
        raise ModelError(f"a block head has layers of {body.family}; supported: qwen3")
    rank = integer(c, "markov_rank", 256) if markov else 0
    kind = c.get("markov_head_type", "vanilla")
    if rank and kind != "vanilla":
        raise ModelError(f"markov_head_type is {kind!r}; supported: vanilla")
    confidence = markov and flag(c, "enable_confidence_head", True)
    return BlockConfig(
        body=body,
        taps=taps_of(c, "aux_hidden_state_layer_ids", target_layers),
        target_hidden_size=count(c, "target_hidden_size", body.hidden_size),
        draft_vocab_size=count(c, "draft_vocab_size"),
        block_size=count(c, "block_size"),
        mask_token_id=integer(c, "mask_token_id"),
        causal=is_causal(layers, windows_are_causal=not flag(c, "sliding_window_non_causal", False)),
        sample_from_anchor=flag(c, "sample_from_anchor", markov),
        markov_rank=rank,
        confidence=confidence,
        confidence_reads_token=confidence and flag(c, "confidence_head_with_markov", True),
        reads_last=markov and flag(c, _READS_LAST, False),
    )


def config_to_speculators(
    config: EagleConfig | BlockConfig, *, verifier: str, architectures: Sequence[str], dtype: str
) -> dict[str, object]:
    """The config.json of a head of the target `verifier`, whose architectures its own config.json names."""
    kind, own = _eagle_fields(config) if isinstance(config, EagleConfig) else _block_fields(config)
    causal = isinstance(config, BlockConfig) and config.causal
    return {
        "architectures": [_CLASSES[kind] + "Speculator"],
        "speculators_model_type": kind,
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.depth,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
        "transformer_layer_config": body_to_hf(config.body, causal_block=causal),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "dtype": dtype,
        **own,
    }


def _eagle_fields(config: EagleConfig) -> tuple[str, dict[str, object]]:
    if config.fc_reads_token:
        raise ModelError("a head of EAGLE-1 or 2 cannot be written in the layout of speculators")
    one_pass = config.mask_token_id is not None
    return "peagle" if one_pass else "eagle3", {
        **({"mask_token_id": config.mask_token_id} if one_pass else {}),
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": config.own_embedding,
    }


def _block_fields(config: BlockConfig) -> tuple[str, dict[str, object]]:
    fields: dict[str, object] = {
        "aux_hidden_state_layer_ids": list(config.taps),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": False,
        "sample_from_anchor": config.sample_from_anchor,
    }
    if not (config.markov_rank or config.confidence or config.sample_from_anchor or config.reads_last):
        return "dflash", fields
    return "dspark", fields | {
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_reads_token,
        **({_READS_LAST: True} if config.reads_last else {}),
    }


def taps_of(c: Mapping[str, object], key: str, target_layers: int) -> tuple[int, ...]:
    """The layers under `key`, or those that EAGLE-3 reads of a target of so many layers."""
    ids = c.get(key)
    if ids is None:
        return (2, target_layers // 2, target_layers - 3)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ModelError(f"{key} is {ids!r}; expected a list of layers. The config is damaged.")
    return tuple(ids)


def _depth(c: Mapping[str, object], default: int) -> int:
    """The tokens the head was made to guess, where the file says."""
    methods = c.get("speculators_config")
    match methods:
        case {"proposal_methods": [{"speculative_tokens": int(tokens)}, *_]} if not isinstance(tokens, bool):
            return tokens
        case _:
            return default


def flag(c: Mapping[str, object], key: str, default: bool | None = None) -> bool:
    """A truth value; `default` where the key is missing, and None: it must be there."""
    value = c.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(f"{key} is {value!r}; expected true or false. The config is damaged or incomplete.")
    return value
