"""A row's logits are the same to the last bit alone, among the rows of a tree, and in a batch (CPU)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from specinfer.models.weights import load_model
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.flight import torch_threads
from specinfer.runtime.runner import ModelRunner
from tests.kernels import NAMES, kernels
from tests.tiny_models import write_tiny_llama

CPU = torch.device("cpu")
FEW = (12, 63, 505)
LENGTHS = (12, 29, 55, 63, 97, 250, 505, 511, 600)  # of texts

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("rows"))


def write_model(folder: Path) -> Path:
    shape = {"hidden_size": 384, "num_heads": 6, "num_kv_heads": 1, "intermediate_size": 256}
    return write_tiny_llama(folder, num_layers=1, max_context=1024, spread=0.1, **shape)


def runner_of(folder: Path, name: str, dtype: torch.dtype) -> ModelRunner:
    chosen = kernels(name)
    return ModelRunner(
        load_model(folder, dtype=dtype, device=CPU, kernels=chosen), num_blocks=4, block_size=1024
    )


def differing_lengths(runner: ModelRunner, lengths: Iterable[int] = LENGTHS) -> list[int]:
    """The text lengths at which a node of a tree, in a batch, has other logits than alone in a chain."""
    text = [(7 * i * i + 3 * i) % 64 for i in range(1024)]
    #  0 - 1 - 2 -+- 3 - 6 - 9      three branches; the text goes down the middle one
    #             +- 4 - 7 - 10
    #             +- 5 - 8 - 11
    parents = [-1, 0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8]
    path = [0, 1, 2, 4, 7, 10]
    differing = []
    for length in lengths:
        runner.forward([chain_rows(text[:length], 0, [1], logits=False)])
        chain = [
            runner.forward([chain_rows([text[length + i]], length + i, [1], logits=True)])[0]
            for i in range(6)
        ]
        tokens = [63] * 12
        for depth, node in enumerate(path):
            tokens[node] = text[length + depth]
        other, tree = chain_rows([1, 2, 3, 4, 5], 0, [3], logits=True), Rows(tokens, length, [1], 0, parents)
        if not torch.equal(runner.forward([other, tree])[1:][path], torch.stack(chain)):
            differing.append(length)
    return differing


def differing_chunks(
    runner: ModelRunner, sizes: Iterable[int] = (1, 7, 64, 500), length: int = 540
) -> list[int]:
    """The sizes of chunks in which a text, beside another one, has other logits than at once."""
    text = [(7 * i * i + 3 * i) % 64 for i in range(length)]
    whole = runner.forward([Rows(text, 0, [1], 0)])
    differing = []
    for size in sizes:
        found = []
        for start in range(0, length, size):
            chunk = Rows(text[start : start + size], start, [1], 0)
            beside = chain_rows(text[:5], 0, [3], logits=False)
            found.append(runner.forward([beside, chunk]))
        if not torch.equal(torch.cat(found), whole):
            differing.append(size)
    return differing


@pytest.mark.thorough
@DTYPES
@pytest.mark.parametrize("name", NAMES)
def test_a_node_is_the_same_in_a_tree_and_in_a_chain(folder: Path, name: str, dtype: torch.dtype) -> None:
    assert differing_lengths(runner_of(folder, name, dtype)) == []


@pytest.mark.few(1)
@DTYPES
def test_rows_are_as_independent_with_more_threads(folder: Path, dtype: torch.dtype) -> None:
    runner = runner_of(folder, "torch", dtype)
    for count in (2, 3):
        with torch_threads(count):
            assert differing_lengths(runner, FEW) == [], count
