"""Group: the ranks that compute one model together, as one of them sees it.

    rank 0 ---- a link each ----> followers     messages: what is run next, in the order in which it is run
    a stage's ranks <-- memory or gloo -->      tensors: row maxima, sums of integers, logits
    stage 0 --> stage 1 --> ... --> stage 0     a link for each place in a stage: rows of hidden states

Of 2 x 2 ranks, 0 and 1 are the first pipeline stage and share its layers, 2 and 3 are the second, and rows go
from 0 to 2 and from 1 to 3, and back from there.

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
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
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
from specinfer.parallel.link import LOST, Link
from specinfer.parallel.meeting import HERE, gloo_of, gloo_of_rank_0, hand_on, introduce, introduced
from specinfer.parallel.rank_times import DOING, RankTimes

LIMIT: Final = 10.0  # seconds that an exchange may take
LAST: Final = 2.0  # seconds that a follower leaves rank 0 to read its last word
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

    Rank r is in pipeline stage r // width at place r % width. Every rank of a stage makes the same calls in
    the same order. One thread at a time may: whoever leads takes `turn`.
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
        bounds: Sequence[int] = (),
        over_gloo: Collection[int] | None = None,
    ) -> None:
        """`links` lead to the followers, or from rank 0. An exchange may take `limit` seconds.

        `exchange` is by memory that all ranks of a stage share; None: by gloo, once they are connected.
        Where there are several stages, the layers of stage i are bounds[i] .. bounds[i + 1] - 1. Rank 0 knows
        which ranks are `over_gloo`, whatever it is itself; None: those that are as it is.
        """
        self.rank = rank
        self.size = size
        self.bounds = tuple(bounds)
        self.stages = max(1, len(bounds) - 1)
        self.width = size // self.stages
        self.stage, self.place = divmod(rank, self.width)
        self.limit = limit
        self.turn = threading.RLock()
        self.numbers = count()  # by which rank 0 knows caches
        # Numbers of caches that nobody at rank 0 uses any more, and how many stages have them.
        self.left: deque[tuple[int, int]] = deque()
        self.exchange = exchange
        self._links = links
        alike = range(1, size) if exchange is None else ()
        self._over_gloo: Collection[int] = alike if over_gloo is None else over_gloo
        self._ring: tuple[Link, Link] | None = None  # from the stage before, and to the next
        self.times = RankTimes(exchange)
        self._peers = peers
        self._closed = False
        self._gloo: Any = None
        self._lost: Loss | None = None  # why it was given up
        self._losing = threading.Lock()

    @property
    def transport(self) -> str:
        """How partial sums travel, for people."""
        if self.width == 1:
            return "nothing"
        return "gloo" if self.exchange is None else "shared memory"

    def connect(self, host: str = HERE, key: bytes | None = None) -> None:
        """Meet the other ranks, by way of rank 0; `host` is this host's address where they can reach it.

        `key` is needed where a neighbour in another stage is on another host. Raises PeerLostError where one
        of them does not come in time.
        """
        own = self.exchange is None and self.width > 1
        try:
            if self.rank:
                if own:
                    how: dict[str, Any] = {"stage": self.stage, "limit": self.limit, "host": host}
                    self._gloo = gloo_of(self.place, self.width, self._links[0], **how)
            else:
                links = [self._links[rank - 1] for rank in self._over_gloo]
                if own:
                    self._gloo = gloo_of_rank_0(self.width, links, limit=self.limit, host=host)
                elif self.width > 1 and links:
                    hand_on(links, self.limit)
        except (RuntimeError, OSError, EOFError, ValueError) as error:
            raise self.lose() from error
        self.maximum(torch.zeros(1))  # until all of a stage have met all
        if self.stages > 1:
            try:
                self._close_ring(key)
            except (OSError, EOFError, ValueError) as error:
                raise self.lose() from error
            self.round(torch.zeros(1))

    def _close_ring(self, key: bytes | None) -> None:
        """Get a link to the stage before and to the next, at the same place; of two stages it is the same."""
        steps = [(stage, stage + 1) for stage in range(self.stages - 1)]
        if self.stages > 2:
            steps.append((0, self.stages - 1))
        pairs = [tuple(n * self.width + place for n in step) for step in steps for place in range(self.width)]
        links: dict[int, Link] = {}
        to_all = dict(enumerate(self._links, start=1))
        for first, second in pairs:
            if self.rank == 0:
                link = introduce(to_all, first, second, key=key, limit=self.limit)
                if link is not None:
                    links[second] = link
            elif self.rank in (first, second):
                met = introduced(self._links[0], key)
                links[met.rank] = met.link
        before, behind = ((self.rank + step * self.width) % self.size for step in (-1, 1))
        self._ring = links[before], links[behind]

    def maximum(self, values: Tensor) -> Tensor:
        """The largest of all ranks, element by element, of float32 numbers >= 0; NaN is larger than any.

        `values` are used up.
        """
        if self.width == 1:
            return values
        if self.exchange is not None:
            self._moving(partial(self.exchange.largest, values.numpy()))
            return values
        # As integers they are in the same order, whatever a library makes of NaN.
        self._all(values.view(torch.int32), dist.ReduceOp.MAX)
        return values

    def total(self, values: Tensor) -> Tensor:
        """The sum over all ranks, element by element, of int32 numbers, which are used up."""
        if self.width == 1:
            return values
        if self.exchange is not None:
            self._moving(partial(self.exchange.add, values.numpy()))
        else:
            self._all(values, dist.ReduceOp.SUM)
        return values

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """All ranks' parts side by side at rank 0, [R, sum of widths]; other ranks get their own back.

        Ranks of the first stage call it.
        """
        if self.width == 1:
            return part
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

    def broadcast(self, message: bytes, stages: int) -> None:
        """Send a message to all followers of so many stages, which may be behind; from rank 0."""
        self._check()
        try:
            for link in self._links[: stages * self.width - 1]:
                link.send(message)
        except OSError as error:
            raise self.lose() from error

    def receive(self) -> bytes:
        """Wait, for ever, for rank 0's next message; raises as Link, at a follower."""
        return self._links[0].receive()

    def answer(self, values: Tensor) -> None:
        """Tell rank 0 something, at a follower."""
        self._links[0].send(_bytes_of(values))

    def answered(self, rank: int, like: Tensor, patience: float = 0.0) -> Tensor:
        """What another rank has answered, of this one's shape and kind; at rank 0.

        It may come so many seconds later than an exchange.
        """
        with self.times.waiting():
            return self._take(self._links[rank - 1], like, self.limit + patience)

    def hand_on(self, values: Tensor, patience: float | None = None) -> None:
        """Give the next stage what it takes, which may be behind by so many seconds; None: for ever."""
        assert self._ring is not None, "there are several stages"
        behind = self._ring[1]
        self._check()
        try:
            with self.times.handing():
                behind.within(None if patience is None else self.limit + patience)
                behind.send(_bytes_of(values))
        except OSError as error:
            raise self.lose() from error

    def take(self, like: Tensor, patience: float | None = None) -> Tensor:
        """What the stage before hands on, of this one's shape and kind; `patience` as of `hand_on`."""
        assert self._ring is not None, "there are several stages"
        with self.times.waiting():
            return self._take(self._ring[0], like, None if patience is None else self.limit + patience)

    def round(self, values: Tensor) -> None:
        """Send something through all stages; all ranks call it."""
        if self.stages == 1:
            return
        if self.stage == 0:
            self.hand_on(values)
        values = self.take(values, 0.0)
        if self.stage:
            self.hand_on(values)

    def _take(self, link: Link, like: Tensor, limit: float | None) -> Tensor:
        self._check()
        try:
            link.within(limit)
            found = link.receive()
        except (EOFError, OSError, ValueError) as error:
            raise self.lose() from error
        if len(found) != like.nbytes:
            raise self.lose(f"{like.nbytes} bytes were to come from another rank, and {len(found)} came")
        return torch.frombuffer(bytearray(found), dtype=like.dtype).view(like.shape)

    def lose(self, why: str = "") -> PeerLostError:
        """Give the group up, as an exchange has failed or was not made; the error that says who was lost.

        `why` it was given up here, where that is known.
        """
        with self._losing:  # as `watch` may be at it
            if self._lost is None:
                if why:
                    self._lost = Loss(self.rank, why)
                else:
                    self._lost = (
                        Loss(None, "another rank is lost") if self._peers is None else self._peers.lost()
                    )
                    if self.rank:
                        with suppress(OSError):
                            self._links[0].send_last(LOST, LAST)
                self.close()
            rank, words = self._lost
        return PeerLostError(f"{words}; the model cannot be run any more: start it again", rank)

    def watch(self, tell: Callable[[PeerLostError], object]) -> None:
        """Have `tell` hear, in a thread, when a rank ends while nobody exchanges anything with it."""
        if self._peers is not None:
            self._peers.on_end = lambda: tell(self.lose())

    def hear_times(self) -> None:
        """Take what the followers answer, which were asked for their times, at rank 0."""
        like = torch.empty(len(DOING), dtype=torch.float64)
        self.times.hear([self.answered(rank, like).tolist() for rank in range(1, self.size)])

    def seconds(self, width: int, rows: int = _ROWS) -> float:
        """What an exchange of so many rows and sums takes, a median; all ranks call it at once."""
        return _median_of(lambda: self.total(torch.zeros(rows, width, dtype=torch.int32)))

    def hop_seconds(self, width: int, dtype: torch.dtype) -> float:
        """The same of handing 16 rows on from stage to stage."""
        return _median_of(lambda: self.round(torch.zeros(_ROWS, width, dtype=dtype))) / self.stages

    def close(self) -> None:
        """Let go of the other ranks; followers end when rank 0 does it. Once more does nothing."""
        self._closed = True
        if self._peers is not None:  # which know then that links are closed on purpose
            self._peers.close()
        for link in (*self._links, *(self._ring or ())):
            link.close()
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


def _bytes_of(values: Tensor) -> bytes:
    return values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _median_of(exchange: Callable[[], object]) -> float:
    found: list[float] = []
    for _ in range(_TRIED):
        began = time.perf_counter()
        exchange()
        found.append(time.perf_counter() - began)
    return median(found)


def _receive(into: Tensor, rank: int, gloo: Any) -> Any:
    return gloo.recv([into], rank, 0)
