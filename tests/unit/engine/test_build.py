"""Starts and ends of engines: measurements, checks, choices, interrupts and memory."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from specinfer.attention.sdpa import SdpaAttention
from specinfer.config import EngineConfig
from specinfer.engine.build import build_engine, resolved
from specinfer.engine.models import load_models, variant_models
from specinfer.errors import ConfigError, KernelBuildError
from specinfer.hub import gguf_header
from specinfer.progress import NoProgress
from specinfer.runtime.cost_curve import CostCurve
from specinfer.speculate import table
from specinfer.tokenizer import gguf_vocabulary
from tests.engines import ENGINE, write_tiny
from tests.kernels import kernels, library_or_skip
from tests.spies import spied
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_models import write_pair, write_tiny_llama
from tests.unit.engine.offloading import noted_needs


def config(model: Path, **options: Any) -> EngineConfig:
    return EngineConfig.from_options(str(model), {**ENGINE, "kernels": "torch", **options})


def test_heads_of_other_sizes_run_in_pytorch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    native, shape = kernels("native"), {"hidden_size": 520, "num_heads": 1, "num_kv_heads": 1}
    large = write_tiny_llama(tmp_path / "large", num_layers=1, tokenizer=True, **shape)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        models = load_models(config(large, kernels="auto"))
    assert isinstance(models.target.kernels.attention, SdpaAttention)
    assert type(models.target.kernels.ops) is type(native.ops), "only attention is another"
    [record] = caplog.records
    assert record.getMessage() == (
        f"native attention is not used for {large}, PyTorch runs instead: heads have 520 elements; it takes "
        "at most 512"
    )


def test_a_self_draft_needs_its_memory_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted, target = noted_needs(monkeypatch), str(folder / "target")
    load_models(config(folder / "target", drafts=(target,)))
    load_models(config(folder / "target", drafts=(target,) * 2))
    assert [len(needs.draft_weights) for needs in noted] == [1, 2]
    assert len({size for needs in noted for size in (needs.weights, *needs.draft_weights.values())}) == 1


def test_a_gguf_file_is_parsed_once_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = spied(monkeypatch, gguf_header, "_parse", lambda path, *_: path.name)
    built = spied(monkeypatch, gguf_vocabulary, "read_vocabulary", lambda header: header.path.name)
    target, first, second = (
        write_tiny_gguf(tmp_path / f"{name}.gguf", seed=seed)
        for seed, name in enumerate(("target", "first", "second"))
    )
    models = load_models(config(target, drafts=(str(first), str(second), str(first))))
    assert sorted(parsed) == ["first.gguf", "second.gguf", "target.gguf"]
    assert built == ["target.gguf"]
    assert list(models.drafts) == ["draft1", "draft2", "draft3"]
    built.clear()
    other = write_tiny_gguf(tmp_path / "other.gguf", last_token="<end>")
    models = load_models(config(target, drafts=(str(other),)))
    assert built == ["target.gguf", "other.gguf"]
    assert len(models.foreign["draft"].logit_ids) == 96


def test_longrope_has_the_long_factors_where_a_long_context_is_asked_for(tmp_path: Path) -> None:
    """For the target and for drafts."""
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    more = {"model_type": "phi3", "original_max_position_embeddings": 64, "rope_scaling": factors}
    folder = write_pair(tmp_path)
    for one in ("target", "draft"):
        path = folder / one / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
    for asked, contexts in ((None, (64, 64)), (64, (64, 64)), (100, (256, 100))):
        engine = config(folder / "target", drafts=(str(folder / "draft"),), max_context=asked)
        models = load_models(engine)
        assert [model.config.max_context for model in (models.target, *models.drafts.values())] == [
            contexts[0]
        ] * 2
        assert ("rope" in models.origin) == (contexts[0] == 256), (
            "engines with other factors go on with no text"
        )
        _, built = build_engine(engine, models)
        assert built.admission.max_context == contexts[1]
    short = replace(engine, scheduler=replace(engine.scheduler, max_context=64))
    with pytest.raises(ConfigError, match=r"max_context is 64.* texts of 100 tokens \(LongRoPE\)"):
        variant_models(short, engine, models)
    assert variant_models(engine, engine, models).target is models.target


def test_auto_is_what_rows_cost(folder: Path) -> None:
    for curve, nodes, rows in (
        (CostCurve((1, 240, 480), (1.2, 1.2, 2.4)), 360, 480),  # passes that wait for their weights
        (CostCurve((1, 2), (1.0, 2.0)), 64, 128),  # every row costs what the first one does
        (CostCurve((1, 2), (1.0, 1.0)), 2048, 2048),
        (CostCurve((1, 20, 100), (1.0, 1.0, 2.0)), 64, 128),
    ):
        asked = config(folder / "target", max_nodes="auto", max_step_tokens="auto")
        found = resolved(asked, curve)
        assert (found.speculation.max_nodes, found.scheduler.max_step_tokens) == (nodes, rows), curve
        numbers = config(folder / "target", max_nodes=9, max_step_tokens=99)
        assert resolved(numbers, curve) == numbers, curve
        assert asked.speculation.node_limit == asked.scheduler.row_limit == 2048, "until it is known"


# Lookups, with native kernels and without.


_OPTIONS = {name: value for name, value in ENGINE.items() if name != "lookup"}
GREEDY = SamplingParams(temperature=0, max_tokens=20)


def guessed(folder: Path, **options: Any) -> int:
    """The tokens that lookups have guessed for an answer that repeats its prompt."""
    with LLM(str(folder / "target"), **{**_OPTIONS, **options}) as llm:
        [output] = llm.generate(["(1,2)(1,2)"], GREEDY)
    return output.figures.proposed_by.get("lookup", 0)


def test_guesses_are_looked_up_with_any_kernels_unless_that_is_switched_off(folder: Path) -> None:
    library_or_skip()
    for options in ({"kernels": "native"}, {"kernels": "torch"}, {}):
        assert guessed(folder, **options) > 0, options
    assert guessed(folder, lookup=False) == 0


def test_lookups_by_default_are_left_off_without_a_library(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(progress: object = None) -> None:
        raise KernelBuildError("no compiler here; install one")

    monkeypatch.setattr(table, "load_library", refuse)
    with caplog.at_level(logging.WARNING, logger="specinfer"):
        assert guessed(folder, kernels="torch", lookup="auto") == 0
    warnings = [record.message for record in caplog.records if "lookup is off" in record.message]
    assert warnings == ["lookup is off, as it needs native kernels: no compiler here; install one"]


# Starts that are interrupted.


PARAMS = SamplingParams(temperature=1, seed=3, max_tokens=8)
OPTIONS = {**ENGINE, "quantization": "int8", "tree_size": "cost"}


class Interrupted(NoProgress):
    """Raises KeyboardInterrupt at the n-th word of progress."""

    def __init__(self, place: int) -> None:
        self.left = place

    def start(self, total: int | None, label: str, unit: str = "B") -> None:
        self._heard()

    def advance(self, n: int) -> None:
        self._heard()

    def _heard(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.mark.thorough
def test_an_interrupted_start_leaves_nothing_half_done(tmp_path: Path, own_cache: Path) -> None:
    write_tiny(tmp_path / "models")
    target, draft = str(tmp_path / "models/target"), str(tmp_path / "models/similar")

    def start(place: int) -> LLM:
        return LLM(target, drafts=(draft,), progress=Interrupted(place), **OPTIONS)

    place = 0
    while True:
        try:
            llm = start(place)
        except KeyboardInterrupt:
            place += 1
            continue
        break
    assert place > 10, "loading, quantizing and measuring are heard of"
    with llm, LLM(target, progress=NoProgress(), **OPTIONS) as alone:
        one, other = (each.generate([[1, 2, 3]], PARAMS)[0] for each in (llm, alone))
        assert one.token_ids == other.token_ids
    left = [path for path in own_cache.rglob("*") if path.is_file() and "kernels" not in path.parts]
    assert {path.suffix for path in left} <= {".json", ".safetensors", ".bin", ".lock"}, left


# Ends.


PROGRAM = """
import sys, psutil
from specinfer import LLM, SamplingParams

def used():
    return psutil.Process().memory_full_info().uss >> 20

def run(model, **options):
    llm = LLM(model, kv_cache_memory="32MB", progress=None, **options)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    opened = used()
    llm.close()
    return opened, used()

run(sys.argv[1])  # imports, and what a process keeps once
before = used()
for quantization in ("none", "int8"):
    print(before, *run(sys.argv[2], quantization=quantization))
"""


@pytest.mark.slow  # starts a process with large weights
def test_a_closed_llm_leaves_the_process_as_small_as_before(tmp_path: Path, own_cache: Path) -> None:
    small = write_tiny_llama(tmp_path / "small", tokenizer=True)
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_layers": 8, "head_dim": 128}
    large = write_tiny_llama(tmp_path / "large", tokenizer=True, **shape)  # type: ignore[arg-type]
    command = [sys.executable, "-c", PROGRAM, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        before, opened, closed = map(int, line.split())
        assert opened > before + 40, lines
        assert closed <= 1.1 * before, lines
