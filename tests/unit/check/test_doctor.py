"""Facts of the doctor: kernel levels and their checks, memory speed, and the cost of a pass."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specinfer.check import doctor
from specinfer.check.doctor import int8_cache_pays, level_facts, pass_bytes, pass_cost, tree_pass
from specinfer.config import EngineConfig
from specinfer.kernels import machine
from specinfer.kernels.disk import Bandwidth
from specinfer.kernels.layout import int8_bytes
from specinfer.kernels.library import RefusedLevel
from specinfer.kernels.machine import LEVELS, VARIABLE
from specinfer.models.open_model import open_model
from specinfer.runtime.kv_cache import bytes_per_block
from specinfer.speculation_config import Quantization
from tests.recurrent import CountingModel
from tests.streaming import Streaming
from tests.switched import PLAIN
from tests.tiny_models import write_tiny_llama

LEVEL = {level.name: level for level in LEVELS}
X86 = ["amx", "avx512bf16", "avx512", "avxvnni", "avx2"]
V3 = "avx2 fma f16c bmi1 bmi2 movbe abm "
V4 = V3 + "avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni "
ALL = V4 + "avx_vnni avx512_bf16 amx_tile amx_int8 amx_bf16 avx512_fp16"


# ---- levels ----


def pretend(monkeypatch: pytest.MonkeyPatch, architecture: str, features: str, wanted: str = "") -> None:
    """Be another machine."""
    for module in (machine, doctor):
        monkeypatch.setattr(module, "architecture", lambda: architecture)
        monkeypatch.setattr(module, "cpu_features", lambda: frozenset(features.split()))
    monkeypatch.setenv(VARIABLE, wanted)


def standings(used: str | None, refused: Sequence[str] = ()) -> dict[str, str]:
    crashed = [RefusedLevel(LEVEL[name], "it crashed") for name in refused]
    return {fact.name: fact.standing for fact in level_facts(LEVEL[used] if used else None, crashed)}


def test_what_became_of_each_level(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[str, str, str | None, list[str], str]] = [
        (ALL, "", "amx", [], "used, not needed, not needed, not needed, not needed"),
        (ALL, "", "avx512bf16", ["amx"], "refused, used, not needed, not needed, not needed"),
        (V4, "", "avx512", [], "not on this CPU, not on this CPU, used, not on this CPU, not needed"),
        (V3, "", "avx2", [], "not on this CPU, not on this CPU, not on this CPU, not on this CPU, used"),
        (ALL, "avx512", "avx512", [], "not selected, not selected, used, not needed, not needed"),
        (ALL, "", None, X86, "refused, refused, refused, refused, refused"),
        (V3, "amx", None, [], ", ".join(["not on this CPU"] * 4 + ["not selected"])),
        ("sse2", "", None, [], ", ".join(["not on this CPU"] * 5)),
    ]
    for features, wanted, used, refused, expected in cases:
        pretend(monkeypatch, "x86-64", features, wanted)
        named = dict(zip(X86, expected.split(", "), strict=True))
        assert standings(used, refused) == named, (features, wanted, used, refused)


# ---- speeds ----


HEAD = 64 * 32  # elements of the embeddings, and of the output layer
MATRICES = [(32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)]  # of the one layer
NORMS = 3 * 32
KV = 7 * 2 * 2 * 8 * 4  # of 7 tokens, in float32


def test_the_output_layer_is_read_once_and_the_embeddings_are_not(tmp_path: Path) -> None:
    expected: dict[Quantization, int] = {
        "none": KV + 4 * (NORMS + HEAD + sum(out * inner for out, inner in MATRICES)),
        "int8": KV + 4 * NORMS + int8_bytes(64, 32) + sum(int8_bytes(*shape) for shape in MATRICES),
    }
    for tied, library in product((True, False), (object(), None)):
        folder = write_tiny_llama(tmp_path / f"{tied}", num_layers=1, tie_embeddings=tied)
        kernels = SimpleNamespace(library=library, kv_dtype=lambda dtype: dtype)
        model: Any = SimpleNamespace(config=open_model(folder).config, dtype=torch.float32, kernels=kernels)
        for kind, size in expected.items():
            assert pass_bytes(folder, model, kind, 7) == size, (tied, library, kind)


def test_a_tree_runs_again_and_again_behind_a_text_with_a_state() -> None:
    model = CountingModel()
    for nodes in (1, 5, 70):
        call, rows = tree_pass(model, 20, nodes), model.rows
        assert call().tolist() == call().tolist()
        assert model.rows == rows + 2 * nodes


def test_when_an_int8_cache_would_pay() -> None:
    config = replace(PLAIN, max_context=1000, layer_windows=(None,) * PLAIN.num_layers)
    model: Any = SimpleNamespace(config=config, dtype=torch.float32)
    exact, rounded = (bytes_per_block([(PLAIN, kind)], 1) for kind in (torch.float32, torch.int8))
    for tokens, free, said in (
        (900, 10_000 * exact, ["for texts of 900 tokens or more"]),
        (1001, 10_000 * exact, []),
        (1001, 1_500 * exact, ["for texts of more than 750 tokens, which do not fit into half"]),
    ):
        read = 10 * tokens * (exact - rounded) - tokens * exact  # a tenth is saved at `tokens`
        found = [*int8_cache_pays(model, read, free)]
        assert [line.removesuffix(" of the free memory") for line in found] == said, tokens


def test_a_pass_is_timed_behind_the_text_a_model_can_have(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m", tokenizer=True, max_context=100)
    config = EngineConfig.from_options(str(folder), {"device": "cpu", "dtype": "float32"})
    alone = pass_cost(config, None)
    assert (alone.text, alone.quantization, alone.dtype, alone.times_floor) == (99, "none", "float32", None)
    assert alone.milliseconds > 0
    library: Any = Streaming(*[1e9] * (doctor.PASSES + 1))
    held = pass_cost(config, Bandwidth(library, size=64))
    assert held.times_floor == pytest.approx(1e-3 * held.milliseconds / (held.bytes / 1e9))
    json.dumps(asdict(held))
