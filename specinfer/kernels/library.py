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
from typing import TYPE_CHECKING, Any, Final

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
    LayerCacheArgs,
    LookupRules,
    NormArgs,
    PathsArgs,
    ProductArgs,
    RecurrenceArgs,
    ScoresArgs,
    StatesArgs,
    StreamsArgs,
    TapsArgs,
)
from specinfer.progress import Progress

_CHILD: Final = "specinfer.kernels"
_TIMEOUT: Final = 60  # seconds
_CODE_FAULTS: Final = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE")  # caused by the code alone
_LOG: Final = logging.getLogger(__name__)

# The result of each function, which is specinfer_NAME in the library, and its arguments.
_ADDRESS, _COUNT, _FLAG = c_void_p, c_int64, c_int32
_PRODUCT, _HEADS, _PATHS = POINTER(ProductArgs), POINTER(HeadsArgs), POINTER(PathsArgs)
_RECUR: Final = (None, POINTER(RecurrenceArgs), _FLAG, _ADDRESS, _ADDRESS, POINTER(StatesArgs), _COUNT)
_LOGITS: Final = (_FLAG, _ADDRESS, _COUNT, _COUNT, _COUNT)
_FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "ready": (_FLAG,),
    "int4_is_exact": (_FLAG,),
    "set_threads": (None, _FLAG),
    "threads": (_FLAG,),
    "want_huge_pages": (None, _ADDRESS, _COUNT),
    "lay_out_rows": (_FLAG, POINTER(FileRowsArgs), _COUNT, _PRODUCT),
    "to_elements": (None, _FLAG, _ADDRESS, _COUNT, _FLAG, _ADDRESS),
    "multiply": (None, _PRODUCT, _FLAG, _ADDRESS, _COUNT, _ADDRESS),
    "multiply_adapted": (None, _PRODUCT, _FLAG, _ADDRESS, _COUNT, POINTER(AdaptedRowsArgs), _COUNT, _ADDRESS),
    "find_maxima": (None, _PRODUCT, _FLAG, _ADDRESS, _COUNT, _ADDRESS),
    "add_up": (None, _PRODUCT, _FLAG, _ADDRESS, _COUNT, _ADDRESS, _ADDRESS),
    "finish": (None, _PRODUCT, _FLAG, _ADDRESS, _COUNT, _ADDRESS, _ADDRESS),
    "add_branches": (None, _PRODUCT, _FLAG, _ADDRESS, _COUNT, _ADDRESS),
    "finish_branches": (None, _PRODUCT, _FLAG, _ADDRESS, _COUNT, _ADDRESS),
    "add_norm": (
        *(None, _FLAG, _ADDRESS, _ADDRESS, POINTER(NormArgs)),
        *(_ADDRESS, _ADDRESS, _COUNT, _COUNT, _FLAG),
    ),
    "gate": (None, _FLAG, _FLAG, _ADDRESS, _ADDRESS, _COUNT, _COUNT),
    "predict_streams": (None, _FLAG, POINTER(StreamsArgs), *[_ADDRESS] * 5, _COUNT),
    "correct_streams": (None, _FLAG, POINTER(StreamsArgs), *[_ADDRESS] * 5, _COUNT),
    "cut_off": (None, _FLAG, _ADDRESS, _COUNT, c_float, _COUNT, _COUNT),
    "choose_experts": (
        *(None, _ADDRESS, _COUNT, _COUNT, _COUNT, _COUNT, _FLAG, POINTER(ScoresArgs)),
        *(_ADDRESS, _ADDRESS),
    ),
    "open_gates": (None, _ADDRESS, _COUNT, _COUNT, _ADDRESS),
    "add_weighted": (None, _FLAG, *[_ADDRESS] * 4, _COUNT, _COUNT),
    "activate": (None, _FLAG, _FLAG, _ADDRESS, _ADDRESS, _COUNT, _COUNT),
    "embed": (_FLAG, _FLAG, _ADDRESS, _COUNT, _ADDRESS, c_float, _ADDRESS, _COUNT, _COUNT),
    "rope_and_store": (None, _FLAG, _HEADS, _PATHS, *[_ADDRESS] * 3, POINTER(LayerCacheArgs), _ADDRESS),
    "tree_attention": (None, _FLAG, _HEADS, _PATHS, _ADDRESS, POINTER(LayerCacheArgs), _ADDRESS),
    "fault_of_paths": (_FLAG, _PATHS, _COUNT),
    "fault_of_states": (_FLAG, POINTER(StatesArgs), _COUNT),
    "recur": (*_RECUR, _ADDRESS),
    "recur_alone": (*_RECUR, _ADDRESS, _ADDRESS, _ADDRESS),
    "norm_values": (None, POINTER(RecurrenceArgs), _FLAG, *[_ADDRESS] * 3, _COUNT, _ADDRESS),
    "open_values": (None, _FLAG, _ADDRESS, _COUNT, _ADDRESS, _COUNT, _COUNT),
    "decode": (
        *(_FLAG, POINTER(DecoderArgs), POINTER(DecoderRowsArgs), _PATHS, POINTER(LayerCacheArgs)),
        *(POINTER(TapsArgs), _ADDRESS, _ADDRESS),
    ),
    "most_likely": (_COUNT, _ADDRESS, _COUNT, _COUNT, _ADDRESS),
    "mass": (c_double, _ADDRESS, _COUNT, c_double, c_double),
    "racers": (_COUNT, _ADDRESS, _COUNT, _ADDRESS, _COUNT, c_double, c_uint64, _ADDRESS),
    "likeliest": (_FLAG, *_LOGITS, _ADDRESS, _COUNT, _COUNT, _ADDRESS, *[_ADDRESS] * 4),
    "choices": (_COUNT, *_LOGITS, _ADDRESS, _COUNT, _ADDRESS, *[_ADDRESS] * 4),
    "step_blocks": (
        *(_FLAG, POINTER(BlockHeadArgs), POINTER(BlockStepArgs), POINTER(CachesArgs)),
        *[_ADDRESS] * 3,
    ),
    "grow_trees": (_FLAG, POINTER(GuesserArgs), *_LOGITS[:4], c_char_p, _COUNT, POINTER(GrownArgs)),
    "index_new": (_ADDRESS, _ADDRESS, _COUNT, _COUNT, _ADDRESS),
    "index_free": (None, _ADDRESS),
    "index_extend": (_FLAG, _ADDRESS, _ADDRESS, _COUNT),
    "index_close": (_FLAG, _ADDRESS),
    "index_drop_oldest": (_COUNT, _ADDRESS),
    "index_figures": (None, _ADDRESS, _ADDRESS),
    "index_bytes_with": (_COUNT, _ADDRESS, _COUNT),
    "index_tokens": (_COUNT, _ADDRESS, _COUNT, _COUNT, _ADDRESS),
    "lookup_trees": (_FLAG, POINTER(LookupRules), _ADDRESS, _COUNT, _ADDRESS, _COUNT, POINTER(GrownArgs)),
    "exchange_bytes": (_COUNT, _FLAG, _COUNT),
    "exchange_new": (_ADDRESS, _ADDRESS, _FLAG, _FLAG, _COUNT),
    "exchange_free": (None, _ADDRESS),
    "exchange_set_limit": (None, _ADDRESS, c_double),
    "exchange_largest": (_FLAG, _ADDRESS, _ADDRESS, _COUNT),
    "exchange_add": (_FLAG, _ADDRESS, _ADDRESS, _COUNT),
    "exchange_gather": (_FLAG, *[_ADDRESS] * 4),
    "exchange_loss": (_FLAG, _ADDRESS, _ADDRESS),
    "exchange_figures": (None, _ADDRESS, _ADDRESS),
    "stream": (c_double, _ADDRESS, _COUNT),
    "profile": (None, _FLAG, _ADDRESS),
}


