"""Forms of weights for a machine's memory, and options by device."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from shutil import copy
from typing import Any, Final, Literal

import psutil
import pytest
import torch

from specinfer.config import EngineConfig
from specinfer.engine import found_models, memory
from specinfer.engine.drafts import FoundModel
from specinfer.engine.found_models import check_self, find_models, find_target
from specinfer.engine.hardware import Hardware, choose_quantization, machine_memory
from specinfer.engine.models import load_models
from specinfer.errors import ConfigError, KernelBuildError
from specinfer.hub import ModelFiles
from specinfer.kernels.choice import TORCH
from specinfer.llm import LLM
from specinfer.models.open_model import open_model
from specinfer.models.weight_sizes import estimate_bytes
from specinfer.models.weights import load_model
from specinfer.progress import NoProgress
from specinfer.sampling_params import SamplingParams
from specinfer.speculate import table
from tests.engines import ENGINE
from tests.gguf_blocks import write_blocks
from tests.heads import block_config, tiny_head, write_tiny_head
from tests.kernels import NAMES, kernels, library_or_skip
from tests.offloading import OPTIONS, count_models_alone, write_large
from tests.quantized_folders import FORMATS, write_quantized
from tests.tiny_models import write_pair, write_similar_llama, write_tiny_llama, write_tiny_mixture

pytestmark = pytest.mark.usefixtures("own_cache")  # of quantized weights

CPU = torch.device("cpu")
OTHER = {"blk.0.ffn_up.weight": "IQ3_S", "blk.0.ffn_down.weight": "Q6_K", "output.weight": "F32"}


def chosen(path: Path, memory: Any, **options: Any) -> tuple[str, str]:
    """Return the choice and its reason; memory "int8" is twice the bytes in int8, ("int8",) just these."""
    model, native = open_model(path), kernels("native")
    if not isinstance(memory, int | None):
        kind, times = (memory, 2) if isinstance(memory, str) else (*memory, 1)
        memory = times * estimate_bytes(model, torch.bfloat16, native, kind)
    given = {"hardware": Hardware(CPU, torch.bfloat16, native), "divided": False, "streams": False}
    return choose_quantization(model, memory=memory, **{**given, **options})


def test_each_file_runs_in_the_form_that_loses_least(tmp_path: Path) -> None:
    q4 = write_blocks(tmp_path / "q4" / "m.gguf", {}, "Q4_K")
    mixed = write_blocks(tmp_path / "mixed" / "m.gguf", OTHER, "Q4_K")
    low = write_blocks(tmp_path / "low" / "m.gguf", {}, "Q2_K")
    floats = write_blocks(tmp_path / "floats" / "m.gguf", {}, "F32")
    folder = write_tiny_llama(tmp_path / "folder", hidden_size=256)
    folders = {name: tmp_path / name for name in ("gptq", "awq", "fp8-block", "nf4")}
    for name, path in folders.items():
        write_quantized(path, FORMATS[name], hidden=256, inner=256)
    cuda = torch.device("cuda")
    cases: list[tuple[str, Path, Any, dict[str, Any], str, str]] = [
        ("blocks", q4, None, {}, "gguf", "Q4_K as they are"),
        (
            "several kinds",
            *(mixed, None, {}, "gguf"),
            "Q4_K, Q6_K as they are; IQ3_S rounded to blocks of 4 or 8 bits; F32 in bfloat16",
        ),
        ("2 bits", low, None, {}, "gguf", "Q2_K rounded to blocks"),
        ("2 bits that fit only in 4", low, ("int4",), {}, "int4", "its blocks would take"),
        ("blocks that do not fit at all", q4, 1, {}, "gguf", "Q4_K as they are"),
        ("blocks among processes", q4, None, {"divided": True}, "int8", "cannot divide the file's blocks"),
        ("the same, without memory", q4, "int4", {"divided": True}, "int4", "int8 would take"),
        ("a GPU", q4, None, {"hardware": Hardware(cuda, torch.bfloat16, TORCH)}, "none", "run on CPUs only"),
        (
            "PyTorch's kernels",
            q4,
            None,
            {"hardware": Hardware(CPU, torch.bfloat16, TORCH)},
            "none",
            "slow without native kernels",
        ),
        ("floats in a file", floats, None, {}, "none", "bfloat16 takes"),
        ("a folder", folder, "none", {}, "none", "bfloat16 takes"),
        ("a folder over half of memory", folder, "int8", {}, "int8", "more than half of"),
        ("a folder far over it", folder, "int4", {}, "int4", "int8 would take"),
        (
            *("a half of it, the other on another host", folder, ("none",), {"share": 0.5}, "none"),
            "bfloat16 takes",
        ),
        ("a folder that is streamed", folder, 1, {"streams": True}, "none", "bfloat16 takes"),
        ("FP8 that is streamed", folders["fp8-block"], 1, {"streams": True}, "int8", "no form of their own"),
        ("blocks that are streamed", low, ("int4",), {"streams": True}, "gguf", "Q2_K rounded to blocks"),
        ("GPTQ", folders["gptq"], None, {}, "int4", "the file's levels, without rounding"),
        ("AWQ", folders["awq"], None, {}, "int4", "the file's levels, without rounding"),
        ("FP8", folders["fp8-block"], None, {}, "int8", "no form of their own"),
        ("NF4", folders["nf4"], None, {}, "int8", "no form of their own"),
        ("NF4 without memory", folders["nf4"], "int4", {}, "int4", "int8 would take"),
    ]
    for name, path, room, options, kind, reason in cases:
        found = chosen(path, room, **options)
        assert found[0] == kind, (name, found)
        assert reason in found[1], (name, found)


def test_an_engine_has_the_chosen_kinds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In its config, its origin and its variants; a draft follows its own file, and `self` is int4."""
    kernels("native")
    folder = write_pair(tmp_path)
    write_quantized(tmp_path / "gptq", FORMATS["gptq"])
    copy(folder / "target" / "tokenizer.json", tmp_path / "gptq")
    options = {**ENGINE, "kernels": "native", "model": str(folder / "target")}
    with caplog.at_level(logging.INFO), LLM(**options, drafts=[tmp_path / "gptq", "self"]) as llm:
        assert llm.config.quantization == llm.models.origin["kind"] == "none"
        assert llm.models.kinds == {"draft1": "int4", "draft2": "int4"}
        assert llm.config.speculation.draft_quantization == "int4"
        for config in (None, EngineConfig.from_options(options["model"], {**ENGINE, "kernels": "native"})):
            with llm.variant(config, drafts=()) as plain:
                assert plain.config.quantization == "none"
        with pytest.raises(ConfigError, match="quantization is 'int8', and a variant shares weights"):
            llm.variant(quantization="int8")
    assert "target: quantization none (float32 takes" in caplog.text
    assert "gptq, a draft: quantization int4 (the file's levels, without rounding)" in caplog.text


