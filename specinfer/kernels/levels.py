"""The kinds of CPU that the native kernels are compiled for: one library each, the best one is loaded.

Sources are the same, and say with the compiler's own macros what a kind of CPU has. int8 products have the
same bits at every level, int4 ones at all but AMX. At each of them a row's result depends on the row alone,
but for loose products (quantized.py). AMX wants float16 arithmetic as well, which every CPU with AMX has
unless a hypervisor hides it, and an assembler that knows it (binutils 2.38).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from specinfer.errors import ConfigError
from specinfer.kernels.machine import architecture, cpu_features, cpu_name

VARIABLE: Final = "SPECINFER_CPU"


@dataclass(frozen=True, slots=True)
class Level:
    """A kind of CPU."""

    name: str
    architecture: str
    needs: frozenset[str]  # of what /proc/cpuinfo names
    flags: tuple[str, ...]  # of the compiler
    words: str  # what it multiplies with, for people


def _levels(architecture: str, *steps: tuple[str, str, str, str]) -> tuple[Level, ...]:
    """Levels of which each has what those before it have: name, needs, flags and words of each."""
    levels: list[Level] = []
    needs: frozenset[str] = frozenset()
    for name, more, flags, words in steps:
        needs |= frozenset(more.split())
        levels.append(Level(name, architecture, needs, tuple(flags.split()), words))
    return tuple(levels)


_V3: Final = "-march=x86-64-v3"
_V4: Final = "-march=x86-64-v4 -mavx512vnni"
_AMX: Final = "-mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16 -DSPECINFER_TILES"

# From the least to the best.
LEVELS: Final = (
    *_levels(
        "x86-64",
        ("avx2", "avx2 fma f16c bmi1 bmi2 movbe abm", _V3, "AVX2"),
        ("avxvnni", "avx_vnni", f"{_V3} -mavxvnni", "AVX2 with VNNI"),
    ),
    *_levels(
        "x86-64",
        (
            "avx512",
            "avx2 fma f16c bmi1 bmi2 movbe abm avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni",
            _V4,
            "AVX-512 with VNNI",
        ),
        ("avx512bf16", "avx512_bf16", f"{_V4} -mavx512bf16", "AVX-512 with VNNI and bfloat16"),
        ("amx", "amx_tile amx_int8 amx_bf16 avx512_fp16", f"{_V4} {_AMX}", "AMX tiles"),
    ),
    *_levels(
        "aarch64",
        ("neon", "asimd", "-march=armv8-a", "NEON"),
        ("dotprod", "asimddp", "-march=armv8.2-a+dotprod", "NEON with dot products"),
        ("i8mm", "i8mm bf16", "-march=armv8.2-a+dotprod+i8mm+bf16", "NEON with dot products and bfloat16"),
    ),
)


def levels_here() -> tuple[Level, ...]:
    """The levels this CPU has, the best first; SPECINFER_CPU names the best one wanted.

    Raises ConfigError where that is not the name of a level, or of one this CPU lacks.
    """
    here, has = architecture(), cpu_features()
    found = tuple(level for level in reversed(LEVELS) if level.architecture == here and level.needs <= has)
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return found
    names = [level.name for level in found]
    if wanted not in names:
        known = wanted in [level.name for level in LEVELS]
        raise ConfigError(
            f"{VARIABLE} is {wanted!r}{', which this CPU lacks' if known else ''}; allowed here: "
            f"{', '.join(names) or 'nothing'} ({cpu_name()})"
        )
    return found[names.index(wanted) :]
