"""Attention along the paths of a tree, with a dense mask, and sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.paper.lab import Lab
from benchmarks.paper.passes import BLOCK, binary, medians, paths, tree_rows
from benchmarks.paper.plots import INK, lines
from benchmarks.paper.question import Cells, Figure, Figures, Verdict
from benchmarks.study import shown, spread, table
from specinfer.attention.backend import Attend, AttentionSpec
from specinfer.check.doctor import find_kernels
from specinfer.errors import UserError
from specinfer.kernels.attention import NativeAttention
from specinfer.kernels.library import Library
from specinfer.runtime.batch import Rows, build_batch

ASKS: Final = "What does attention along a tree's paths gain?"
_Call = Callable[[AttentionSpec], Tensor]

_HEADS, _KV_HEADS, _SIZE = 12, 2, 128  # of Qwen2.5-Coder-1.5B
_SPEC: Final[Mapping[str, Any]] = {
    **{"num_heads": _HEADS, "num_kv_heads": _KV_HEADS, "head_dim": _SIZE, "scale": _SIZE**-0.5},
    **{"window": None, "q_norm": None, "k_norm": None, "norm_eps": 0.0},
}
_LAYERS: Final = tuple(AttentionSpec(layer=layer, **_SPEC) for layer in range(4))  # read in turn
_WAYS: Final = {"paths": "along paths", "masked": "dense mask (PyTorch)", "each": "a call a sequence"}
_PAPER: Final = 1.8  # speed over sequence by sequence, at most


def keys(lab: Lab) -> list[str]:
    contexts = lab.pick(full=(128, 1024, 4096, 8192), quick=(128, 1024), toy=(32,))
    sizes = [(batch, nodes) for batch in (1, 8) for nodes in (16, 64)]
    trees = lab.pick(full=sizes, quick=sizes, toy=[(2, 4)])
    return [f"{context},{nodes},{batch}" for batch, nodes in trees for context in contexts]


def measure(lab: Lab, key: str) -> Figures:
    """Return the seconds of a layer's attention by way, and the largest difference of their results."""
    lab.elsewhere()
    library = find_kernels().library
    if library is None:
        raise UserError("there are no native kernels for this CPU")
    calls, rows = _calls(library, *map(int, key.split(",")))
    with torch.inference_mode():
        masked = calls["masked"](_LAYERS[0])
        differs = [calls["paths"](_LAYERS[0]) - masked, calls["each"](_LAYERS[0]) - masked[rows]]
        passes = {name: partial(_pass, call) for name, call in calls.items()}
        seconds = medians(passes, lab.pick(full=7, quick=3, toy=1))
    return {
        **{name: spent / len(_LAYERS) for name, spent in seconds.items()},
        "differs": max(float(one.abs().max()) for one in differs),
    }


def _pass(call: _Call) -> None:
    for layer in _LAYERS:
        call(layer)


