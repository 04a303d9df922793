"""The transformers library, which is optional, and the three functions that are registered with it.

transformers looks up attention, masks and experts by a name in a model's config. Under specinfer's name, the
registered functions call objects that were attached to the module. They hold no state, so one registration
per process serves all models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from specinfer.errors import ModelError, UnhostedError

IMPLEMENTATION: Final = "specinfer"  # name of the registered functions
ATTENTION: Final = "specinfer_attention"  # attribute of a module with its attention
EXPERTS: Final = "specinfer_experts"  # attribute of a module with its experts
TRYING: Final = "specinfer_trying"  # set on a config in a trial pass, whose masks must be distinguished
ANY_MASK: Final = -1  # for a pass whose masks are known
_SHORTEST: Final = 4  # minimum number of checked positions of a mask
INSTALL: Final = "pip install 'specinfer[transformers]'"


@cache
def transformers() -> Any:
    """The library with specinfer's functions registered; raises ModelError if it is missing or too old."""
    try:
        import transformers as library
        from transformers.integrations.moe import ExpertsInterface
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface
    except ImportError as error:
        raise ModelError(f"transformers cannot be loaded ({error}); {INSTALL}") from error
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
    ExpertsInterface.register(IMPLEMENTATION, _experts)
    return library


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    **named: object,
) -> tuple[Tensor, None]:
    """Called by transformers: [1, heads, T, head size] each; returns [1, T, heads, head size of values]."""
    attention = getattr(module, ATTENTION)
    return attention(module, query, key, value, attention_mask, named), None


def _experts(module: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    experts: Tensor = getattr(module, EXPERTS)(module, hidden, chosen, weights)
    return experts


def _mask(
    *given: object, mask_function: Callable[..., Tensor], local_size: int | None = None, **named: Any
) -> Tensor:
    """A mask that encodes its window; 0 for none.

    Paths determine which rows a row attends to; only the window of a mask is needed.
    """
    if not getattr(named["config"], TRYING, False):
        return torch.full((1, 1, 1, 1), ANY_MASK)
    return torch.full((1, 1, 1, 1), window_of(mask_function, local_size) or 0)


def window_of(sees: Callable[..., Tensor], size: int | None) -> int | None:
    """The sliding window of a transformers mask, which may have one of that size; None if it has none.

    Raises UnhostedError unless a token attends to all tokens before it, or to a fixed number of the last
    ones.
    """
    near = _SHORTEST if size is None else size
    zero = torch.tensor(0)
    for position in sorted({0, 1, near - 1, near, near + 1, 2 * near + _SHORTEST}):
        seen = sees(zero, zero, torch.tensor(position), torch.arange(position + 2)).expand(position + 2)
        if bool(seen[position + 1]):
            raise UnhostedError("lets a token attend to later tokens, as an encoder does")
        count = position + 1 if size is None else min(position + 1, size)
        if int(seen.sum()) != count or not bool(seen[position + 1 - count : position + 1].all()):
            raise UnhostedError("masks tokens by rules other than a sliding window, such as chunks")
    return size