def test_a_self_draft_of_its_targets_size_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hardware = Hardware(CPU, torch.bfloat16, kernels("native"))
    for kind, said in (("Q4_K", True), ("Q8_0", False), ("Q6_K", False)):
        path = write_blocks(tmp_path / f"{kind}.gguf", {}, kind)
        caplog.clear()
        check_self(FoundModel(ModelFiles("m", path, (path,)), open_model(path)), "gguf", "int4", hardware)
        assert ("so it can hardly speed it up; name a smaller model" in caplog.text) == said, kind


def test_memory_is_for_what_stays_in_it_on_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, native = write_tiny_llama(tmp_path / "m", tokenizer=True), kernels("native")
    size = estimate_bytes(model, torch.bfloat16, native)
    monkeypatch.setattr("specinfer.engine.hardware.machine_memory", lambda: size)
    parts = {"pipeline_parallel": 2, "master": "127.0.0.1:1", "key_file": "k"}
    streamed = {"offload": "auto", "drafts": (str(model),)}
    for options, kind in (({"pipeline_parallel": 2}, "int4"), (parts, "none"), (streamed, "none")):
        config = EngineConfig.from_options(str(model), options)
        hardware = Hardware(CPU, torch.bfloat16, native)
        found = find_models(*find_target(config, hardware, NoProgress()), hardware, NoProgress())
        assert found.config.quantization == kind, options
        assert {*found.kinds.values()} <= {"int4"}, options


