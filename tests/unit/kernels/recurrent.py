"""Random recurrent blocks, and texts that are computed by them pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from specinfer.kernels.native_ops import NativeOps
from specinfer.kernels.recurrence import RecurrenceParts
from specinfer.kernels.recurrence_config import GateNorm, LayerKind, Recurrence
from specinfer.kernels.states import ZERO, StateMemory, StatePass, StateRows

SLOTS: Final = 6  # the last three are checkpoints
NODES: Final = 80
LAYERS: Final = 2


def block(
    kind: Any, sizes: tuple[int, int, int, int], *, taps: int = 4, seed: int = 0, **switches: Any
) -> RecurrenceParts:
    """A random block; sizes are heads, groups, key and value size, for a short convolution the channels.

    Switches: bias and skip (True), norm, norm_groups ("heads": one weight for all heads), min_dt, max_dt
    and tiled (True).
    """
    heads, groups, keys, values = (0, 0, 0, 0) if kind == "short_conv" else sizes
    channels = sizes[0] if kind == "short_conv" else heads * values + 2 * groups * keys
    made = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=made) * scale

    norm, own = switches.get("norm", "none"), switches.get("norm_groups", 1)
    weight = None if norm == "none" else 1 + random(values if own == "heads" else heads * values, scale=0.1)
    return RecurrenceParts(
        layer=1,
        sizes=Recurrence(
            kind=LayerKind(kind),
            taps=taps,
            channels=channels,
            heads=heads,
            groups=groups,
            tiled=bool(switches.get("tiled")),
            key_size=keys,
            value_size=values,
            norm=GateNorm(norm),
            norm_groups=heads if own == "heads" else own,
            norm_eps=1e-5,
            min_dt=switches.get("min_dt", 0.0),
            max_dt=switches.get("max_dt", float("inf")),
        ),
        products=(_never, _never),
        gates=_never if kind == "gated_delta" else None,
        conv_CT=random(channels, taps, scale=0.5),
        conv_bias_C=random(channels, scale=0.5) if switches.get("bias") else None,
        decay_N=-torch.exp(random(heads)) if heads else None,
        dt_bias_N=random(heads) if heads else None,
        skip_N=random(heads) if switches.get("skip") else None,
        norm_weight=weight,
    )


def _never(x: Tensor) -> Tensor:
    raise AssertionError("products are not called")


def inputs(
    parts: RecurrenceParts, rows: int, dtype: torch.dtype, seed: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Random results of the first product, and gates."""
    made = torch.Generator().manual_seed(seed)
    gates = None if parts.gates is None else torch.randn(rows, parts.sizes.gates, generator=made)
    return torch.randn(rows, parts.sizes.width, generator=made).to(dtype), gates


class States:
    """Slots and rings of one block's layer."""

    def __init__(self, ops: NativeOps, parts: RecurrenceParts) -> None:
        nan, sizes = float("nan"), parts.sizes  # nothing may be read before it is written
        self.memory = StateMemory(
            torch.full((LAYERS, SLOTS, sizes.state_floats), nan),
            torch.full((LAYERS, 3, NODES, sizes.input_floats), nan),
        )
        self.ops, self.parts = ops, parts
        self.applied = [0] * SLOTS

    def begin(self, *given: Part) -> StatePass:
        """The states of a pass of these parts, which are then those of its end."""
        order, begin, ends = StateRows(), 0, []
        for part in given:
            source = part.slot if part.source is None else part.source
            applied = self.applied[source]
            if part.start == 0:
                source, applied = ZERO, 0
            end = order.add(
                slot=part.slot,
                source=source,
                applied=applied,
                start=part.start,
                first_row=begin,
                rows=len(part.made),
                parents=part.parents,
                saves=part.saves,
            )
            ends += [(part.slot, end), *((slot, tokens) for tokens, slot in part.saves if tokens <= end)]
            begin += len(part.made)
        for slot, end in ends:
            self.applied[slot] = end
        return StatePass(self.memory, order)

    def run(self, *given: Part) -> list[Tensor]:
        """One pass of these parts; returns the rows of each."""
        gates = [part.gates for part in given if part.gates is not None]
        made, gates_TG = torch.cat([part.made for part in given]), torch.cat(gates) if gates else None
        out = self.ops.recur(self.parts, made, gates_TG, self.begin(*given))
        return list(out.tensor_split(list(accumulate(len(part.made) for part in given))[:-1]))

    def accept(self, slot: int, root: int, nodes: Sequence[int]) -> None:
        """Keep these nodes of a tree at `root`, as a runner moves them."""
        assert self.applied[slot] == root + 1, "the places of a ring are those of nodes behind the root"
        ring = self.memory.rings_LRNF[:, slot]
        ring[:, : len(nodes)] = ring[:, [node - 1 for node in nodes]]


class Part:
    """A request's rows of a pass: tokens of a source of inputs, at cache positions from `start` on."""

    def __init__(
        self,
        text: tuple[Tensor, Tensor | None],
        tokens: Sequence[int],
        start: int,
        slot: int = 0,
        *,
        parents: Sequence[int] | None = None,
        source: int | None = None,
        saves: Sequence[tuple[int, int]] = (),
    ) -> None:
        made, gates = text
        self.made, self.gates = made[list(tokens)], None if gates is None else gates[list(tokens)]
        self.start, self.slot, self.parents = start, slot, parents
        self.source, self.saves = source, saves
