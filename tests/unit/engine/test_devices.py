"""The table "Options by device" of docs/hardware.md: the options that engines accept and refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, Literal

import pytest
import torch

from specinfer import LLM
from specinfer.config import EngineConfig
from specinfer.engine import found_models, memory
from specinfer.engine.drafts import FoundModel
from specinfer.engine.hardware import Hardware
from specinfer.engine.models import load_models
from specinfer.errors import ConfigError, KernelBuildError
from specinfer.hub import ModelFiles
from specinfer.kernels.choice import TORCH
from specinfer.models.open_model import open_model
from specinfer.models.weights import load_model
from specinfer.progress import NoProgress
from specinfer.speculate import table
from tests.engines import ENGINE
from tests.gguf_blocks import write_blocks
from tests.heads import block_config, tiny_head, write_tiny_head
from tests.kernels import kernels, library_or_skip
from tests.offloading import OPTIONS, count_models_alone, write_large
from tests.tiny_models import write_pair

PAGE: Final = Path(__file__).parents[3] / "docs" / "hardware.md"
WITH, WITHOUT, GPU = "CPU with kernels", "CPU without kernels", "GPU"
SECTION: Final = PAGE.read_text(encoding="utf-8").partition("## Options by device\n")[2].strip()
HEAD, _, *LINES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in SECTION.splitlines()
    if line.startswith("|")
]
CELLS: Final = {
    (row[0], column): cell for row in LINES for column, cell in zip(HEAD[1:], row[1:], strict=True)
}
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets, a draft, a head and a GGUF file."""
    made = write_pair(tmp_path_factory.mktemp("devices"))
    write_tiny_head(tiny_head(block_config()), made / "head")
    write_blocks(made / "gguf", {}, "Q4_0")
    write_large(made / "large")
    return made


def accepted(folder: Path, column: str, options: dict[str, Any], patch: pytest.MonkeyPatch) -> bool:
    """True if an engine starts with these options on such a device."""
    name = "gguf" if options.get("quantization") == "gguf" else "large" if "offload" in options else "target"
    drafts = tuple(str(folder / draft) for draft in options.get("drafts", ()))
    given = {**ENGINE, **options, "drafts": drafts}
    try:
        if column == GPU:
            accept_on_gpu(folder / name, given, patch)
        else:
            if column == WITHOUT:
                patch.setattr(table, "load_library", without_kernels)
            if "offload" in options:
                count_models_alone(patch)
            kind: Literal["native", "torch"] = "native" if column == WITH else "torch"
            if name == "gguf":  # has no tokenizer
                loaded: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
                load_model(open_model(folder / name), kernels=kernels(kind), quantization="gguf", **loaded)
            else:
                LLM(folder / name, progress=NoProgress(), kernels=kind, **given).close()
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
def test_cells_are_what_engines_accept(
    row: str, column: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if column == WITH:
        library_or_skip()
    cell = CELLS[row, column]
    answers = {accepted(folder, column, options, monkeypatch) for options in OPTIONS_OF[row]}
    assert answers == {cell != "no"}, (row, column)
    if cell.startswith("if the host can compile kernels"):
        monkeypatch.setattr(table, "load_library", without_kernels)
        assert not accepted(folder, column, OPTIONS_OF[row][0], monkeypatch)
