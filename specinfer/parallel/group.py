"""Group: the ranks that compute one model together, as one of them sees it.

    rank 0 ---- a link each ----> followers     messages: what is run next, in the order in which it is run
    everybody <-- memory or gloo --> everybody  tensors: row maxima, sums of integers, logits

Memory that ranks of one host share is the fast way, by the native library (kernels/exchange.py); gloo goes
where that is not. Either moves numbers and adds integers, whose sum has no order. Floats are never added: in
another order they would round otherwise, and the text would depend on the number of ranks.

Ranks that have lost one of them are out of step for good. So the first exchange that fails is the last one:
it, and all that follow, raise PeerLostError.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from statistics import median
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from specinfer.errors import PeerLostError
from specinfer.kernels.exchange import SharedExchange
from specinfer.parallel.link import Link
from specinfer.parallel.meeting import HERE, gloo_of, gloo_of_rank_0

LIMIT: Final = 10.0  # seconds that an exchange may take
_TRIED, _ROWS = 50, 16  # exchanges that are timed, and their rows


class Loss(NamedTuple):
    """What became of a rank."""

    rank: int | None  # None: it is not known which
    words: str


class Peers(Protocol):
    """The processes of the other ranks, where this one has started them."""

    def lost(self) -> Loss:
        """Which of them is lost, and how."""
        ...

    def close(self) -> None:
        """See that they end."""
        ...

    on_end: Callable[[], object] | None  # called once when one has ended before that


class Group:
    """This process's place among `size` ranks, of which rank 0 says what is run.

    Every rank makes the same calls in the same order. One thread at a time may: whoever leads takes `turn`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        links: Sequence[Link],
        *,
        limit: float = LIMIT,
        peers: Peers | None = None,
        exchange: SharedExchange | None = None,
    ) -> None:
        """`links` lead to the followers, or from rank 0. An exchange may take `limit` seconds.

        `exchange` is by memory that all ranks share; None: by gloo, once they are connected.
        """
        self.rank = rank
        self.size = size
        self.limit = limit
        self.turn = threading.RLock()
        self.numbers = count()  # by which rank 0 knows caches
        self.left: deque[int] = deque()  # of caches that nobody at rank 0 uses any more
        self.exchange = exchange
        self._links = links
        self._peers = peers
        self._closed = False
        self._gloo: Any = None
        self._lost: Loss | None = None  # why it was given up

    @property
    def transport(self) -> str:
        """How partial sums travel, for people."""
        return "gloo" if self.exchange is None else "shared memory"

    def connect(self, host: str = HERE) -> None:
        """Meet the other ranks, by way of rank 0; `host` is this host's address where they can reach it.

        Raises PeerLostError where one of them does not come in time.
        """
        if self.exchange is None:
            try:
                if self.rank == 0:
                    self._gloo = gloo_of_rank_0(self.size, self._links, limit=self.limit, host=host)
                else:
                    link = self._links[0]
                    self._gloo = gloo_of(self.rank, self.size, link, limit=self.limit, host=host)
            except (RuntimeError, OSError, EOFError, ValueError) as error:
                raise self.lose() from error
        self.maximum(torch.zeros(1))  # until all of them have met all

    def maximum(self, values: Tensor) -> Tensor:
        """The largest of all ranks, element by element, of float32 numbers >= 0; NaN is larger than any.

        `values` are used up.
        """
        if self.exchange is not None:
            self._moving(partial(self.exchange.largest, values.numpy()))
            return values
        # As integers they are in the same order, whatever a library makes of NaN.
        self._all(values.view(torch.int32), dist.ReduceOp.MAX)
        return values

    def total(self, values: Tensor) -> Tensor:
        """The sum over all ranks, element by element, of int32 numbers, which are used up."""
        if self.exchange is not None:
            self._moving(partial(self.exchange.add, values.numpy()))
        else:
            self._all(values, dist.ReduceOp.SUM)
        return values

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """All ranks' parts side by side at rank 0, [R, sum of widths]; other ranks get their own back."""
        part, rows = part.contiguous(), len(part)
        others = [part.new_empty(rows, width) for width in widths[1:]] if self.rank == 0 else []
        if self.exchange is not None:
            sizes = [rows * width * part.itemsize for width in widths]
            own, reads = part.view(torch.uint8).numpy(), self.rank == 0
            found: list[memoryview] = []
            exchange = self.exchange
            self._moving(lambda: found.extend(exchange.gather(own, sizes, reads=reads)))
            for other, there in zip(others, found[1:], strict=True):
                other.view(-1).view(torch.uint8).copy_(torch.frombuffer(there, dtype=torch.uint8))
        elif self.rank:
            self._gloo_moving(lambda gloo: gloo.send([part], 0, 0))
        else:
            for rank, other in enumerate(others, start=1):
                self._gloo_moving(partial(_receive, other, rank))
        return torch.cat([part, *others], 1)

    def broadcast(self, message: bytes) -> None:
        """Send a message to all followers, which may be behind; from rank 0."""
        self._check()
        try:
            for link in self._links:
                link.send(message)
        except OSError as error:
            raise self.lose() from error

    def receive(self) -> bytes:
        """Wait, for ever, for rank 0's next message; raises as Link, at a follower."""
        return self._links[0].receive()

    def lose(self, why: str = "") -> PeerLostError:
        """Give the group up, as an exchange has failed or was not made; the error that says who was lost.

        `why` it was given up here, where that is known.
        """
        if self._lost is None:
            if why:
                self._lost = Loss(self.rank, why)
            else:
                self._lost = Loss(None, "another rank is lost") if self._peers is None else self._peers.lost()
            self.close()
        rank, words = self._lost
        return PeerLostError(f"{words}; the model cannot be run any more: start it again", rank)

    def watch(self, tell: Callable[[PeerLostError], object]) -> None:
        """Have `tell` hear, in a thread, when a rank ends while nobody exchanges anything with it."""
        if self._peers is not None:
            self._peers.on_end = lambda: tell(self.lose())

    @property
    def spent(self) -> tuple[float, float]:
        """Seconds within exchanges so far, and those of them spent waiting; of gloo's nobody knows."""
        if self.exchange is None:
            return 0.0, 0.0
        figures = self.exchange.figures()
        return figures.seconds, figures.waited

    def seconds(self, width: int) -> float:
        """What an exchange of 16 rows of so many sums takes, a median; all ranks call it at once."""
        found: list[float] = []
        for _ in range(_TRIED):
            values = torch.zeros(_ROWS, width, dtype=torch.int32)
            began = time.perf_counter()
            self.total(values)
            found.append(time.perf_counter() - began)
        return median(found)

    def close(self) -> None:
        """Let go of the other ranks; followers end when rank 0 does it. Once more does nothing."""
        self._closed = True
        for link in self._links:
            link.close()
        if self._peers is not None:
            self._peers.close()
        self._gloo = None

    def free(self) -> None:
        """Close, and give back the memory that ranks share; the model must be gone, as it points there."""
        self.close()
        if self.exchange is not None:
            self.exchange.close()

    def _all(self, values: Tensor, operation: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        options.timeout = timedelta(seconds=self.limit)
        if values.numel():
            self._gloo_moving(lambda gloo: gloo.allreduce([values], options))

    def _gloo_moving(self, begin: Callable[[Any], Any]) -> None:
        self._moving(lambda: begin(self._gloo).wait())

    def _moving(self, move: Callable[[], Any]) -> None:
        """An exchange; raises PeerLostError where it fails."""
        self._check()
        try:
            move()
        except (RuntimeError, PeerLostError) as error:
            raise self.lose() from error

    def _check(self) -> None:
        if self._closed:
            raise self.lose("the other ranks were let go")


def _receive(into: Tensor, rank: int, gloo: Any) -> Any:
    return gloo.recv([into], rank, 0)
