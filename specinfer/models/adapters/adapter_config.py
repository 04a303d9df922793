"""adapter_config.json of a PEFT folder: adapted matrices, ranks and scales.

An unsupported setting that would change results is rejected by its key; none is ignored silently.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from specinfer.errors import ModelError, shown
from specinfer.models.fields import Fields, boolean, count, mapping, number

# Keys that do not affect results.
_IGNORED: Final = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
        *("runtime_config", "task_type", "lora_dropout", "megatron_core", "qalora_group_size"),
        *("fan_in_fan_out", "parent_library"),  # for merged weights: tensors have the same layout
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # initialization for training
        *("layers_pattern", "ensure_weight_tying"),
    }
)
_READ: Final = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias"),
        *("target_modules", "exclude_modules", "layers_to_transform", "init_lora_weights"),
    }
)
# Initializations that change the model's own weights, which the folder does not contain.
_CHANGES_MODEL: Final = ("pissa", "olora", "loftq", "corda", "lora_ga")
ALL_LINEAR: Final = "all-linear"


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The config of an adapter; modules have the names of the model's original library."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]  # for modules matching these patterns; the first match counts
    alphas: Mapping[str, float]
    by_root: bool  # scale is alpha / sqrt(rank)
    targets: str | Collection[str]  # a pattern or "all-linear", or ends of names
    excluded: str | Collection[str]
    layers: Collection[int] | None  # None: all

    def rank_of(self, module: str) -> int:
        """The rank of a module's adapter."""
        return self.ranks.get(_matching(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of B (A x)."""
        rank, alpha = self.rank_of(module), self.alphas.get(_matching(self.alphas, module), self.alpha)
        return alpha / math.sqrt(rank) if self.by_root else alpha / rank

    def adapts(self, module: str, layer: int) -> bool:
        """True if a linear module of the model has an adapter."""
        if self.layers is not None and layer not in self.layers:
            return False
        wanted = self.targets == ALL_LINEAR or _named(self.targets, module)
        return wanted and not _named(self.excluded, module)


def adapter_config(c: Fields) -> AdapterConfig:
    """Parse an adapter_config.json; raises ModelError for anything unsupported."""
    if c.get("peft_type") != "LORA":
        raise ModelError(f"peft_type is {shown(c.get('peft_type'))}; supported: LORA")
    for key, value in c.items():
        if key not in _IGNORED | _READ and value not in (None, False, "", [], {}):
            raise ModelError(
                f"it sets {key[:60]} = {shown(value)}, which is not supported; merge it into the model"
            )
    if c.get("bias", "none") != "none":
        raise ModelError(f"bias is {shown(c['bias'])}; supported: none")
    begins = c.get("init_lora_weights")
    if isinstance(begins, str) and begins.lower().startswith(_CHANGES_MODEL):
        raise ModelError(
            f"init_lora_weights is {shown(begins)}, which changes the model's own weights; save it as a "
            "plain adapter (path_initial_model_for_weight_conversion), or merge it into the model"
        )
    return AdapterConfig(
        rank=count(c, "r"),
        alpha=number(c, "lora_alpha"),
        ranks={pattern: count(named, pattern) for pattern, named in _patterns(c, "rank_pattern")},
        alphas={pattern: number(named, pattern) for pattern, named in _patterns(c, "alpha_pattern")},
        by_root=boolean(c, "use_rslora", False),
        targets=_modules(c, "target_modules"),
        excluded=() if not c.get("exclude_modules") else _modules(c, "exclude_modules"),
        layers=_layers(c),
    )


def _patterns(c: Fields, key: str) -> list[tuple[str, Fields]]:
    if not c.get(key):
        return []
    named = mapping(c, key)
    for pattern in named:
        _check_pattern(key, pattern)
    return [(pattern, named) for pattern in named]


def _modules(c: Fields, key: str) -> str | tuple[str, ...]:
    value = c.get(key)
    if isinstance(value, str) and value:
        _check_pattern(key, value)
        return value
    if isinstance(value, list) and value and all(isinstance(one, str) and one for one in value):
        return tuple(value)
    raise ModelError(f"{key} is {shown(value)}; expected names of modules, or a pattern")


def _check_pattern(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError) as error:
        raise ModelError(f"{key} has {shown(pattern)}, which is not a pattern: {error}") from None


def _layers(c: Fields) -> frozenset[int] | None:
    value: Any = c.get("layers_to_transform")
    if value is None:
        return None
    layers = value if isinstance(value, list) else [value]
    if not layers or not all(type(layer) is int and layer >= 0 for layer in layers):
        raise ModelError(f"layers_to_transform is {shown(value)}; expected a number of a layer, or a list")
    return frozenset(layers)


def _matching(patterns: Mapping[str, object], module: str) -> str:
    """The first pattern that matches a module's name, or its end after a dot; else an empty string."""
    return next((one for one in patterns if re.fullmatch(rf"(?:.*\.)?(?:{one})", module)), "")


def _named(modules: str | Collection[str], module: str) -> bool:
    """True if a pattern matches the whole name of a module, or one of the names is its end."""
    if isinstance(modules, str):
        return re.fullmatch(modules, module) is not None
    return any(module == one or module.endswith(f".{one}") for one in modules)
