"""A recurrent block: a convolution and a linear recurrence between two products.

Shapes: T rows of a step, D hidden size. kernels/recurrence_config.py has the formulas, `RecurrenceParts` the
order of the first product's results.
"""

import torch
from torch import Tensor

from specinfer.kernels.recurrence import RecurrenceParts
from specinfer.kernels.recurrence_config import GATES, KEYS, GateNorm, LayerKind, Recurrence, input_rows
from specinfer.models.config import ModelConfig
from specinfer.models.weight_memory import Weights


def recurrent(
    layer: int, config: ModelConfig, r: Recurrence, weights: Weights, prefix: str
) -> RecurrenceParts:
    """The block whose tensors' names begin with `prefix`; `layer` is its number in this part."""
    own = config.part.recurrence
    names = list(input_rows(r))
    rows = [own.keys if name in KEYS else own.heads if name == "in_proj_dt" else own.values for name in names]

    def exact(name: str, *ranges: range | None) -> Tensor:
        """These ranges of a tensor; None: all of it."""
        whole = weights.exact(f"{prefix}.{name}")
        found = [one for one in ranges if one is not None]
        return torch.cat([whole[one.start : one.stop] for one in found]) if found else whole

    conv, group = own.conv or (), weights.group
    linear = r.kind is not LayerKind.SHORT_CONV
    norm_values = own.values if r.kind is LayerKind.MAMBA2 else None  # otherwise all heads have the same
    return RecurrenceParts(
        layer=config.recurrent_layers.index(layer),
        sizes=r,
        products=(
            weights.linear(*(f"{prefix}.{name}" for name in names), bias=r.bias, rows=rows),
            weights.linear(f"{prefix}.out_proj", bias=r.out_bias, columns=own.values, parts=own.sums),
        ),
        gates=weights.linear(*(f"{prefix}.{name}" for name in GATES), precise=True, rows=[own.heads] * 2)
        if r.kind is LayerKind.GATED_DELTA
        else None,
        conv_CT=exact("conv.weight", *conv),
        conv_bias_C=exact("conv.bias", *conv) if r.conv_bias else None,
        decay_N=exact("decay", own.heads) if linear else None,
        dt_bias_N=exact("dt_bias", own.heads) if linear else None,
        skip_N=exact("skip", own.heads) if r.kind is LayerKind.MAMBA2 else None,
        norm_weight=None if r.norm is GateNorm.NONE else exact("norm.weight", norm_values),
        total=None if group is None or group.exchange is not None else group.total,
    )


def recurrent_shapes(r: Recurrence, hidden: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a block, by name without its prefix, with their shapes."""
    matrices = [(name, rows, hidden, r.bias) for name, rows in input_rows(r).items()]
    matrices.append(("out_proj", hidden, r.values, r.out_bias))
    matrices.append(("conv", r.channels, r.taps, r.conv_bias))
    if r.kind is LayerKind.GATED_DELTA:
        matrices += [(name, r.heads, hidden, False) for name in GATES]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows, columns, bias in matrices:
        shapes[f"{name}.weight"] = rows, columns
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if r.kind is not LayerKind.SHORT_CONV:
        shapes |= {"decay": (r.heads,), "dt_bias": (r.heads,)}
    if r.kind is LayerKind.MAMBA2:
        shapes["skip"] = (r.heads,)
    if r.norm is not GateNorm.NONE:
        shapes["norm.weight"] = (r.value_size if r.kind is LayerKind.GATED_DELTA else r.values,)
    return shapes