def test_the_memory_is_that_of_the_machine_or_its_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory changes from start to start, and texts may not."""
    total = psutil.virtual_memory().total
    for limit, found in ((None, total), (total // 3, total // 3), (2 * total, total)):
        monkeypatch.setattr("specinfer.engine.hardware.cgroup_memory", lambda limit=limit: limit)
        assert machine_memory() == found


PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [9], list(range(5, 45)), [7, 7, 7, 7]]
PARAMS = [SamplingParams(temperature=0, max_tokens=12), SamplingParams(temperature=1, seed=5, max_tokens=12)]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures")
    write_tiny_mixture(folder / "target", shared_size=24, tokenizer=True)
    write_similar_llama(folder / "target", folder / "draft", noise=0.1)
    return folder


def texts(folder: Path, **options: object) -> list[tuple[int, ...]]:
    llm = LLM(folder / "target", **{**ENGINE, "kernels": "torch", **options})
    return [tuple(out.token_ids) for params in PARAMS for out in llm.generate(PROMPTS, params)]


@pytest.mark.thorough
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_speculation_does_not_change_the_text(
    folder: Path, mixture: Path, name: Literal["torch", "native"], quantization: str, dtype: str
) -> None:
    kernels(name)
    options = {"quantization": quantization, "dtype": dtype, "kernels": name}
    for models in (folder, mixture):
        plain = texts(models, **options)
        assert quantization == "none" or plain != texts(models, dtype=dtype, kernels=name), models
        draft = {"drafts": (str(models / "draft"),), "expansion": (2, 2, 1)}
        for more in (
            {"lookup": True},
            draft,
            {**draft, "draft_quantization": "int4"},
            {**draft, "max_batch_size": 1, "tree_size": "cost"},
        ):
            assert texts(models, **more, **options) == plain, (models, more)


def test_a_draft_is_quantized_on_its_own(folder: Path, own_cache: Path) -> None:
    options = {**ENGINE, "drafts": (str(folder / "draft"),), "draft_quantization": "int8"}
    load_models(EngineConfig.from_options(str(folder / "target"), {**options, "kernels": "torch"}))
    [kept] = (own_cache / "prepared").glob("*.safetensors")
    assert kept.name.startswith("draft-int8-")


def test_only_the_rows_of_a_draft_may_depend_on_how_many_there_are(folder: Path) -> None:
    kernels("native")
    options = {**ENGINE, "kernels": "native", "drafts": (str(folder / "draft"),)}
    models = load_models(EngineConfig.from_options(str(folder / "target"), options))
    loose = [model.kernels.products.use.loose for model in (models.target, *models.drafts.values())]
    assert loose == [False, True]


# The table "Options by device" of docs/hardware.md.


PAGE: Final = Path(__file__).parents[3] / "docs" / "hardware.md"
WITH, WITHOUT, GPU = "CPU with kernels", "CPU without kernels", "GPU"
SECTION: Final = PAGE.read_text(encoding="utf-8").partition("## Options by device\n")[2].strip()
HEAD, _, *LINES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in SECTION.splitlines()
    if line.startswith("|")
]
CELLS: Final = {(row[0], col): cell for row in LINES for col, cell in zip(HEAD[1:], row[1:], strict=True)}
# Options of each row, one set for each name in its first cell.
OPTIONS_OF: Final[dict[str, list[dict[str, Any]]]] = {
    "bfloat16, float32": [{"dtype": "bfloat16"}, {"dtype": "float32"}],
    "`int8`, `int4`, `gguf`": [{"quantization": kind} for kind in ("int8", "int4", "gguf")],
    "draft models, heads": [{"drafts": ("draft",)}, {"drafts": ("head",)}],
    "lookups": [{"lookup": True}],
    "`--tensor-parallel`": [{"tensor_parallel": 2, "quantization": "int8"}],
    "`--pipeline-parallel`": [{"pipeline_parallel": 2}],
    "`--offload auto`": [OPTIONS],
}
# Ranks on CPUs, with and without kernels, are tested in tests/unit/parallel.
TESTED: Final = [cell for cell in CELLS if cell[1] == GPU or "-parallel`" not in cell[0]]


class Reached(Exception):
    """The options were accepted: models are opened next."""


def without_kernels(progress: object = None) -> None:
    raise KernelBuildError("no compiler here; install one")


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets, a draft, a head and a GGUF file."""
    made = write_pair(tmp_path_factory.mktemp("devices"))
    write_tiny_head(tiny_head(block_config()), made / "head")
    write_blocks(made / "gguf", {}, "Q4_0")
    write_large(made / "large")
    return made


