"""Library: the functions of a native kernel library (cpu/library.cpp), on addresses, shapes and numbers."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from specinfer.errors import KernelBuildError
from specinfer.kernels.machine import Level
from specinfer.kernels.structures import (
    AdaptedRowsArgs,
    BlockHeadArgs,
    BlockStepArgs,
    CachesArgs,
    DecoderArgs,
    DecoderRowsArgs,
    FileRowsArgs,
    GrownArgs,
    GuesserArgs,
    HeadsArgs,
    LookupRules,
    NormArgs,
    PathsArgs,
    ProductArgs,
    TapsArgs,
)


class Library:
    """A loaded library; callers pass addresses of valid memory of sufficient size."""

    def __init__(self, path: Path, level: Level) -> None:
        """Raises KernelBuildError if it cannot be loaded."""
        self.path = path
        self.level = level
        try:
            library: Any = ctypes.CDLL(str(path))
            self.ready = _function(library.specinfer_ready, c_int32)
            self.int4_is_exact = _function(library.specinfer_int4_is_exact, c_int32)
        except (OSError, AttributeError) as error:
            raise KernelBuildError(
                f"{path} cannot be loaded ({error}); delete it, or set SPECINFER_CACHE to a folder from "
                "which libraries may be loaded"
            ) from error
        address, count, flag, product = c_void_p, c_int64, c_int32, POINTER(ProductArgs)
        self.set_threads = _function(library.specinfer_set_threads, None, c_int32)
        self.threads = _function(library.specinfer_threads, c_int32)
        self.want_huge_pages = _function(library.specinfer_want_huge_pages, None, address, count)
        self.lay_out_rows = _function(
            library.specinfer_lay_out_rows, flag, POINTER(FileRowsArgs), count, product
        )
        self.to_elements = _function(library.specinfer_to_elements, None, flag, address, count, flag, address)
        self.multiply = _function(library.specinfer_multiply, None, product, flag, address, count, address)
        self.multiply_adapted = _function(
            *(library.specinfer_multiply_adapted, None, product, flag, address, count),
            *(POINTER(AdaptedRowsArgs), count, address),
        )
        self.find_maxima = _function(
            library.specinfer_find_maxima, None, product, flag, address, count, address
        )
        self.add_up = _function(
            library.specinfer_add_up, None, product, flag, address, count, address, address
        )
        self.finish = _function(
            library.specinfer_finish, None, product, flag, address, count, address, address
        )
        self.add_branches = _function(
            library.specinfer_add_branches, None, product, flag, address, count, address
        )
        self.finish_branches = _function(
            library.specinfer_finish_branches, None, product, flag, address, count, address
        )
        self.add_norm = _function(
            *(library.specinfer_add_norm, None, flag, address, address, POINTER(NormArgs)),
            *(address, address, count, count, flag),
        )
        self.gate = _function(library.specinfer_gate, None, flag, flag, address, address, count, count)
        self.choose_experts = _function(
            *(library.specinfer_choose_experts, None, address, count, count, count, count),
            *(flag, address, address),
        )
        self.open_gates = _function(library.specinfer_open_gates, None, address, count, count, address)
        self.add_weighted = _function(
            library.specinfer_add_weighted, None, flag, *[address] * 4, count, count
        )
        self.activate = _function(
            library.specinfer_activate, None, flag, flag, address, address, count, count
        )
        self.embed = _function(
            *(library.specinfer_embed, c_int32, flag, address, count, address, c_float),
            *(address, count, count),
        )
        heads, paths = POINTER(HeadsArgs), POINTER(PathsArgs)
        self.rope_and_store = _function(
            library.specinfer_rope_and_store, None, flag, heads, paths, *[address] * 6
        )
        self.tree_attention = _function(
            library.specinfer_tree_attention, None, flag, heads, paths, *[address] * 4
        )
        self.fault_of_paths = _function(library.specinfer_fault_of_paths, c_int32, paths, count)
        self.decode = _function(
            *(library.specinfer_decode, c_int32, POINTER(DecoderArgs), POINTER(DecoderRowsArgs), paths),
            *(address, address, POINTER(TapsArgs), address, address),
        )
        self.most_likely = _function(library.specinfer_most_likely, c_int64, address, count, count, address)
        self.mass = _function(library.specinfer_mass, c_double, address, count, c_double, c_double)
        self.racers = _function(
            *(library.specinfer_racers, c_int64, address, count, address, count),
            *(c_double, c_uint64, address),
        )
        block = (flag, address, count, count, count)
        self.likeliest = _function(
            *(library.specinfer_likeliest, c_int32, *block, address, count, count, address),
            *[address] * 4,
        )
        self.choices = _function(
            library.specinfer_choices, c_int64, *block, address, count, address, *[address] * 4
        )
        block_head, caches = POINTER(BlockHeadArgs), POINTER(CachesArgs)
        self.step_blocks = _function(
            *(library.specinfer_step_blocks, c_int32, block_head, POINTER(BlockStepArgs), caches),
            *[address] * 3,
        )
        self.grow_trees = _function(
            *(library.specinfer_grow_trees, c_int32, POINTER(GuesserArgs), *block[:4], c_char_p),
            *(count, POINTER(GrownArgs)),
        )
        self.index_new = _function(library.specinfer_index_new, c_void_p, address, count, count, address)
        self.index_free = _function(library.specinfer_index_free, None, address)
        self.index_extend = _function(library.specinfer_index_extend, flag, address, address, count)
        self.index_close = _function(library.specinfer_index_close, flag, address)
        self.index_drop_oldest = _function(library.specinfer_index_drop_oldest, count, address)
        self.index_figures = _function(library.specinfer_index_figures, None, address, address)
        self.index_sound = _function(library.specinfer_index_sound, flag, address)
        self.index_bytes_with = _function(library.specinfer_index_bytes_with, count, address, count)
        self.index_tokens = _function(library.specinfer_index_tokens, count, address, count, count, address)
        self.index_places = _function(
            library.specinfer_index_places, *(count, address, address, count, count, count, address)
        )
        asks = POINTER(LookupRules), address, count, address, count, POINTER(GrownArgs)
        self.lookup_trees = _function(library.specinfer_lookup_trees, flag, *asks)
        self.exchange_bytes = _function(library.specinfer_exchange_bytes, count, flag, count)
        self.exchange_new = _function(library.specinfer_exchange_new, c_void_p, address, flag, flag, count)
        self.exchange_free = _function(library.specinfer_exchange_free, None, address)
        self.exchange_set_limit = _function(library.specinfer_exchange_set_limit, None, address, c_double)
        self.exchange_largest = _function(library.specinfer_exchange_largest, flag, address, address, count)
        self.exchange_add = _function(library.specinfer_exchange_add, flag, address, address, count)
        self.exchange_gather = _function(library.specinfer_exchange_gather, flag, *[address] * 4)
        self.exchange_loss = _function(library.specinfer_exchange_loss, flag, address, address)
        self.exchange_figures = _function(library.specinfer_exchange_figures, None, address, address)
        self.stream = _function(library.specinfer_stream, c_double, address, count)
        self.profile = _function(library.specinfer_profile, None, flag, address)


def _function(function: Any, returns: Any, *takes: Any) -> Any:
    function.restype = returns
    function.argtypes = takes
    return function
