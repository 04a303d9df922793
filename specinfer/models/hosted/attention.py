"""Attention of hosted models: rotated heads from the model's code, attention over specinfer's caches.

transformers, which is optional, looks up attention, masks and experts by a name in a model's config. Under
specinfer's name, the registered functions call objects that were attached to the module. They hold no state,
so one registration per process serves all models.

A pass calls attention in the same order each time, so the number of a call is its layer in the cache. A trial
pass records the calling modules and their heads; unsupported attention is rejected then.

Shapes: T rows of a step, N query heads, K key-value heads, H head size of the cache.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specinfer.attention.backend import Attend, AttentionSpec, Rotation
from specinfer.errors import ModelError, UnhostedError, ensure

IMPLEMENTATION: Final = "specinfer"  # name of the registered functions
ATTENTION: Final = "specinfer_attention"  # attribute of a module with its attention
EXPERTS: Final = "specinfer_experts"  # attribute of a module with its experts
TRYING: Final = "specinfer_trying"  # set on a config in a trial pass, whose masks must be distinguished
ANY_MASK: Final = -1  # for a pass whose masks are known
_SHORTEST: Final = 4  # minimum number of checked positions of a mask
INSTALL: Final = "pip install 'specinfer[transformers]'"
# Arguments without effect here: paths and positions contain the information, or other kernels need it.
_KNOWN: Final = frozenset(
    (
        *("dropout", "scaling", "sliding_window", "is_causal", "position_ids", "use_cache", "cache"),
        *("output_attentions", "output_hidden_states", "position_embeddings", "past_key_values"),
        *("return_dict", "layer_idx", "use_return_dict", "softcap", "s_aux"),
    )
)


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


@dataclass(frozen=True, slots=True)
class Call:
    """One call of attention in a pass."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float
    window: int | None
    softcap: float | None = None
    sinks: str | None = None  # the module's parameter with attention sinks


class AttentionTrial:
    """Attention of a trial pass: returns zeros and records the calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object,
        named: Mapping[str, Any],
    ) -> Tensor:
        """Called by transformers; raises UnhostedError for unsupported attention."""
        if key.shape[2] != query.shape[2] or key.shape[:3] != value.shape[:3]:
            raise UnhostedError("has attention to rows outside the text")
        heads, kv_heads = query.shape[1], key.shape[1]
        if heads % kv_heads or query.shape[3] != key.shape[3]:
            raise UnhostedError(
                f"has {heads} query heads of {query.shape[3]} over {kv_heads} of {key.shape[3]} in one layer"
            )
        for name, given in named.items():
            if name not in _KNOWN and given is not None and given is not False:
                raise UnhostedError(f"has attention with {name}")
        scaling, softcap = named.get("scaling"), named.get("softcap")
        self.calls.append(
            Call(
                module,
                heads,
                kv_heads,
                key_size=query.shape[3],
                value_size=value.shape[3],
                scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
                window=_window(module, mask),
                softcap=float(softcap) if softcap else None,
                sinks=_sinks(module, named.get("s_aux"), heads),
            )
        )
        return query.new_zeros(query.shape[0], query.shape[2], heads, value.shape[3])


def _window(module: nn.Module, mask: object) -> int | None:
    if mask is None and getattr(module, "is_causal", True):
        return None
    if isinstance(mask, Tensor) and mask.dtype is torch.int64 and mask.numel() == 1:
        return int(mask) or None
    raise UnhostedError("has attention with a custom mask or biases")


def _sinks(module: nn.Module, given: object, heads: int) -> str | None:
    """The parameter with logits without values, one per head; None if there are none."""
    if given is None:
        return None
    name = next((name for name, one in module.named_parameters(recurse=False) if one is given), None)
    if name is None or not isinstance(given, Tensor) or given.shape != (heads,):
        raise UnhostedError("has attention sinks that are not a parameter with one value per head")
    return name


def specs_of(calls: Sequence[Call], dtype: torch.dtype) -> tuple[AttentionSpec, ...]:
    """The attention of each call in that dtype, over a cache whose heads have the largest size.

    The parameters named in the calls must be in memory, and must stay there.
    """
    size = max(max(call.key_size, call.value_size) for call in calls)
    return tuple(
        AttentionSpec(
            layer=layer,
            num_heads=call.num_heads,
            num_kv_heads=call.num_kv_heads,
            head_dim=size,
            scale=call.scale,
            window=call.window,
            q_norm=None,
            k_norm=None,
            norm_eps=0.0,
            softcap=call.softcap,
            sinks_N=None if call.sinks is None else getattr(call.module, call.sinks).detach().to(dtype),
        )
        for layer, call in enumerate(calls)
    )


def check_calls(calls: Sequence[Call]) -> None:
    """Raise UnhostedError unless one cache can hold the keys and values of all calls."""
    counts = sorted({call.num_kv_heads for call in calls})
    if len(counts) > 1:
        raise UnhostedError(f"has layers with {' and '.join(map(str, counts))} key-value heads")


@dataclass(slots=True)
class PassAttention:
    """Attention of consecutive passes, computed by `attend`."""

    specs: Sequence[AttentionSpec]
    value_sizes: Sequence[int]
    attend: Attend | None = None
    place: int = field(default=0)  # number of the next call
    _turned: Tensor | None = field(default=None)  # cosines of the cached rotation
    _rotation: Rotation | None = field(default=None)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object,
        named: Mapping[str, object],
    ) -> Tensor:
        """Called by transformers; writes K and V of every row to this layer's cache."""
        assert self.attend is not None, "no pass is running"
        spec, value_size = self.specs[self.place], self.value_sizes[self.place]
        self.place += 1
        rows, size = query.shape[2], spec.head_dim
        parts = [_sized(x.transpose(1, 2), size) for x in (query, key, value)]
        qkv_TC = torch.cat(parts, 2).view(rows, -1)
        out_TC = self.attend(spec, qkv_TC, None)
        return out_TC.view(1, rows, spec.num_heads, size)[..., :value_size]

    def rotation_of(self, cos: Tensor, sin: Tensor) -> Rotation | None:
        """The rotation of a pass, of tensors [1, T, head size] as models have them.

        None: they turn the two halves of a head by different angles, or not the whole head.
        """
        if cos is not self._turned:
            half = self.specs[0].head_dim // 2
            same = all(
                x.dim() == 3 and x.shape[::2] == (1, 2 * half) and torch.equal(x[..., :half], x[..., half:])
                for x in (cos, sin)
            )
            parts = [x[0, :, :half].float().contiguous() for x in (cos, sin)] if same else None
            self._turned, self._rotation = cos, None if parts is None else Rotation(*parts)
        return self._rotation

    def attend_rotated(self, qkv_TC: Tensor, rotation: Rotation) -> Tensor:
        """As a call, of heads of the cache's size that are not rotated yet, [T, N head size]."""
        assert self.attend is not None, "a pass has begun"
        spec = self.specs[self.place]
        self.place += 1
        return self.attend(spec, qkv_TC, rotation)

    def begin(self, attend: Attend) -> None:
        """Start a pass with this attention."""
        self.attend, self.place = attend, 0

    def end(self) -> None:
        """End the pass; raises IntegrityError unless the number of calls equals the trial's."""
        self.attend = self._turned = self._rotation = None
        ensure(
            self.place == len(self.specs), f"attention was called {self.place} times, not {len(self.specs)}"
        )


def _sized(x_TNH: Tensor, size: int) -> Tensor:
    """Heads padded with zeros to that size, which does not change any product."""
    missing = size - x_TNH.shape[-1]
    return F.pad(x_TNH, (0, missing)) if missing else x_TNH
