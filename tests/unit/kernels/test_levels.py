"""Kinds of CPU: which libraries one can run, the best first, and what SPECINFER_CPU may ask for."""

from __future__ import annotations

import pytest

from specinfer.errors import ConfigError
from specinfer.kernels import library, machine
from specinfer.kernels.library import load_library
from specinfer.kernels.machine import VARIABLE, levels_here

V3 = "sse4_2 avx avx2 fma f16c bmi1 bmi2 movbe abm"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
ZEN5 = f"{V4} avx512_vnni avx512_bf16 avx_vnni"
AMX = "amx_tile amx_int8 amx_bf16 avx512_fp16"

CPUS = {  # architecture, features, levels
    "Nehalem": ("x86-64", "sse4_2 popcnt", []),
    "Sandy Bridge": ("x86-64", "sse4_2 popcnt avx", []),
    "Haswell": ("x86-64", V3, ["avx2"]),
    "Alder Lake": ("x86-64", f"{V3} avx_vnni", ["avxvnni", "avx2"]),
    "Skylake-X, without VNNI": ("x86-64", V4, ["avx2"]),
    "Ice Lake": ("x86-64", f"{V4} avx512_vnni", ["avx512", "avx2"]),
    "Zen 4": ("x86-64", f"{V4} avx512_vnni avx512_bf16", ["avx512bf16", "avx512", "avx2"]),
    "Zen 5": ("x86-64", ZEN5, ["avx512bf16", "avx512", "avxvnni", "avx2"]),
    "Sapphire Rapids": ("x86-64", f"{ZEN5} {AMX}", ["amx", "avx512bf16", "avx512", "avxvnni", "avx2"]),
    "half of AMX hidden by a hypervisor": (
        "x86-64",
        f"{V4} avx512_vnni avx512_bf16 amx_tile amx_int8",
        ["avx512bf16", "avx512", "avx2"],
    ),
    "AVX-512 hidden by a hypervisor": ("x86-64", f"{V3} avx512_vnni avx512_bf16 {AMX}", ["avx2"]),
    "Cortex-A72": ("aarch64", "fp asimd", ["neon"]),
    "Graviton 2": ("aarch64", "fp asimd asimddp", ["dotprod", "neon"]),
    "Graviton 3": ("aarch64", "fp asimd asimddp i8mm bf16 sve", ["i8mm", "dotprod", "neon"]),
    "Apple M1": ("aarch64", "asimd asimddp", ["dotprod", "neon"]),
    "ARM without floats": ("aarch64", "", []),
    "POWER10": ("ppc64le", "altivec", []),
}


def run_on(monkeypatch: pytest.MonkeyPatch, cpu: str, wanted: str | None) -> None:
    """Run on this CPU, with this value of SPECINFER_CPU."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if wanted is not None:
        monkeypatch.setenv(VARIABLE, wanted)
    architecture, features, _ = CPUS[cpu]
    monkeypatch.setattr(machine, "cpu_features", lambda: frozenset(features.split()))
    for module in (machine, library):
        monkeypatch.setattr(module, "architecture", lambda: architecture)
        monkeypatch.setattr(module, "cpu_name", lambda: cpu)


WANTED = [  # CPU, SPECINFER_CPU, levels
    *((cpu, "", levels) for cpu, (_, _, levels) in CPUS.items()),
    ("Sapphire Rapids", "amx", ["amx", "avx512bf16", "avx512", "avxvnni", "avx2"]),
    ("Sapphire Rapids", "avx512", ["avx512", "avxvnni", "avx2"]),
    ("Sapphire Rapids", "avx2", ["avx2"]),
    ("Graviton 3", "neon", ["neon"]),
]
REFUSED = [  # CPU, SPECINFER_CPU, message
    ("Alder Lake", "avx10", "; allowed here: avxvnni, avx2 (Alder Lake)"),
    ("Alder Lake", "AVX2", "; allowed here: avxvnni, avx2 (Alder Lake)"),
    ("Haswell", "amx", ", which this CPU lacks; allowed here: avx2 (Haswell)"),
    ("Haswell", "neon", ", which this CPU lacks; allowed here: avx2 (Haswell)"),
    ("Nehalem", "avx2", ", which this CPU lacks; allowed here: nothing (Nehalem)"),
]


def test_a_cpu_has_the_levels_it_can_run_down_from_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, wanted, found in WANTED:
        for variable in {wanted, wanted or None}:
            run_on(monkeypatch, cpu, variable)
            assert [level.name for level in levels_here()] == found, (cpu, variable)


def test_what_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, wanted, message in REFUSED:
        run_on(monkeypatch, cpu, wanted)
        for ask in (levels_here, load_library):
            with pytest.raises(ConfigError) as refused:
                ask()
            assert str(refused.value) == f"SPECINFER_CPU is {wanted!r}{message}"
