"""Which kernels run where, and what is said when the native ones cannot be had."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import torch

from specinfer.errors import ConfigError, KernelBuildError
from specinfer.kernels import build, choice, library, machine
from specinfer.kernels.attention import NativeAttention
from specinfer.kernels.build import find_library
from specinfer.kernels.choice import TORCH, choose_kernels, streaming_kernels
from specinfer.kernels.library import Library, load_library
from specinfer.kernels.machine import VARIABLE, Level, levels_here
from specinfer.kernels.native_ops import NativeOps
from specinfer.kernels.quantized import NativeProducts
from specinfer.kernels.sampling import NativeScan
from tests.kernels import kernels
from tests.unit.kernels.test_recurrence import check_same_bits

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No compiler, no wheel's libraries, nothing in the cache."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_PACKAGED", tmp_path / "lib")


def test_native_kernels_run_on_a_cpu() -> None:
    native = kernels("native")
    chosen, lacking = choose_kernels("auto", CPU)
    assert lacking is None
    for found in (native, chosen):
        assert isinstance(found.ops, NativeOps)
        assert isinstance(found.attention, NativeAttention)
        assert isinstance(found.scan, NativeScan)
        assert isinstance(found.products, NativeProducts)
    assert chosen.library is native.library, "one library, with one pool of threads, for all engines"


@pytest.mark.usefixtures("no_libraries")
def test_without_a_compiler_the_twins_run_and_the_reason_is_told(caplog: pytest.LogCaptureFixture) -> None:
    if not levels_here():
        pytest.skip("this CPU has no native kernels")
    with caplog.at_level(logging.WARNING):
        chosen, lacking = choose_kernels("auto", CPU)
    assert chosen == TORCH
    assert lacking == (
        "no C++ compiler: no-such-compiler not found; install one, or set CXX (a program with options), "
        "or install a wheel that contains the kernels"
    )
    assert not caplog.messages, "and no message for each level"
    with pytest.raises(KernelBuildError, match=r"no C\+\+ compiler: no-such-compiler not found"):
        choose_kernels("native", CPU)


@pytest.mark.usefixtures("no_libraries")
def test_nothing_is_built_where_it_is_not_wanted(tmp_path: Path) -> None:
    assert choose_kernels("torch", CPU) == (TORCH, None)
    assert choose_kernels("auto", CUDA) == (TORCH, None)
    with pytest.raises(ConfigError, match="kernels is 'native' on device cuda; allowed there: auto, torch"):
        choose_kernels("native", CUDA)
    assert not list(tmp_path.iterdir())


def test_a_cpu_that_cannot_be_is_refused_whatever_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "avx10")
    for wanted in ("auto", "native"):
        with pytest.raises(ConfigError, match="SPECINFER_CPU is 'avx10'; allowed here: "):
            choose_kernels(wanted, CPU)
    assert choose_kernels("torch", CPU) == (TORCH, None)


def test_only_amds_cpus_read_large_weights_past_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    for vendor, weights, past in (
        *(("AuthenticAMD", 2, True), ("AuthenticAMD", 1, False)),
        *(("GenuineIntel", 2, False), (None, 2, False)),
    ):
        monkeypatch.setattr(choice, "cache_bytes", lambda: 1)
        monkeypatch.setattr(choice, "cpu_info", {"vendor_id": vendor}.get)
        chosen = streaming_kernels(kernels("native"), weights)
        assert chosen.products.use.nontemporal is past, (vendor, weights)


# Kinds of CPU: which libraries one can run, the best first, and what SPECINFER_CPU may ask for.


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


# The kernels' tests again, with the libraries of every lesser kind of CPU than this one.
#
# A level is the same C++ with other flags. Levels differ in the width of a register (vector.h, and so the
# rows and channels of a loop), and in the rounding of products (the products, attention_blocks.h, powers in
# attention.cpp). So tests of products and ops, which consist of such loops, run with all shapes of the best
# level, and others with a part of their cases. They run in a process that has the level's library alone. If
# registers are as wide as at the next lesser level, only tests of products and layers run.


UNIT: Final = Path(__file__).parents[1]
PRODUCTS: Final = {f"kernels/test_{name}.py": "test" for name in ("products", "layout", "parts")}
LAYERS: Final = {
    "models/test_switches.py": "one_call or order or (company and native) or (chunks and int4)",
}
LOGITS: Final = "17 or 41 or 1025 or likeliest or race or rounded"
FILES: Final = {  # and which of their tests
    **PRODUCTS,
    **LAYERS,
    **dict.fromkeys(("kernels/test_ops.py", "kernels/test_recurrence.py"), "test"),
    **dict.fromkeys(("kernels/test_scans.py", "kernels/test_changed_rows.py"), LOGITS),
    **dict.fromkeys(("attention/test_backends.py", "attention/test_independence.py"), "native"),
    "runtime/test_row_independence.py": "native",
}
ONLY: Final = {"avxvnni": PRODUCTS | LAYERS}
LESSER: Final = levels_here()[1:]


def test_every_file_that_runs_again_exists() -> None:
    """On a CPU without a lesser level only this finds a file that is gone."""
    assert all((UNIT / file).is_file() for file in FILES)


@pytest.mark.slow  # a library is compiled
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("level", [level.name for level in LESSER])
def test_tests_of_kernels_on_a_lesser_cpu(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, level)
    assert load_library().level.name == level, "a level that cannot be had would test nothing"
    files = ONLY.get(level, FILES)
    chosen = " or ".join(f"({Path(file).name} and ({tests}))" for file, tests in files.items())
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", "-k", chosen]
    command += [str(UNIT / file) for file in files]
    done = subprocess.run(command, cwd=UNIT.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("level", LESSER, ids=lambda level: level.name)
def test_recurrences_have_the_bits_of_the_best_cpu(level: Level) -> None:
    one, other = (NativeOps(Library(find_library(own), own)) for own in (level, levels_here()[0]))
    check_same_bits(one, other)
