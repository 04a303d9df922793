"""Library: the functions of a native kernel library (cpu/library.cpp), on addresses, shapes and numbers.

`load_library` selects the best one that this CPU can run. Before a library is used on a machine, a separate
process runs it (__main__.py), so that an illegal instruction costs a log line and the next lower level. A
level is chosen by the CPU alone, since another level has other bits: not by a time limit, by a lack of
memory, or by a folder that cannot be written. Tests and `specinfer doctor` compare results with PyTorch's
(check/kernel_faults.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import signal
import subprocess
import sys
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from specinfer.errors import KernelBuildError
from specinfer.kernels.build import find_library, kernels_folder
from specinfer.kernels.machine import Level, architecture, cpu_features, cpu_name, levels_here
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
from specinfer.progress import Progress

_CHILD: Final = "specinfer.kernels"
_TIMEOUT: Final = 60  # seconds
_CODE_FAULTS: Final = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE")  # caused by the code alone
_LOG: Final = logging.getLogger(__name__)


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


def killer(library: Path, level: Level) -> str | None:
    """The name of the signal by which this library's code ends a process; None if it does not.

    A library that ran is noted in the folder of compiled ones, and is not run again on this machine. A
    process that could not start, or ends in another way, says nothing of the library.
    """
    machine = f"{cpu_name()} {sorted(cpu_features())}".encode()
    digest = hashlib.sha256(hashlib.sha256(library.read_bytes()).digest() + machine).hexdigest()[:16]
    note: Path | None = None
    with contextlib.suppress(KernelBuildError, OSError):
        note = kernels_folder() / f"survived-{level.name}-{digest}"
        if note.exists():
            return None
    status = _status(library, level, digest)
    if status == 0 and note is not None:
        with contextlib.suppress(OSError):
            note.touch()
    name = signal.Signals(-status).name if status < 0 else ""
    return name if name in _CODE_FAULTS else None


@functools.cache
def _status(library: Path, level: Level, digest: str) -> int:
    """The exit status of a process that runs the library, once in this process's life; 1 if there is none."""
    del digest  # the library's content, and the machine
    package = str(Path(__file__).parents[2])
    known = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{known}" if known else package}
    command = [sys.executable, "-m", _CHILD, str(library), level.name]
    try:
        return subprocess.run(
            command, capture_output=True, timeout=_TIMEOUT, env=environment, check=False
        ).returncode
    except (OSError, subprocess.SubprocessError):
        return 1


@dataclass(frozen=True, slots=True)
class RefusedLevel:
    """A level of this CPU whose library is not used, and the reason."""

    level: Level
    reason: str = field(compare=False)  # worded differently when it is found again


def load_library(progress: Progress | None = None) -> Library:
    """The library of the best level of this CPU that is available and runs.

    A rejected better level logs one line per process. Raises KernelBuildError if none is left, ConfigError if
    SPECINFER_CPU names an impossible one.
    """
    library, refused = find_best(progress)
    if library is None and not refused:
        raise KernelBuildError(
            f"there are no native kernels for this CPU ({architecture()}, {cpu_name()}); "
            "they need AVX2 or NEON"
        )
    last = None if library is not None else refused[-1].reason  # raised, hence not logged
    for better in refused:
        if better.reason != last:
            _warn_once(better)
    if library is None:
        raise KernelBuildError(last)
    return library


def find_best(progress: Progress | None = None) -> tuple[Library | None, list[RefusedLevel]]:
    """The library to use, and the rejected better levels; raises ConfigError as `load_library`."""
    refused: list[RefusedLevel] = []
    for level in levels_here():
        try:
            path = find_library(level, progress)
            killed = killer(path, level)
            if killed is None:
                library = _loaded(path, level)
                if library.ready():
                    return library, refused
                reason = "the system does not let this process use the CPU's matrix unit"
            else:
                reason = f"a process that runs them ends with {killed}"
        except (KernelBuildError, OSError) as error:
            reason = str(error)
        refused.append(RefusedLevel(level, reason))
    return None, refused


@functools.cache
def _warn_once(refused: RefusedLevel) -> None:
    """Log a rejection once per process, though every loaded model finds it again."""
    _LOG.warning("native kernels for %s are not used: %s", refused.level.words, refused.reason)


@functools.cache
def _loaded(path: Path, level: Level) -> Library:
    """One library object per file, which owns its threads and memory."""
    return Library(path, level)
