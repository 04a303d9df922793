"""The loaded models of one config, as another config wants them."""

from __future__ import annotations

from dataclasses import replace

from specinfer.config import EngineConfig
from specinfer.engine.build import Models
from specinfer.errors import ConfigError

# What decides which weights are loaded and what runs them; `drafts` may name fewer.
_LOADED = ("model", "dtype", "device", "quantization", "kernels", "threads", "chat_template")
_OF_DRAFTS = ("draft_quantization", "draft_vocabulary", "draft_tokens")


def models_for(wanted: EngineConfig, config: EngineConfig, models: Models) -> Models:
    """Of `models`, which were loaded for `config`, those that `wanted` names.

    Raises ConfigError when `wanted` needs other weights.
    """
    pairs = [(name, getattr(wanted, name), getattr(config, name)) for name in _LOADED]
    if wanted.generation_config == "auto":  # it was read with the weights, or not at all
        pairs.append(("generation_config", "auto", config.generation_config))
    if wanted.speculation.drafts:
        pairs += [
            (name, getattr(wanted.speculation, name), getattr(config.speculation, name))
            for name in _OF_DRAFTS
        ]
    for name, asked, loaded in pairs:
        if asked != loaded:
            raise ConfigError(
                f"{name} is {asked!r}, and a variant shares weights that were loaded with {loaded!r}; "
                "leave it out, or make an LLM of its own"
            )
    left = list(zip(config.speculation.drafts, models.drafts.items(), strict=True))
    drafts = {}
    for draft in wanted.speculation.drafts:
        found = next((one for one in left if one[0] == draft), None)
        if found is None:
            known = ", ".join(config.speculation.drafts) or "no draft"
            raise ConfigError(
                f"drafts names {draft!r}; a variant can have what is loaded ({known}): leave it out, or make "
                "an LLM of its own"
            )
        left.remove(found)
        name, model = found[1]
        drafts[name] = model
    named = {name: tokens for name, tokens in models.named.items() if name in drafts}
    foreign = {name: tokens for name, tokens in models.foreign.items() if name in drafts}
    return replace(models, drafts=drafts, named=named, foreign=foreign)
