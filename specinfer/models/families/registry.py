"""Registry of model families, by config.json's model_type and by the architecture of GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from specinfer.errors import ModelError
from specinfer.models.config import ModelConfig
from specinfer.models.families import (
    cohere,
    falcon,
    gemma,
    glm,
    gpt,
    granite,
    llama,
    llama_like,
    mixtures,
    mpt,
    neox,
    olmo,
    opt,
    phi,
)
from specinfer.models.families.relatives import running_relative, sort_of
from specinfer.models.fields import Fields, mapping
from specinfer.models.gguf_config import GgufFamily
from specinfer.models.hf_config import HfFamily

HF_FAMILIES: Final[Mapping[str, HfFamily]] = {
    kind: family
    for family in (
        *(*llama.HF, *gemma.HF, *phi.HF, *olmo.HF, *granite.HF, *glm.HF, *cohere.HF),
        *mixtures.HF,
        *(*llama_like.HF, *gpt.HF, *falcon.HF, *mpt.HF, *neox.HF, *opt.HF),
    )
    for kind in family.model_types
}
GGUF_FAMILIES: Final[Mapping[str, GgufFamily]] = {
    family.architecture: family
    for family in (
        *(*llama.GGUF, *gemma.GGUF, *phi.GGUF, *olmo.GGUF, *granite.GGUF, *glm.GGUF, *cohere.GGUF),
        *mixtures.GGUF,
        *(*llama_like.GGUF, *gpt.GGUF, *falcon.GGUF, *mpt.GGUF, *neox.GGUF),
    )
}


def hf_family(config: Fields) -> HfFamily:
    """The family of a config.json; raises ModelError for an unknown model_type."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in HF_FAMILIES:
        raise ModelError(f"model_type {kind!r} is {_what(kind)}")
    return HF_FAMILIES[kind]


def gguf_family(metadata: Fields) -> GgufFamily:
    """The family of a GGUF file; raises ModelError for an unknown architecture."""
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in GGUF_FAMILIES:
        raise ModelError(f"the GGUF architecture {kind!r} is {_what(kind)}")
    return GGUF_FAMILIES[kind]


def _what(kind: object) -> str:
    what = sort_of(kind) or "of no family that specinfer has"
    return f"{what}; {running_relative(kind)}, docs/add_a_model.md says how to add one"


def config_from_hf(config: Fields, generation_config: Fields | None = None) -> ModelConfig:
    """The config of a Hugging Face folder; raises ModelError for anything unsupported.

    `config` is config.json as written by transformers 4 or 5; `generation_config`, if the folder has one,
    adds end-of-text ids (chat models list the end of a turn only there).
    """
    family = hf_family(config)
    text = mapping(config, "text_config") if config["model_type"] in family.text_in else config
    return family.config(text, (text, config, generation_config or {}))
