"""AttentionBackend: the inputs of attention and the protocols of its implementations.

Shapes: T rows of the step (all requests' tokens and nodes, one after another), R requests, B blocks of their
tables, N query heads, K key-value heads, H head size, P cache slots. C = (N + 2 K) H is the width of the
product that makes q, k and v.

Attention starts after that product: it includes head norms and rotation, writing K and V to the cache, and
the attended values. So a model calls every backend in the same way, whatever the backend fuses.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specinfer.attention.cached_rows import Scales


@dataclass(frozen=True, slots=True)
class Paths:
    """The cache positions that each row attends to, in the order of its text, itself last; and their slots.

    Position p of a request has slot table[p // block_size] * block_size + p % block_size of a cache. The last
    positions of a request are those of its rows, in order, to which their K and V are written. A row's path
    is the first `shared` positions of its request, then the tail's:

        a row of text      shared = its position + 1, no tail
        a node of a tree   shared = the root's position + 1, tail = its ancestors below the root and itself

    All numbers are in one array, which is passed and moved at once; the properties are views of it. A step
    makes no view, as the last pass has evicted NumPy's code from the CPU caches.
    """

    numbers: array[int]  # int32: requests, shared, tail ends, tails, tables
    num_requests: int
    num_rows: int
    num_tails: int
    block_size: int

    @classmethod
    def of(
        cls,
        requests: Sequence[int],
        shared: Sequence[int],
        tail_ends: Sequence[int],
        tails: Sequence[int],
        *,
        tables: Sequence[Sequence[int]],
        block_size: int,
    ) -> Paths:
        """Make paths of the parts that the properties below return; tables are in the order of requests."""
        numbers = array("i", [*requests, *shared, *tail_ends, *tails])
        for table in tables:
            numbers.extend(table)
        return cls(numbers, len(requests) // 4, len(shared), len(tails), block_size)

    @property
    def requests_R4(self) -> NDArray[np.int32]:
        """For each request: its first row, the end of its rows, the start of its table, its positions."""
        return self._viewed[: 4 * self.num_requests].reshape(-1, 4)

    @property
    def shared_T(self) -> NDArray[np.int32]:
        """Number of leading positions of each row's path."""
        begin = 4 * self.num_requests
        return self._viewed[begin : begin + self.num_rows]

    @property
    def tail_ends(self) -> NDArray[np.int32]:
        """[T + 1]; tails[tail_ends[t] : tail_ends[t + 1]] are row t's."""
        begin = 4 * self.num_requests + self.num_rows
        return self._viewed[begin : begin + self.num_rows + 1]

    @property
    def tails(self) -> NDArray[np.int32]:
        """Positions of the rows' requests, ascending for each row."""
        begin = 4 * self.num_requests + 2 * self.num_rows + 1
        return self._viewed[begin : begin + self.num_tails]

    @property
    def tables_B(self) -> NDArray[np.int32]:
        """Blocks of all requests, in the order of requests."""
        return self._viewed[4 * self.num_requests + 2 * self.num_rows + 1 + self.num_tails :]

    @property
    def _viewed(self) -> NDArray[np.int32]:
        return np.frombuffer(self.numbers, dtype=np.int32)

    def slots(self, request: int) -> NDArray[np.int32]:
        """Return the slots of all positions of a request, a long array; for other backends and tests.

        Raises ValueError if its table is too short.
        """
        _, _, begin, positions = self.requests_R4[request].tolist()
        size, blocks = self.block_size, -(-positions // self.block_size)
        table = self.tables_B[begin : begin + blocks]
        if len(table) < blocks:
            raise ValueError(f"a table of {len(table)} blocks of {size} for {positions} positions")
        slots = table[:, None] * size + np.arange(size)
        return slots.ravel()[:positions].astype(np.int32)


@dataclass(frozen=True, slots=True)
class Rotation:
    """RoPE of one pass: cos and sin of every row's angles, float32 [T, H / 2]."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class AlibiSpec:
    """Parameters of ALiBi, described in models/config.py."""

    slopes_N: Tensor  # float32, on the CPU for native attention
    rounded: bool

    def biases(self, places: Tensor, lengths: Tensor, scale: float) -> Tensor:
        """Return the biases of scaled scores, [N, *places], of keys at `places` of paths of these lengths."""
        slopes = self.slopes_N.view(-1, *[1] * places.dim())
        if not self.rounded:
            return slopes * (places - lengths + 1)
        return (slopes * places.bfloat16().float()).bfloat16().float() * scale


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The attention of one layer without its matrix products."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None  # a row attends to the last `window` positions of its path; None: all
    # Weights of the RMSNorm over each head, before the rotation, [H]; None: no norm. With `whole_norms` the
    # norms are over all queries of a row, [N H], and over all its keys, [K H].
    q_norm: Tensor | None
    k_norm: Tensor | None
    norm_eps: float
    whole_norms: bool = False
    softcap: float | None = None  # scores become cap * tanh(scores / cap)
    alibi: AlibiSpec | None = None
    sinks_N: Tensor | None = None  # logits without values, in the activations' dtype
    # True if the product also makes a gate, [N H] behind v; attended values are multiplied by its sigmoid.
    # Its owner does that, and an AttentionBackend gets rows without the gate.
    gated: bool = False
    # Matrices beside that of queries: 2 are of keys and values, 1 is of keys, which before norm and rotation
    # are the values; 0: K and V are those that an earlier layer has written.
    kv_matrices: int = 2
    value_norm: bool = False  # an RMSNorm over each value, without weights

    @property
    def width(self) -> int:
        """The number of channels of the product that makes q, k and v."""
        return (self.num_heads + self.kv_matrices * self.num_kv_heads) * self.head_dim

    @property
    def plain(self) -> bool:
        """True if the weights are the softmax of scaled scores."""
        return (self.softcap, self.alibi, self.sinks_N) == (None, None, None)


# Attention of one pass over one cache. Maps the layer's spec, q, k and v [T, C] and the rotation to the
# attended values, [T, N H]; writes K and V of every row to the layer's cache.
Attend = Callable[[AttentionSpec, Tensor, Rotation | None], Tensor]


class CacheAttention(Protocol):
    """Attention over one cache."""

    def bind(self, paths: Paths) -> Attend:
        """Return the attention of one pass."""


class AttentionBackend(Protocol):
    """Computes attention along paths."""

    def over(self, keys: Sequence[Tensor], values: Sequence[Tensor], scales: Scales = ()) -> CacheAttention:
        """Return the attention over a cache: per layer K and V, [P, K, H], in the activations' dtype.

        With `scales` they are int8.
        """
