"""Recurrence: the sizes and the formulas of layers with a state, and the kinds of layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from specinfer.errors import ModelError

LANES: Final = 16  # value columns of a block of a state
_MAX_TAPS: Final = 16  # as in kernels/cpu/recurrence.cpp


class LayerKind(StrEnum):
    """The first block of a layer, before its MLP."""

    ATTENTION = "attention"
    SHORT_CONV = "short_conv"  # a convolution between two gates (LFM2)
    GATED_DELTA = "gated_delta"  # a gated delta rule (Qwen3-Next, Qwen3.5)
    MAMBA2 = "mamba2"  # Granite 4, Nemotron-H, Bamba
    BOTH = "both"  # attention and Mamba-2 of the same input, added (Falcon-H1)
    NONE = "none"  # an MLP alone (Nemotron-H)


class GateNorm(StrEnum):
    """The norm of a recurrence's output y, before its gate z or behind it."""

    NONE = "none"  # y * silu(z)
    BEFORE = "before"  # norm(y) * silu(z)
    BEHIND = "behind"  # norm(y * silu(z))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """The layers with a state; all of a model have the same sizes.

    A causal convolution over the last `taps` inputs of each channel. Unless it is a short convolution, a
    linear recurrence follows, whose state of a head is S [key_size, value_size]; k and q are of its group:

        gated delta    r = S'q, m = S'k, d = beta (v - decay m)
        Mamba-2        r = S'q,          d = dt v               with k = B, q = C, v = x
        both           output = decay r + (k.q) d, S = decay S + k d
    """

    kind: LayerKind  # SHORT_CONV, GATED_DELTA or MAMBA2
    taps: int
    channels: int  # inputs of the convolution: q, k, v; or x, B, C
    heads: int = 0  # of values
    groups: int = 0  # heads of keys and queries
    tiled: bool = False  # head h uses group h mod groups; otherwise h // (heads / groups)
    key_size: int = 0
    value_size: int = 0
    conv_bias: bool = False
    bias: bool = False  # in the first product
    out_bias: bool = False  # in the last
    norm: GateNorm = GateNorm.NONE
    norm_groups: int = 1  # parts of a row that are normed one by one
    norm_eps: float = 1e-6
    min_dt: float = 0.0
    max_dt: float = math.inf
    # If ranks share a norm: the heads of all of them, which have the `norm_groups`, and the first one here.
    whole_heads: int = 0
    first_head: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.taps <= _MAX_TAPS:
            raise ModelError(f"a convolution has {self.taps} taps; supported: 2 to {_MAX_TAPS}")
        if self.kind is LayerKind.SHORT_CONV:
            return
        for name in ("heads", "groups", "key_size", "value_size"):
            if (size := getattr(self, name)) <= 0:
                raise ModelError(
                    f"{name} of the recurrence is {size}; expected at least 1. The config is damaged."
                )
        if self.heads % self.groups or self.value_size % LANES:
            raise ModelError(
                f"a recurrence has {self.heads} heads of {self.value_size} values and {self.groups} heads of "
                f"keys; supported: a multiple of the heads of keys, with a multiple of {LANES} values each"
            )

    @property
    def values(self) -> int:
        """Number of values of a row, the input of the last product."""
        return self.heads * self.value_size or self.channels

    @property
    def width(self) -> int:
        """Number of results of the first product for a row."""
        return sum(input_rows(self).values())

    @property
    def gates(self) -> int:
        """Number of values beside the convolution's inputs: beta and decay, or dt, of each head."""
        return {LayerKind.GATED_DELTA: 2, LayerKind.MAMBA2: 1}.get(self.kind, 0) * self.heads

    @property
    def input_floats(self) -> int:
        """Floats of a token's inputs of the recurrence: the convolution's, then the gates'."""
        return self.channels + self.gates

    @property
    def matrix_floats(self) -> int:
        """Floats of a layer's matrices S."""
        return self.heads * self.key_size * self.value_size

    @property
    def state_floats(self) -> int:
        """Floats of a layer's state: its matrices, and the convolution's last inputs."""
        return self.matrix_floats + (self.taps - 1) * self.channels


KEYS: Final = ("in_proj_q", "in_proj_k", "in_proj_b", "in_proj_c")  # matrices of keys and queries
GATES: Final = ("in_proj_beta", "in_proj_a")  # matrices of a gated delta rule's gates


def input_rows(r: Recurrence) -> dict[str, int]:
    """The rows of a recurrent block's first product, by the decoder's names of its matrices, in order."""
    values, keys = r.heads * r.value_size, r.groups * r.key_size
    if r.kind is LayerKind.SHORT_CONV:
        return {"in_proj_factor": r.channels, "in_proj_gate": r.channels, "in_proj_x": r.channels}
    if r.kind is LayerKind.GATED_DELTA:
        return {"in_proj_z": values, "in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values}
    return {
        **{"in_proj_z": values, "in_proj_x": values, "in_proj_b": keys, "in_proj_c": keys},
        "in_proj_dt": r.heads,
    }
