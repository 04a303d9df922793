"""NativeAttention: attention by cpu/rope.cpp and cpu/attention.cpp, which reads slots in place.

A row's result depends only on its own path, bit for bit, and not on the other rows of the pass.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from specinfer.attention.backend import AttentionSpec, Paths, Rotation
from specinfer.attention.cached_rows import Scales
from specinfer.kernels.library import Library
from specinfer.kernels.product import FLOATS, check_rows, check_tensor
from specinfer.kernels.structures import CachesArgs, HeadsArgs, LayerCacheArgs, PathsArgs

_MAX_ELEMENTS: Final = 512  # of a head
_MAX_GROUP: Final = 96  # query heads that share a key-value head
_FAULTS: Final = (  # as cpu/paths.cpp numbers them
    "",
    "a block that the cache does not have",
    "requests whose rows do not follow one another to the last",
    "a table that is too short for its request",
    "a path that is not one of the request's positions",
)


def unsupported(head_dim: int, group: int, dtype: torch.dtype) -> str | None:
    """Return why native attention does not support heads with `group` query heads per KV head, or None."""
    if head_dim > _MAX_ELEMENTS:
        return f"heads have {head_dim} elements; it takes at most {_MAX_ELEMENTS}"
    if dtype is torch.bfloat16 and head_dim % 2:
        return f"heads have {head_dim} elements; in bfloat16 it takes an even number"
    if group > _MAX_GROUP:
        return f"{group} query heads share a key-value head; it takes at most {_MAX_GROUP}"
    return None


def heads_args(heads: AttentionSpec) -> HeadsArgs:
    """Return the library's arguments for heads; they point to memory that `heads` owns."""
    return HeadsArgs(
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        heads.scale,
        heads.norm_eps,
        heads.window or 0,
        _address(heads.q_norm),
        _address(heads.k_norm),
        heads.whole_norms,
        heads.softcap or 0.0,
        None if heads.alibi is None else heads.alibi.slopes_N.data_ptr(),
        heads.alibi is not None and heads.alibi.rounded,
        _address(heads.sinks_N),
        False,  # rows come without the gate
        heads.kv_matrices,
        heads.value_norm,
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeCache:
    """A cache with the library's arguments for it."""

    __slots__ = (*("_kept", "_scaled", "args", "checked", "dtype", "layers", "library", "shapes", "slots"),)

    def __init__(
        self, library: Library, keys: Sequence[Tensor], values: Sequence[Tensor], scales: Scales = ()
    ) -> None:
        """Hold the caches of all layers; raises ValueError if they differ in anything but their heads.

        The caches of a layer without attention are empty.
        """
        both = [tensor for tensor in (*keys, *values) if tensor.numel()] or [keys[0]]
        alike = {(len(t), t.dim(), t.dtype, t.is_contiguous(), t.device.type) for t in both}
        self.slots, self.dtype = len(both[0]), both[0].dtype
        self.shapes = [k.shape for k in keys]
        scaled = [(k.shape[:2], torch.bfloat16, True) for k in keys for _ in "kv"] if scales else []
        if (
            alike != {(self.slots, 3, self.dtype, True, "cpu")}
            or (self.dtype is not torch.int8 if scales else self.dtype not in FLOATS)
            or self.shapes != [v.shape for v in values]
            or [(s.shape, s.dtype, s.is_contiguous()) for both in scales for s in both] != scaled
        ):
            found = {(tuple(t.shape), t.dtype, t.is_contiguous(), t.device.type) for t in both}
            raise ValueError(
                "the caches must be contiguous [P, K, H] of bfloat16 or float32 on the CPU, or of int8 with "
                f"scales [P, K] of bfloat16, all alike, got {sorted(found, key=str)}"
            )
        self.library = library
        self._kept, self._scaled = (both, scales), bool(scales)
        self.checked: object = None  # the layers that were last checked against it
        rows = [(k.data_ptr(), v.data_ptr()) for k, v in zip(keys, values, strict=True)]
        factors = [(k.data_ptr(), v.data_ptr()) for k, v in scales] or [(0, 0)] * len(keys)
        layers = (LayerCacheArgs(*both, *own) for both, own in zip(rows, factors, strict=True))
        self.layers = (LayerCacheArgs * len(keys))(*layers)
        self.args = CachesArgs(self.layers, self.slots)

    def check(self, dtype: torch.dtype, heads: AttentionSpec) -> None:
        """Raise ValueError if the heads or the dtype do not fit the cache."""
        (_, kv_heads, head), cached = self.shapes[heads.layer], dtype if self._scaled else self.dtype
        if (kv_heads, head, cached) != (heads.num_kv_heads, heads.head_dim, dtype):
            raise ValueError(
                f"rows of {dtype} for {heads.num_kv_heads} heads of {heads.head_dim}; the caches have "
                f"{kv_heads} heads of {head} of {cached}"
            )
        reason = unsupported(head, heads.num_heads // kv_heads, dtype)
        if reason is not None:
            raise ValueError(reason)
        of_heads = (heads.num_heads, kv_heads) if heads.whole_norms else (1, 1)
        for weight, count in zip((heads.q_norm, heads.k_norm), of_heads, strict=True):
            if weight is not None:
                check_tensor("a head norm's weight", weight, dtype, count * head)
        if heads.sinks_N is not None:
            check_tensor("sinks", heads.sinks_N, dtype, heads.num_heads)
        if heads.alibi is not None:
            check_tensor("slopes", heads.alibi.slopes_N, torch.float32, heads.num_heads)

    def bind(self, paths: Paths) -> NativeAttend:
        """Return the attention of one pass."""
        return NativeAttend(self, paths)


class NativeAttend:
    """NativeAttention's Attend; kernels/decoder.py passes its addresses to the same code."""

    __slots__ = ("_numbers", "cache", "paths")

    def __init__(self, cache: NativeCache, paths: Paths) -> None:
        """Check the paths; raises ValueError if they leave the cache or are inconsistent."""
        numbers, requests, rows = paths.numbers, paths.num_requests, paths.num_rows
        blocks = len(numbers) - 4 * requests - 2 * rows - 1 - paths.num_tails
        if numbers.typecode != "i" or blocks < 0:
            raise ValueError("paths must be an array of int32, with as many numbers as they say")
        self.cache = cache
        self._numbers = numbers  # kept, as `paths` points to it
        at, _ = numbers.buffer_info()
        shared = at + 16 * requests
        ends = shared + 4 * rows
        tails = ends + 4 * (rows + 1)
        tables = tails + 4 * paths.num_tails
        self.paths = PathsArgs(
            *(tables, at, shared, ends, tails), *(blocks, requests, rows, paths.num_tails, paths.block_size)
        )
        fault = cache.library.fault_of_paths(ctypes.byref(self.paths), cache.slots)
        if fault:
            raise ValueError(f"{_FAULTS[fault]}: {self._described(paths)}")

    def _described(self, paths: Paths) -> str:
        """Return a description of the paths for an error."""
        blocks = paths.tables_B
        numbers = f"{blocks.min()} .. {blocks.max()}" if blocks.size else "none"
        return (
            f"{paths.num_rows} rows, requests {paths.requests_R4.tolist()} (first row, end, table, "
            f"positions), {blocks.size} blocks of {paths.block_size} numbered {numbers}, a cache of "
            f"{self.cache.slots} slots"
        )

    def __call__(self, heads: AttentionSpec, qkv_TC: Tensor, rotation: Rotation | None) -> Tensor:
        """Return the attended values, [T, N H]; writes K and V of every row to the layer's cache.

        Raises ValueError if rows, heads or RoPE do not fit the cache and the paths.
        """
        head = heads.head_dim
        code, rows = check_rows(qkv_TC, heads.width), len(qkv_TC)
        self.cache.check(qkv_TC.dtype, heads)
        if rows != self.paths.rows:
            raise ValueError(f"{rows} rows for paths of {self.paths.rows}")
        for part in () if rotation is None else (rotation.cos, rotation.sin):
            check_tensor("cos and sin", part, torch.float32, rows, head // 2)

        args, paths = ctypes.byref(heads_args(heads)), ctypes.byref(self.paths)
        rope = (None, None) if rotation is None else (rotation.cos.data_ptr(), rotation.sin.data_ptr())
        library = self.cache.library
        cache = ctypes.byref(self.cache.layers[heads.layer])
        q_TC = qkv_TC.new_empty(rows, heads.num_heads * head)
        out_TC = torch.empty_like(q_TC)
        library.rope_and_store(code, args, paths, qkv_TC.data_ptr(), *rope, cache, q_TC.data_ptr())
        library.tree_attention(code, args, paths, q_TC.data_ptr(), cache, out_TC.data_ptr())
        return out_TC


class NativeAttention:
    """AttentionBackend with native kernels, on a CPU."""

    __slots__ = ("_library",)

    def __init__(self, library: Library) -> None:
        self._library = library

    def over(self, keys: Sequence[Tensor], values: Sequence[Tensor], scales: Scales = ()) -> NativeCache:
        """Return the attention over a cache of bfloat16, float32, or int8 with scales."""
        return NativeCache(self._library, keys, values, scales)
