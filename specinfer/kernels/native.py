"""The library of native kernels that this process uses."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from specinfer.errors import KernelBuildError
from specinfer.kernels.build import find_library
from specinfer.kernels.levels import Level, levels_here
from specinfer.kernels.library import Library
from specinfer.kernels.machine import architecture, cpu_name
from specinfer.kernels.proof import prove
from specinfer.progress import Progress

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refused:
    """A level this CPU has, and why its library is not used."""

    level: Level
    reason: str = field(compare=False)  # put in other words when it is found again


def load_library(progress: Progress | None = None) -> Library:
    """The library of the best level this CPU has, that can be had, and that proves itself.

    A better level that is refused costs one line in the log, once a process. Raises KernelBuildError where
    none is left, ConfigError where SPECINFER_CPU names what cannot be.
    """
    library, refused = find_best(progress)
    if library is None and not refused:
        raise KernelBuildError(
            f"there are no native kernels for this CPU ({architecture()}, {cpu_name()}); "
            "they need AVX2 or NEON"
        )
    last = None if library is not None else refused[-1].reason  # raised, and so not logged as well
    for better in refused:
        if better.reason != last:
            _tell(better)
    if library is None:
        raise KernelBuildError(last)
    return library


def find_best(progress: Progress | None = None) -> tuple[Library | None, list[Refused]]:
    """The library to use, and the better levels that are refused; raises ConfigError as above."""
    refused: list[Refused] = []
    for level in levels_here():
        try:
            path = find_library(level, progress)
            fault = prove(path, level)
            if fault is None:
                library = _loaded(path, level)
                if library.ready():
                    return library, refused
                fault = "the system does not let this process use the CPU's matrix unit"
        except (KernelBuildError, OSError) as error:
            fault = str(error)
        refused.append(Refused(level, fault))
    return None, refused


@functools.cache
def _tell(refused: Refused) -> None:
    """Log it; every model that is loaded finds it again, and it is told once."""
    _LOG.warning("native kernels for %s are not used: %s", refused.level.words, refused.reason)


@functools.cache
def _loaded(path: Path, level: Level) -> Library:
    """One library a file: its threads and memory are there once, whoever asks."""
    return Library(path, level)
