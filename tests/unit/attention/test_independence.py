"""A row's attention is the same to the last bit wherever the row stands.

test_row_independence.py and test_switches.py compare paths of trees with chains in whole models.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from specinfer.attention.backend import AttentionBackend, Paths
from specinfer.runtime.batch import Rows
from tests.kernels import kernels
from tests.unit.attention.paths import Layer, paths_of, scattered
from tests.unit.kernels.logit_rows import with_threads

#  0 - 1 - 2 -+- 3 - 6 - 9      three branches
#             +- 4 - 7 - 10
#             +- 5 - 8 - 11
PARENTS = [-1, 0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8]
TABLE = scattered(0, 20)
USUAL: dict[str, Any] = {}
OTHERWISE: dict[str, Any] = {"softcap": 3.0, "alibi": True, "sinks": True, "whole_norms": True}
INT8: dict[str, Any] = {"int8": True}
STARTS = [0, 1, 13, 57, 60, 63, 64, 121, 127, 190, 250]


@pytest.fixture(
    params=[
        *(("native", torch.bfloat16, USUAL), ("native", torch.float32, USUAL)),
        *(("torch", torch.bfloat16, USUAL), ("native", torch.bfloat16, OTHERWISE)),
        *(("torch", torch.float32, OTHERWISE), ("native", torch.bfloat16, INT8)),
        *(("native", torch.float32, INT8 | OTHERWISE), ("torch", torch.bfloat16, INT8)),
    ],
    ids=lambda given: "-".join([given[0], str(given[1]).removeprefix("torch."), *given[2]]),
)
def both(request: pytest.FixtureRequest) -> tuple[AttentionBackend, Layer]:
    name, dtype, extras = request.param
    return kernels(name).attention, Layer(6, 2, 64, dtype, rope=True, norms=True, **extras)


@pytest.fixture
def backend(both: tuple[AttentionBackend, Layer]) -> AttentionBackend:
    return both[0]


@pytest.fixture
def layer(both: tuple[AttentionBackend, Layer]) -> Layer:
    return both[1]


def attended(layer: Layer, backend: AttentionBackend, *rows: Rows) -> Tensor:
    return layer.run(backend, paths_of(*rows))[0]


def behind(layer: Layer, backend: AttentionBackend, k: Tensor, v: Tensor, paths: Paths) -> Tensor:
    """The attention of rows over caches that earlier rows have filled."""
    qkv, rotation = layer.inputs(paths)
    return backend.over([k], [v], layer.scales).bind(paths)(layer.heads, qkv, rotation).view(len(qkv), 6, 64)


@pytest.mark.thorough
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 2, 7, 16, 17, 100])
def test_a_prompt_in_one_chunk_and_in_several(backend, layer, step, window):
    layer.window = window
    whole = attended(layer, backend, Rows([1] * 300, 0, TABLE, 0))
    # The cache before a chunk must equal that of the whole prompt.
    _, k, v = layer.run(backend, paths_of(Rows([1] * 300, 0, TABLE, 0)))
    for first in range(0, 300, step):
        paths = paths_of(Rows([1] * min(step, 300 - first), first, TABLE, 0))
        chunk = behind(layer, backend, k, v, paths)
        count = min(step, 300 - first)
        assert torch.equal(chunk[:count], whole[first : first + count]), first


@pytest.mark.thorough
@pytest.mark.parametrize("start", STARTS)
def test_a_tree_level_by_level_and_at_once(backend, layer, start):
    at_once = attended(layer, backend, Rows([1] * 12, start, TABLE, 0, PARENTS))
    k, v = layer.caches()
    for first, last in ((0, 1), (1, 2), (2, 3), (3, 6), (6, 9), (9, 12)):
        paths = paths_of(Rows([1] * (last - first), start + first, TABLE, 0, PARENTS[:last]))
        level = behind(layer, backend, k, v, paths)
        assert torch.equal(level[: last - first], at_once[first:last])


def test_alone_and_in_a_batch(backend, layer):
    parts = [
        Rows([1] * 12, 60, scattered(0, 5), 0, PARENTS),
        Rows([1] * 100, 0, scattered(5, 7), 0),
        Rows([1], 200, scattered(12, 13), 0),
        Rows([1] * 40, 100, scattered(25, 10), 0, [-1, *[n // 2 for n in range(39)]]),
    ]
    together = attended(layer, backend, *parts).split([len(part.token_ids) for part in parts])
    for part, rows in zip(parts, together, strict=True):
        assert torch.equal(attended(layer, backend, part)[: len(rows)], rows)


def test_with_any_number_of_threads(backend, layer):
    parts = [Rows([1] * 100, 400, scattered(0, 32), 0), Rows([1] * 12, 300, scattered(32, 20), 0, PARENTS)]
    one, *others = with_threads(lambda: attended(layer, backend, *parts))
    assert all(torch.equal(other, one) for other in others)