def _calls(library: Library, context: int, nodes: int, batch: int) -> tuple[dict[str, _Call], list[int]]:
    """Return the attention of the same trees in all ways over one cache, and the rows of sequences.

    Results are [rows, heads x size].
    """
    parents, stride = binary(nodes), context // BLOCK + -(-nodes // BLOCK)  # in blocks
    tables = [range(stride * one, stride * (one + 1)) for one in range(batch)]
    random = torch.Generator().manual_seed(0)
    size = (2, batch * stride * BLOCK, _KV_HEADS, _SIZE)
    kept = [torch.randn(size, generator=random).bfloat16() for _ in _LAYERS]
    qkv = torch.randn(batch * nodes, _HEADS + 2 * _KV_HEADS, _SIZE, generator=random).bfloat16()
    cache = NativeAttention(library).over(*zip(*kept, strict=True))

    def bound(rows: list[Rows]) -> Attend:
        return cache.bind(build_batch(rows, block_size=BLOCK, device=kept[0].device).paths)

    tree = bound([tree_rows(context, table, parents) for table in tables])
    leaves = paths(parents)
    sequences = [[nodes * one + node for node in path] for one in range(batch) for path in leaves]
    each = [
        (bound([tree_rows(context, table, range(-1, len(path) - 1))]), qkv[nodes * one :][path].flatten(1))
        for one, table in enumerate(tables)
        for path in leaves
    ]
    mask = torch.zeros(nodes, context + nodes).bfloat16()
    mask[:, context:] = float("-inf")
    for path in leaves:
        mask[torch.tensor(path)[:, None], context + torch.tensor(path)] = (
            torch.ones(len(path), len(path)).tril().log().bfloat16()
        )
    mask = mask.repeat(_HEADS // _KV_HEADS, 1)

    def masked(spec: AttentionSpec) -> Tensor:
        """Attention by PyTorch; the query heads of a key-value head are rows of one product."""
        q, *new = torch.split(qkv.view(batch, nodes, -1, _SIZE), [_HEADS, _KV_HEADS, _KV_HEADS], dim=2)
        k, v = kept[spec.layer].view(2, batch, -1, _KV_HEADS, _SIZE)[:, :, : context + nodes]
        k[:, context:], v[:, context:] = new
        q = q.reshape(batch, nodes, _KV_HEADS, -1, _SIZE).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
        return out.view(batch, _HEADS, nodes, _SIZE).transpose(1, 2).reshape(batch * nodes, -1)

    return {
        "paths": lambda spec: tree(spec, qkv.flatten(1), None),
        "masked": masked,
        "each": lambda spec: torch.cat([attend(spec, rows, None) for attend, rows in each]),
    }, [row for path in sequences for row in path]


def page(cells: Cells) -> list[str]:
    rows = [
        (*reversed(key.split(",")), *shown(1e3 * cell[way] for way in _WAYS), *shown(_gains(cell).values()))
        for key, cell in cells.items()
    ]
    differs = max(cell["differs"] for cell in cells.values())
    ways = " | ".join(_WAYS.values())
    return [
        f"Milliseconds of the attention of a layer, {_HEADS} query heads on {_KV_HEADS} of keys and values, "
        f"{_SIZE} numbers each, bfloat16: binary trees behind a text. A sequence goes from the root to a "
        "leaf, so nodes near the root are computed again in each.",
        *table(
            f"batch | nodes | context | {ways} | paths over dense | over a call a sequence",
            [*rows, ("paper, large", *[""] * 6, f"at most {_PAPER}")],
        ),
        f"Attention along paths has {_over(cells, 'each')} of the speed of a call for each sequence, and "
        f"{_over(cells, 'masked')} of that of a dense mask (median, least and most). The values of the ways "
        f"differ by {differs:.4f} at most.",
    ]


def plot(cells: Cells, figure: Figure) -> None:
    for axes, way in zip(figure.subplots(1, 2), ("masked", "each"), strict=True):
        series: dict[str, dict[str, float]] = {}
        for key, cell in cells.items():
            context, nodes, batch = key.split(",")
            series.setdefault(f"{nodes} nodes, batch {batch}", {})[context] = _gains(cell)[way]
        lines(axes, series)
        axes.axhline(1, linewidth=0.8, color=INK)
        axes.set(xlabel="context", title=f"speed of paths over {_WAYS[way]}")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    axes.axhline(_PAPER, linestyle=":", label="paper, at most")
    axes.legend()


def verdict(cells: Cells) -> Verdict:
    gains = [_gains(cell)["each"] for cell in cells.values()]
    ours = f"{_over(cells, 'each')}; {_over(cells, 'masked')} over a dense mask"
    against = f"{sum(gain > _PAPER for gain in gains)} of {len(gains)} cases gain more"
    against = "" if max(gains) > _PAPER and min(gains) > 1 else against
    return Verdict(ours, f"up to {_PAPER} over a kernel a sequence", "surpassed", against)


def _gains(cell: Figures) -> dict[str, float]:
    """Return the speed of paths over the other ways."""
    return {way: float(cell[way] / cell["paths"]) for way in ("masked", "each")}


def _over(cells: Cells, way: str) -> str:
    return spread([_gains(cell)[way] for cell in cells.values()], 2)
