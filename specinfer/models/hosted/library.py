"""transformers, which may not be installed, and the three functions that are registered with it.

Attention, masks and experts are looked up there by a name in a model's config. Under ours a module is asked
for what was left on it: the functions themselves know nothing, so that registering them once a process is
enough for all models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from specinfer.errors import ModelError, UnhostedError

IMPLEMENTATION: Final = "specinfer"  # the name under which functions are looked up
ATTENTION: Final = "specinfer_attention"  # what a module has its attention computed by
EXPERTS: Final = "specinfer_experts"  # what a module of experts computes by
TRYING: Final = "specinfer_trying"  # set on a config whose masks are to be told apart
ANY_MASK: Final = -1  # of a pass whose masks are known already
_SHORTEST: Final = 4  # positions of masks that are looked at
INSTALL: Final = "pip install 'specinfer[transformers]'"


@cache
def transformers() -> Any:
    """The library, with our functions registered; raises ModelError where it is not there, or too old."""
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
    """As transformers calls it: [1, heads, T, head size] each; returns [1, T, heads, head size of values]."""
    attention = getattr(module, ATTENTION)
    return attention(module, query, key, value, attention_mask, named), None


def _experts(module: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    experts: Tensor = getattr(module, EXPERTS)(module, hidden, chosen, weights)
    return experts


def _mask(
    *given: object, mask_function: Callable[..., Tensor], local_size: int | None = None, **named: Any
) -> Tensor:
    """A mask that says which one it is: the window, 0 for none.

    Paths say which rows a row sees; of masks the window alone is wanted.
    """
    if not getattr(named["config"], TRYING, False):
        return torch.full((1, 1, 1, 1), ANY_MASK)
    return torch.full((1, 1, 1, 1), window_of(mask_function, local_size) or 0)


def window_of(sees: Callable[..., Tensor], size: int | None) -> int | None:
    """The sliding window of a mask of transformers, which may have one of that size; None: there is none.

    Raises UnhostedError unless a token sees all tokens before it, or the last so many.
    """
    near = _SHORTEST if size is None else size
    zero = torch.tensor(0)
    for position in sorted({0, 1, near - 1, near, near + 1, 2 * near + _SHORTEST}):
        seen = sees(zero, zero, torch.tensor(position), torch.arange(position + 2)).expand(position + 2)
        if bool(seen[position + 1]):
            raise UnhostedError("lets a token see those behind it, as an encoder does")
        count = position + 1 if size is None else min(position + 1, size)
        if int(seen.sum()) != count or not bool(seen[position + 1 - count : position + 1].all()):
            raise UnhostedError("hides tokens by other rules than a sliding window, such as chunks")
    return size
