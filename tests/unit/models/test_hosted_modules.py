"""Modules of transformers' models: those that run row by row or in kernels, and their masks and rotations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specinfer.attention.backend import AttentionSpec
from specinfer.errors import UnhostedError
from specinfer.models.hosted.attention import PassAttention, window_of
from specinfer.models.hosted.model import HostedModel
from specinfer.models.hosted.modules import PassRows, RowByRow, WholeVectors
from specinfer.models.hosted.native_modules import (
    NativeGatedMLP,
    NativeNorm,
    NativeSelfAttention,
    activation_of,
)
from tests.hosted import difference, load_hosted, same_with_a_tree, save_tiny
from tests.kernels import kernels

pytestmark = pytest.mark.thorough

TOLERANCE = 1e-4


def test_a_mask_is_a_window_or_is_refused() -> None:
    def causal(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q

    def within(size: int) -> Callable[..., Tensor]:
        return lambda batch, head, q, k: (k <= q) & (k > q - size)

    assert window_of(causal, None) is None
    assert window_of(within(5), 5) == 5
    with pytest.raises(UnhostedError, match="attend to later tokens"):
        window_of(lambda batch, head, q, k: k >= 0, None)
    with pytest.raises(UnhostedError, match="rules other than"):
        window_of(lambda batch, head, q, k: (k <= q) & (k // 5 == q // 5), 5)
    with pytest.raises(UnhostedError, match="rules other than"):
        window_of(within(5), 4)


def test_row_by_row_cuts_what_has_as_many_rows_as_the_pass() -> None:
    seen: list[tuple[int, ...]] = []

    def forward(x: Tensor, *, scale: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((*x.shape, *scale.shape, *table.shape))
        return x * scale + table.sum(), x[0]

    rows = PassRows(3)
    x, scale, table = torch.arange(12.0).view(1, 3, 4), torch.arange(3.0)[:, None], torch.ones(2, 2)
    together, first = RowByRow(forward, rows)(x, scale=scale, table=table)
    assert seen == [(1, 1, 4, 1, 1, 2, 2)] * 3
    assert torch.equal(together, x * scale + 4)
    assert torch.equal(first, x[0])
    rows.count = 1
    RowByRow(forward, rows)(x, scale=scale[:1], table=table)
    assert seen[-1] == (1, 3, 4, 1, 1, 2, 2)


def test_functions_of_single_elements_round_alike_wherever_these_stand() -> None:
    x = torch.randn(37, 10, generator=torch.Generator().manual_seed(0)) * 4

    def forward(x: Tensor) -> Tensor:
        return torch.tanh(torch.sigmoid(x) * 3).exp() ** 0.3

    alone = torch.cat([WholeVectors(forward)(row) for row in x.split(1)])
    assert torch.equal(WholeVectors(forward)(x), alone)
    torch.testing.assert_close(alone, forward(x))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "native"),
    [
        ("llama", {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention"}),
        ("ministral", {"MinistralRMSNorm", "MinistralMLP", "MinistralAttention"}),  # sliding windows
        ("glm", {"GlmRMSNorm"}),  # rotates a part of each head; gate and up are one layer
        ("qwen3", {"Qwen3RMSNorm", "Qwen3MLP"}),  # norms of heads
        ("gemma", {"GemmaMLP", "GemmaAttention"}),  # norms add 1 to their weights
        ("arcee", {"ArceeRMSNorm", "ArceeAttention"}),  # no gate
    ],
)
def test_modules_with_llamas_code_run_in_kernels(kind: str, native: set[str], tmp_path: Path) -> None:
    theirs = save_tiny(kind, tmp_path)
    ours = load_hosted(tmp_path, kernels("native"))
    assert isinstance(ours, HostedModel)
    replaced = (NativeNorm, NativeGatedMLP, NativeSelfAttention)
    modules = ours._skeleton.model.modules()
    assert {type(one).__name__ for one in modules if isinstance(one.forward, replaced)} == native
    assert difference(theirs, ours) < TOLERANCE
    assert same_with_a_tree(ours)


def test_heads_whose_halves_turn_alike_have_a_rotation() -> None:
    spec = AttentionSpec(
        layer=0,
        num_heads=1,
        num_kv_heads=1,
        head_dim=4,
        scale=1.0,
        window=None,
        q_norm=None,
        k_norm=None,
        norm_eps=0.0,
    )
    attention = PassAttention([spec], [4])
    angles = torch.tensor([[[0.1, 0.2], [0.3, 0.4]]])
    halves, pairs = torch.cat([angles, angles], -1), angles.repeat_interleave(2, -1)
    rotation = attention.rotation_of(halves.cos(), halves.sin())
    assert rotation is not None
    assert torch.equal(rotation.cos, angles[0].cos())
    assert torch.equal(rotation.sin, angles[0].sin())
    assert attention.rotation_of(pairs.cos(), pairs.sin()) is None
    assert attention.rotation_of(angles.cos(), angles.sin()) is None


def test_activations_are_known_by_their_values() -> None:
    from transformers.activations import ACT2FN

    known = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
    for name, ours in {**known, "gelu_10": None, "relu2": None, "prelu": None}.items():
        assert activation_of(ACT2FN[name]) == ours
