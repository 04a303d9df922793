"""Variants: engines that share an LLM's models and have their own options."""

from __future__ import annotations

from dataclasses import replace

from specinfer.config import EngineConfig
from specinfer.engine.models import Models
from specinfer.errors import ConfigError
from specinfer.speculation_config import SELF

# Options that determine the loaded weights and their kernels. A variant must have the same, but may have
# fewer drafts.
_SHARED_OPTIONS = (
    *("model", "model_impl", "trust_remote_code", "dtype", "device", "quantization", "kernels", "threads"),
    *("tensor_parallel", "pipeline_parallel", "master", "key_file", "local_ranks", "sum_parts"),
    *("chat_template", "memory", "offload", "offload_folder", "lora", "max_loras"),
)
_KV_DIVISOR = 4  # a variant's part of a planned engine's KV memory is 1 over this
_DRAFT_OPTIONS = ("draft_quantization", "draft_vocabulary", "draft_lora")


def variant_models(variant: EngineConfig, config: EngineConfig, models: Models) -> Models:
    """Return those of `models`, loaded for `config`, that the variant's config `variant` names.

    With a memory plan, a variant's KV caches get a part of the LLM's KV memory in addition to it. Raises
    ConfigError if `variant` needs other weights.
    """
    pairs = [(name, getattr(variant, name), getattr(config, name)) for name in _SHARED_OPTIONS]
    if variant.generation_config == "auto":  # the recommendation was read with the weights, or not at all
        pairs.append(("generation_config", "auto", config.generation_config))
    if variant.speculation.drafts:
        pairs += [
            (name, getattr(variant.speculation, name), getattr(config.speculation, name))
            for name in _DRAFT_OPTIONS
        ]
    for name, value, loaded in pairs:
        if value != loaded and (value != "auto" or not name.endswith("quantization")):
            raise ConfigError(
                f"{name} is {value!r}, and a variant shares weights that were loaded with {loaded!r}; "
                "leave it out, or make a separate LLM"
            )
    lengths = [one.scheduler.max_context or 0 for one in (variant, config)]
    if len({models.target.config.extends(length) for length in lengths}) > 1:
        raise ConfigError(
            f"max_context is {lengths[0]}, and a variant shares a model whose positions are turned for "
            f"texts of {lengths[1]} tokens (LongRoPE); leave it out, or make a separate LLM"
        )
    left = list(zip(config.speculation.drafts, models.drafts.items(), strict=True))
    drafts = {}
    for draft in variant.speculation.drafts:
        found = next((one for one in left if one[0] == draft), None)
        if found is None:
            known = ", ".join(config.speculation.drafts) or "no draft"
            raise ConfigError(
                f"drafts names {draft!r}; allowed for a variant: loaded drafts ({known}); leave it out, or "
                "make another LLM"
            )
        left.remove(found)
        name, model = found[1]
        drafts[name] = model
    named = {name: tokens for name, tokens in models.named.items() if name in drafts}
    foreign = {name: tokens for name, tokens in models.foreign.items() if name in drafts}
    plan = models.plan
    if plan is not None:
        plan = replace(plan, kv_cache=plan.kv_cache // _KV_DIVISOR)
    memory = models.draft_memory
    if memory is not None and {SELF, config.model} & {*variant.speculation.drafts} and not memory.keep():
        raise ConfigError(
            "drafts names the target's copy, but its guesses did not pay, and layers got its memory; "
            "give drafts=(), or make a separate LLM"
        )
    return replace(models, drafts=drafts, named=named, foreign=foreign, plan=plan, draft_memory=None)