def accepted(devices: Path, column: str, options: dict[str, Any], patch: pytest.MonkeyPatch) -> bool:
    """True if an engine starts with these options on such a device."""
    name = "gguf" if options.get("quantization") == "gguf" else "large" if "offload" in options else "target"
    drafts = tuple(str(devices / draft) for draft in options.get("drafts", ()))
    given = {**ENGINE, **options, "drafts": drafts}
    try:
        if column == GPU:
            accept_on_gpu(devices / name, given, patch)
        else:
            if column == WITHOUT:
                patch.setattr(table, "load_library", without_kernels)
            if "offload" in options:
                count_models_alone(patch)
            kind: Literal["native", "torch"] = "native" if column == WITH else "torch"
            if name == "gguf":  # has no tokenizer
                loaded: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
                load_model(open_model(devices / name), kernels=kernels(kind), quantization="gguf", **loaded)
            else:
                LLM(devices / name, progress=NoProgress(), kernels=kind, **given).close()
    except (ConfigError, KernelBuildError):
        return False
    return True


def accept_on_gpu(model: Path, options: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
    """Check the options as loading does, on a device that is not there."""
    patch.setattr("torch.cuda.is_available", lambda: True)
    if "offload" in options:
        patch.setattr(memory, "allowed_bytes", lambda limit, device: memory.process_bytes() + 1)
        needs = memory.MemoryNeeds(
            target=FoundModel(ModelFiles("large", model, ()), open_model(model)),
            quantization="none",
            hardware=Hardware(torch.device("cuda"), torch.bfloat16, TORCH),
            draft_weights={},
            draft_sets=(memory.DraftSet(),),
            reads_table=False,
        )
        memory.plan_memory(needs, EngineConfig.from_options("large", {"offload": "auto"}), NoProgress())
        return

    def open_next(*_: object, **__: object) -> None:
        raise Reached

    patch.setattr(found_models, "find", open_next)
    config = EngineConfig.from_options(str(model), {**options, "device": "cuda"})
    with pytest.raises(Reached):
        load_models(config)
    table.build_speculators(config.speculation)


def test_every_row_is_tested() -> None:
    assert HEAD[1:] == [WITH, WITHOUT, GPU]
    assert [row for row, *_ in LINES] == [*OPTIONS_OF]
    assert all(re.match(r"(?:yes|no|if the host can compile kernels)\b", cell) for cell in CELLS.values())


@pytest.mark.parametrize(("row", "column"), TESTED)
def test_cells_are_right(row: str, column: str, devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if column == WITH:
        library_or_skip()
    cell = CELLS[row, column]
    answers = {accepted(devices, column, options, monkeypatch) for options in OPTIONS_OF[row]}
    assert answers == {cell != "no"}, (row, column)
    if cell.startswith("if the host can compile kernels"):
        monkeypatch.setattr(table, "load_library", without_kernels)
        assert not accepted(devices, column, OPTIONS_OF[row][0], monkeypatch)
