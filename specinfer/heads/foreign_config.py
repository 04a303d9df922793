"""config.json of heads as their authors publish them -> EagleConfig, BlockConfig.

    LlamaForCausalLMEagle3    EAGLE-3 and SpecForge: tensors `midlayer.*`
    DFlashDraftModel          DFlash
    Qwen3DSparkModel          DSpark

Layer ids are counted in two ways. `eagle_aux_hidden_state_layer_ids` beside the layers' fields are taps; in
`eagle_config`, where SpecForge has it, and in every `target_layer_ids` id i is what layer i puts out, tap
i + 1, and -1 is the embeddings', tap 0. A head whose taps are one layer off still guesses, and worse: nothing
but a comparison shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from specinfer.errors import ModelError
from specinfer.heads.body_config import body_from_hf, is_causal
from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.heads.speculators_config import config_from_speculators, flag, taps_of
from specinfer.models.config import ModelConfig
from specinfer.models.fields import count, integer, mapping

_EAGLE_LAYERS: Final = "eagle_aux_hidden_state_layer_ids"
_BLOCK_LAYERS: Final = "target_layer_ids"


def is_head_config(c: Mapping[str, object]) -> bool:
    """Whether a config.json describes a head."""
    return "speculators_model_type" in c or _architecture(c) is not None


def config_from_json(c: Mapping[str, object], target_layers: int) -> EagleConfig | BlockConfig:
    """The head that a config.json describes, for a target of so many layers.

    Whether it brings embeddings and output layer is seen in its tensors, not here. Raises ModelError on
    anything unsupported.
    """
    architecture = _architecture(c)
    if architecture is None or "speculators_model_type" in c:
        return config_from_speculators(c, target_layers)
    return _READERS[architecture](c, target_layers)


def named_as_here(name: str) -> str:
    """A tensor's name in the layout of speculators."""
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _architecture(c: Mapping[str, object]) -> str | None:
    names = c.get("architectures")
    if not isinstance(names, list):
        return None
    return next((name for name in names if isinstance(name, str) and name in _READERS), None)


def _eagle(c: Mapping[str, object], target_layers: int) -> EagleConfig:
    body = body_from_hf({"model_type": "llama", **c})
    own = mapping(c, "eagle_config") if c.get("eagle_config") is not None else {}
    if not flag(own, "use_aux_hidden_state", True):
        raise ModelError("eagle_config.use_aux_hidden_state is false; supported: heads that read taps")
    return EagleConfig(
        body=body,
        taps=_eagle_taps(c, own, target_layers),
        target_hidden_size=count(c, "target_hidden_size", body.hidden_size),
        draft_vocab_size=count(c, "draft_vocab_size", body.vocab_size),
        norm_before_residual=flag(c, "norm_before_residual", False),
        norm_before_fc=flag(c, "norm_before_fc", False),
        fc_norm=flag(c, "fc_norm", False),
        norm_output=flag(c, "norm_output", False),
    )


def _eagle_taps(c: Mapping[str, object], own: Mapping[str, object], target_layers: int) -> tuple[int, ...]:
    beside = taps_of(c, _EAGLE_LAYERS, target_layers)
    if own.get(_EAGLE_LAYERS) is None:
        return beside
    taps = _outputs(own, _EAGLE_LAYERS, target_layers)
    if c.get(_EAGLE_LAYERS) is not None and beside != taps:
        raise ModelError(
            f"{_EAGLE_LAYERS} is {own[_EAGLE_LAYERS]} in eagle_config, which counts what layers put out, and "
            f"{c[_EAGLE_LAYERS]} beside it, which counts what they are given: these are different layers"
        )
    return taps


def _dflash(c: Mapping[str, object], target_layers: int) -> BlockConfig:
    own = mapping(c, "dflash_config")
    known = {"mask_token_id", "target_layer_ids", "block_size", "causal", "use_aux_hidden_state"}
    unknown = sorted(key for key, value in own.items() if key not in known and value)
    if unknown:
        raise ModelError(f"dflash_config has {', '.join(unknown)}; supported: {', '.join(sorted(known))}")
    body = _block_body(c)
    causal = is_causal(c) if own.get("causal") is None else flag(own, "causal")
    return BlockConfig(
        body=body,
        taps=_outputs(own, _BLOCK_LAYERS, target_layers),
        target_hidden_size=count(c, "target_hidden_size", body.hidden_size),
        draft_vocab_size=count(c, "draft_vocab_size", body.vocab_size),
        block_size=count(c if c.get("block_size") is not None else own, "block_size"),
        mask_token_id=integer(own, "mask_token_id"),
        causal=causal,
        sample_from_anchor=False,
    )


def _dspark(c: Mapping[str, object], target_layers: int) -> BlockConfig:
    body, rank = _block_body(c), integer(c, "markov_rank")
    kind = c.get("markov_head_type", "vanilla")
    if rank and kind != "vanilla":
        raise ModelError(f"markov_head_type is {kind!r}; supported: vanilla")
    confidence = flag(c, "enable_confidence_head")
    return BlockConfig(
        body=body,
        taps=_outputs(c, _BLOCK_LAYERS, target_layers),
        target_hidden_size=count(c, "target_hidden_size", body.hidden_size),
        draft_vocab_size=count(c, "draft_vocab_size", body.vocab_size),
        block_size=count(c, "block_size"),
        mask_token_id=integer(c, "mask_token_id"),
        causal=is_causal(c),
        sample_from_anchor=True,
        markov_rank=rank,
        confidence=confidence,
        confidence_reads_token=confidence and flag(c, "confidence_head_with_markov"),
    )


def _block_body(c: Mapping[str, object]) -> ModelConfig:
    body = body_from_hf({"model_type": "qwen3", **c})
    if not body.qk_norm:
        raise ModelError(f"a block head has layers of {body.family}; supported: qwen3")
    return body


def _outputs(c: Mapping[str, object], key: str, target_layers: int) -> tuple[int, ...]:
    """The taps of layers that are named by what they put out."""
    ids = c.get(key)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ModelError(f"{key} is {ids!r}; expected a list of layers. The config is damaged or incomplete.")
    if any(i >= target_layers for i in ids):
        raise ModelError(
            f"the head reads what layer {max(ids)} puts out, and its target's last is {target_layers - 1}; "
            "it belongs to another target"
        )
    return tuple(i + 1 for i in ids)


_READERS: Final[Mapping[str, Callable[[Mapping[str, object], int], EagleConfig | BlockConfig]]] = {
    "LlamaForCausalLMEagle3": _eagle,
    "DFlashDraftModel": _dflash,
    "Qwen3DSparkModel": _dspark,
}
