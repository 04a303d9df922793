"""benchmarks/machines/kernels.py: which shapes it measures, which trees, and the page it writes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
import torch

from specinfer.config import EngineConfig
from specinfer.kernels.bandwidth import Bandwidth
from specinfer.kernels.layout import int8_bytes
from specinfer.models.decoder import decoder_shapes
from specinfer.models.open_model import open_model
from tests.kernels import NAMES, kernels
from tests.tiny_models import write_tiny_llama

NODES = (1, 2, 8)


@pytest.fixture(scope="module")
def bench(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("kernels")


@pytest.fixture
def quick(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> ModuleType:
    """The script, with copies of matrices that are 16 KB together."""
    monkeypatch.setattr(bench, "STREAMED", 1 << 14)
    monkeypatch.setattr(bench, "REPEATS", 1)
    return bench


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_llama(folder, vocab_size=256, tokenizer=True, tie_embeddings=request.param)


def test_the_products_have_every_weight_of_every_layer_once(bench: ModuleType, model: Path) -> None:
    config = open_model(model).config
    in_layers = sum(
        shape[0] * shape[1]
        for name, shape in decoder_shapes(config).items()
        if len(shape) == 2 and name.startswith("model.layers.")
    )
    shapes = bench.matrices(config)
    head = shapes.pop("head")
    assert head == (256, 32)
    assert config.num_layers * sum(rows * columns for rows, columns in shapes.values()) == in_layers


def test_a_forward_reads_all_weights_but_the_embeddings(bench: ModuleType, model: Path) -> None:
    config = open_model(model).config
    sizes = {name: torch.Size(shape).numel() for name, shape in decoder_shapes(config).items()}
    embeddings = sizes.pop("model.embed_tokens.weight")
    head = sizes.pop("lm_head.weight", embeddings)  # tied embeddings are read as the head
    plain = EngineConfig(model=str(model))
    assert bench.weight_bytes(model, config, plain, kernels("native")) == 2 * (sum(sizes.values()) + head)
    int8 = EngineConfig(model=str(model), quantization="int8")
    matrices = [decoder_shapes(config)[name] for name in sizes if len(decoder_shapes(config)[name]) == 2]
    norms = sum(size for name, size in sizes.items() if len(decoder_shapes(config)[name]) == 1)
    quantized = sum(int8_bytes(*shape) for shape in [*matrices, (config.vocab_size, config.hidden_size)])
    assert bench.weight_bytes(model, config, int8, kernels("native")) == 2 * norms + quantized


@pytest.mark.parametrize(("nodes", "parents"), [(1, [-1]), (2, [-1, 0]), (6, [-1, 0, 0, 1, 1, 2])])
def test_trees_are_binary(bench: ModuleType, nodes: int, parents: list[int]) -> None:
    rows = bench.tree_rows(nodes, 5, [0])
    assert len(rows.token_ids) == nodes
    assert rows.parents == parents
    assert rows.start == 5
    assert rows.logits_from == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_measured_from_products_to_operations(
    quick: ModuleType, model: Path, name: Literal["torch", "native"]
) -> None:
    args = argparse.Namespace(nodes=NODES, context=20, threads=1, kernels=name)
    chosen = kernels(name)
    bandwidth = Bandwidth(chosen.library, 1 << 14)
    products = list(quick.product_rows(open_model(model).config, chosen, NODES, bandwidth))
    kept = ["bf16 plain", "bf16", "int8", "int4"]
    ways = {"qkv": kept, "o": kept, "gate": kept, "down": kept, "head": kept[:3]}
    named = [(row.name.split(" ")[0], row.name.split(", ")[1]) for row in products]
    assert named == [(matrix, way) for matrix, ways_of_it in ways.items() for way in ways_of_it]
    assert all(row.milliseconds[n] > 0 and row.floor_bytes > 0 for row in products for n in NODES)
    whole, operations = quick.forward_rows(str(model), "int8", args, bandwidth)
    assert whole.floor_bytes > 0
    assert all(
        whole.milliseconds[n] > 0 and sum(row.milliseconds[n] for row in operations) > 0 for n in NODES
    )
    found = quick.page("tiny", args, chosen, "why", products, [whole], {"int8": operations}, bandwidth)
    page = "\n".join(found)
    assert "## Operations, quantization int8" in page
    twins = chosen.library is None
    assert ("Native kernels are not used: why." in page) == twins
    assert ("\n| attention | " in page) != twins


def test_operations_that_are_always_short_are_one_row(bench: ModuleType) -> None:
    operations = {1: {"a": 5.0, "b": 0.01, "c": 0.05}, 8: {"a": 5.0, "c": 0.3, "d": 0.02}}
    rows = bench.share_rows(operations, {1: 10.0, 8: 10.0})
    assert [(row.name, dict(row.milliseconds)) for row in rows] == [
        ("a", {1: 5.0, 8: 5.0}),
        ("c", {1: 0.05, 8: 0.3}),
        ("b, d", {1: 0.01, 8: 0.02}),
    ]


def test_a_cell_says_how_many_times_the_floor(bench: ModuleType) -> None:
    head = bench.Row("head", {1: 3.0, 16: 4.5}, 3e7, {1: 2.0, 16: 3.0})
    rows = [head, bench.Row("`add`", {1: 0.25, 16: 0.5})]
    assert bench._table(rows, (1, 16), 20.0) == [
        "| | floor ms | 1 node | 16 nodes |",
        "|---|---|---|---|",
        "| head | 1.50 | 3.00 (2.00) | 4.50 (3.00) |",
        "| `add` |  | 0.25 | 0.50 |",
    ]


@pytest.mark.parametrize("text", ["0,1", "1,-2"])
def test_numbers_of_nodes_are_at_least_one(bench: ModuleType, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="allowed: an integer >= 1"):
        bench._counts(text)
