"""What attention is given, and what it owes.

Shapes: T rows of the step (all requests' tokens and nodes, one after another), R requests, B blocks of their
tables, N query heads, K key-value heads, H head size, C = (N + 2 K) H, the width of the product that makes q,
k and v, P cache slots.

Attention begins where that product ends: head norms and rotation, K and V into the cache, and the attended
values. So whatever a backend fuses, a model calls it the same way.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Paths:
    """The cache positions every row attends to, in the order of its own text, itself last; and their slots.

    Position p of a request lies in slot table[p // block_size] * block_size + p % block_size of a cache. Its
    last positions are those of its rows, one after another: there their K and V go. A row's path is the first
    `shared` positions of its request, then the tail's:

        a row of text      shared = its position + 1, no tail
        a node of a tree   shared = the root's position + 1, tail = its ancestors below the root and itself

    All of it lies in one array, which is told and moved at once; what stands in it are views. A step makes no
    view: NumPy has to be fetched into caches that the last pass has swept.
    """

    numbers: array[int]  # of int32: requests, shared, tail ends, tails, tables
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
        """Paths of these parts, as the properties below have them; tables are of request after request."""
        numbers = array("i", [*requests, *shared, *tail_ends, *tails])
        for table in tables:
            numbers.extend(table)
        return cls(numbers, len(requests) // 4, len(shared), len(tails), block_size)

    @property
    def requests_R4(self) -> NDArray[np.int32]:
        """The first row, the row behind the last, where the table begins, positions."""
        return self._viewed[: 4 * self.num_requests].reshape(-1, 4)

    @property
    def shared_T(self) -> NDArray[np.int32]:
        """How many positions a row's path begins with."""
        begin = 4 * self.num_requests
        return self._viewed[begin : begin + self.num_rows]

    @property
    def tail_ends(self) -> NDArray[np.int32]:
        """[T + 1]; tails[tail_ends[t] : tail_ends[t + 1]] are row t's."""
        begin = 4 * self.num_requests + self.num_rows
        return self._viewed[begin : begin + self.num_rows + 1]

    @property
    def tails(self) -> NDArray[np.int32]:
        """Positions of the row's request, ascending."""
        begin = 4 * self.num_requests + 2 * self.num_rows + 1
        return self._viewed[begin : begin + self.num_tails]

    @property
    def tables_B(self) -> NDArray[np.int32]:
        """The blocks of every request, one request after another."""
        return self._viewed[4 * self.num_requests + 2 * self.num_rows + 1 + self.num_tails :]

    @property
    def _viewed(self) -> NDArray[np.int32]:
        return np.frombuffer(self.numbers, dtype=np.int32)

    def slots(self, request: int) -> NDArray[np.int32]:
        """The slots of all positions of the request with that number, for twins and tests: a long array.

        Raises ValueError where its table is too short.
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
    """The rope of one pass: cos and sin of every row's angles, float32 [T, H / 2]."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class AlibiSpec:
    """What ALiBi adds to scores; models/config.py has the words."""

    slopes_N: Tensor  # float32, on the CPU for native attention
    rounded: bool

    def biases(self, places: Tensor, lengths: Tensor, scale: float) -> Tensor:
        """What is added to scaled scores of keys at these places of paths that are so long, [N, *places]."""
        slopes = self.slopes_N.view(-1, *[1] * places.dim())
        if not self.rounded:
            return slopes * (places - lengths + 1)
        return (slopes * places.bfloat16().float()).bfloat16().float() * scale


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The attention of one layer, apart from its products."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None  # a row sees the last `window` positions of its path; None: all
    # Weights of the RMSNorm over each head, before the rotation, [H]; None: there is none. With `whole_norms`
    # they are over all queries of a row, [N H], and over all its keys, [K H].
    q_norm: Tensor | None
    k_norm: Tensor | None
    norm_eps: float
    whole_norms: bool = False
    softcap: float | None = None  # scores become cap * tanh(scores / cap)
    alibi: AlibiSpec | None = None
    sinks_N: Tensor | None = None  # logits to which no value belongs, in the activations' dtype

    @property
    def plain(self) -> bool:
        """Whether weights are the softmax of scaled scores."""
        return (self.softcap, self.alibi, self.sinks_N) == (None, None, None)


class Attend(Protocol):
    """How a model calls attention; bound to one pass and one cache, of which the model knows nothing."""

    def __call__(self, heads: AttentionSpec, qkv_TC: Tensor, rotation: Rotation | None) -> Tensor:
        """The attended values, [T, N H]; writes K and V of every row to the layer's cache."""
        ...


class CacheAttention(Protocol):
    """Attention over one cache."""

    def bind(self, paths: Paths) -> Attend:
        """Attention of one pass."""
        ...


class AttentionBackend(Protocol):
    """Computes attention along paths."""

    def over(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> CacheAttention:
        """Attention over a cache: per layer K and V, [P, K, H], in the activations' dtype."""
        ...
