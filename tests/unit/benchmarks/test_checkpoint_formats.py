"""Folders in the formats of other programs, rounded to nearest, and the page of their perplexities."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.identity.checkpoint_formats import exact_matrices, group_size
from benchmarks.identity.rounded_formats import QUANTIZED, rounded_formats, write_bfloat16, write_rounded
from specinfer.errors import ModelError
from specinfer.hub import resolve
from specinfer.models.open_model import open_model
from tests.tiny_models import write_tiny_llama
from tests.unit.benchmarks.conftest import Run

# Largest relative error of a matrix of normally distributed weights (groups of 32).
ERRORS = {
    "gptq 4 bits": 0.1,
    "awq 4 bits": 0.09,
    "compressed-tensors w4a16": 0.1,
    "compressed-tensors w8a8": 0.008,
    "compressed-tensors FP8 channels": 0.03,
    "fp8 blocks": 0.03,
    "mxfp4": 0.15,
    "bitsandbytes nf4": 0.11,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny model whose rows have 160 and 192 elements, in bfloat16."""
    shape = {"hidden_size": 160, "intermediate_size": 192, "num_heads": 5, "num_kv_heads": 1}
    write_tiny_llama(tmp_path / "tiny", **shape, spread=0.05)
    write_bfloat16(resolve(str(tmp_path / "tiny")), tmp_path / "source")
    return tmp_path / "source"


def test_the_source_has_the_models_weights_in_bfloat16(source: Path) -> None:
    before, after = open_model(source.parent / "tiny"), open_model(source)
    assert after.shapes == before.shapes
    for name, shape in after.shapes.items():
        want = before.read_rows(name, 0, shape[0]).bfloat16()
        assert torch.equal(after.read_rows(name, 0, shape[0]), want)


@pytest.mark.parametrize("name", rounded_formats(32))
def test_rounding_to_nearest(name: str, source: Path, tmp_path: Path) -> None:
    write_rounded(source, tmp_path / "made", rounded_formats(32)[name])
    model, made = open_model(source), open_model(tmp_path / "made")
    assert made.shapes == model.shapes
    for matrix, shape in model.shapes.items():
        want, found = (one.read_rows(matrix, 0, shape[0]).float() for one in (model, made))
        error = float((found - want).norm() / want.norm())
        if matrix.endswith(QUANTIZED):
            assert ERRORS[name] / 3 < error < ERRORS[name]
        else:
            assert error == 0


@pytest.mark.parametrize(
    ("name", "int4", "bfloat16"),
    [
        ("gptq 4 bits", 14, 0),
        ("awq 4 bits", 14, 0),
        ("compressed-tensors w4a16", 14, 0),
        ("compressed-tensors w8a8", 0, 0),
        ("mxfp4", 0, 14),
    ],
)
def test_exact_matrices_are_counted(
    name: str, int4: int, bfloat16: int, source: Path, tmp_path: Path
) -> None:
    write_rounded(source, tmp_path / "made", rounded_formats(32)[name])
    assert exact_matrices(tmp_path / "made") == {"matrices": 14, "none": bfloat16, "int4": int4}


def test_groups_divide_all_rows(source: Path, tmp_path: Path) -> None:
    assert group_size(source) == 32
    write_tiny_llama(tmp_path / "odd", hidden_size=48, intermediate_size=64)
    with pytest.raises(ModelError, match="rows of 48, 64 elements; allowed: multiples of 32"):
        group_size(tmp_path / "odd")


def test_the_page_has_a_row_for_each_format(
    script: Callable[[str], ModuleType],
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dataset: str,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")  # no kernels are built
    model = write_tiny_llama(
        tmp_path / "model", tokenizer=True, vocab_size=256, hidden_size=64, intermediate_size=128
    )
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    options = ["--model", str(model), "--dataset", dataset, "--limit"]
    first = run(script("checkpoint_formats"), *options, "1")
    lines = run(script("checkpoint_formats"), *options, "2")
    assert "Integers of 4 bits have groups of 64." in lines[2]
    for name in ("bfloat16", *rounded_formats(64)):
        perplexities, divergences = [
            [cell.strip() for cell in line.split("|")[2:-1]]
            for line in lines
            if line.startswith(f"| {name} |")
        ]
        assert float(perplexities[1]) > 1
        assert all(float(cell) > 0 for cell in divergences[1:])
        assert perplexities[-1].endswith("of 14")
        int4_is_exact = "4 bits" in name or name.endswith("w4a16")
        assert perplexities[-1].split(", ")[1] == f"{14 if int4_is_exact else 0} of 14"
    cells = json.loads((tmp_path / "page.json").read_text())["cells"]
    assert {len(cell["rows"]) for cell in cells.values()} == {2}
    assert run(script("checkpoint_formats"), *options, "1")[2:-6] == first[2:-6]  # without provenance