class Library:
    """A loaded library, with its functions; callers pass addresses of valid memory of sufficient size."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, path: Path, level: Level) -> None:
        """Raises KernelBuildError if it cannot be loaded."""
        self.path = path
        self.level = level
        try:
            library = ctypes.CDLL(str(path))
            for name, (returns, *takes) in _FUNCTIONS.items():
                function = getattr(library, f"specinfer_{name}")
                function.restype, function.argtypes = returns, takes
                setattr(self, name, function)
        except (OSError, AttributeError) as error:
            raise KernelBuildError(
                f"{path} cannot be loaded ({error}); delete it, or set SPECINFER_CACHE to a folder from "
                "which libraries may be loaded"
            ) from error


@functools.cache  # a library that was loaded stays
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
    try:
        command = [sys.executable, "-m", _CHILD, str(library), level.name]
        package = str(Path(__file__).parents[2])  # which a program may have found by its own sys.path
        paths = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        status = subprocess.run(
            command,
            check=False,
            capture_output=True,
            timeout=_TIMEOUT,
            env={**os.environ, "PYTHONPATH": paths},
        ).returncode
    except (OSError, subprocess.SubprocessError):
        return None
    if status == 0 and note is not None:
        with contextlib.suppress(OSError):
            note.touch()
    name = signal.Signals(-status).name if status < 0 else ""
    return name if name in _CODE_FAULTS else None


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
