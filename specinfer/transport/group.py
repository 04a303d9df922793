"""Group: the ranks that compute one model, from the view of one rank.

    rank 0 ---- one link each ---> followers    messages: commands, in order of execution
    a stage's ranks <-- memory or gloo -->      tensors: row maxima, sums of integers, logits
    stage 0 --> stage 1 --> ... --> stage 0     one link per place in a stage: rows of hidden states

With 2 x 2 ranks, ranks 0 and 1 are the first pipeline stage and share its layers, and ranks 2 and 3 are the
second. Rows go from 0 to 2 and from 1 to 3, and back.

Ranks on one host exchange through shared memory, by the native library (kernels/exchange.py); otherwise
through gloo. Both move numbers and add integers, whose sum does not depend on the order. Floats are never
added across ranks: another order would round differently, and the text would depend on the number of ranks.

After one rank is lost, the others are permanently out of step. So after the first failed exchange, every
exchange raises PeerLostError.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from specinfer.transport.link import LOST, Link
from specinfer.transport.rank_times import DOING, RankTimes
from specinfer.transport.rendezvous import HERE, accept_rank, connect_ranks, gloo_of, open_store

LIMIT: Final = 10.0  # timeout of an exchange, in seconds
LAST: Final = 2.0  # seconds in which rank 0 may read a follower's last message
_TRIALS, _ROWS = 50, 16  # number and rows of timed exchanges


class Loss(NamedTuple):
    """The loss of a rank."""

    rank: int | None  # None: unknown
    words: str


class Peers(Protocol):
    """The processes of the other ranks, started by this one."""

    def lost(self) -> Loss:
        """The lost process and its end."""

    def close(self) -> None:
        """End the processes."""

    on_end: Callable[[], object] | None  # called once if a process ends before `close`


class Group:
    """This process's membership in a group of `size` ranks; rank 0 issues commands.

    Rank r is in pipeline stage r // width at place r % width. All ranks of a stage make the same calls in
    the same order, one thread at a time; on rank 0 a thread holds `lock` for that.
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
        """`links` lead to the followers, or to rank 0. An exchange may take `limit` seconds.

        `exchange` uses memory shared by all ranks of a stage; None: gloo, after `connect`. With several
        stages, stage i has the layers bounds[i] .. bounds[i + 1] - 1. Rank 0 gets the ranks that are
        `over_gloo`; None: all others, if it uses gloo itself.
        """
        self.rank = rank
        self.size = size
        self.bounds = tuple(bounds)
        self.stages = max(1, len(bounds) - 1)
        self.width = size // self.stages
        self.stage, self.place = divmod(rank, self.width)
        self.limit = limit
        self.lock = threading.RLock()
        self.cache_numbers = count()  # numbers of caches
        # Numbers of caches that rank 0 has dropped, with the number of stages that have them.
        self.dropped_caches: deque[tuple[int, int]] = deque()
        self.exchange = exchange
        self._links = links
        others = range(1, size) if exchange is None and self.width > 1 else ()
        self._over_gloo: Collection[int] = others if over_gloo is None else over_gloo
        self._ring: tuple[Link, Link] | None = None  # previous and next stage
        self.times = RankTimes(exchange)
        self._peers = peers
        self._closed = False
        self._gloo: Any = None
        self._lost: Loss | None = None  # reason of the shutdown
        self._shutting_down = threading.Lock()

    @property
    def transport(self) -> str:
        """How partial sums are exchanged, for display."""
        if self.width == 1:
            return "nothing"
        return "gloo" if self.exchange is None else "shared memory"

    def connect(self, host: str = HERE, key: bytes | None = None) -> None:
        """Connect to the other ranks through rank 0; `host` is this host's address for them.

        `key` is needed if a neighbour in another stage is on another host. Raises PeerLostError if a rank
        does not connect in time.
        """
        own = self.exchange is None and self.width > 1
        address, store = (host, 0), None  # the store is needed until all stages have connected
        with self._shut_down_if_it_fails():
            if self.rank == 0 and self._over_gloo:
                store = open_store(host, [self._links[rank - 1] for rank in self._over_gloo], self.limit)
                address = store.host, store.port
            elif self.rank and own:
                address = tuple(json.loads(self._links[0].receive())["store"])
            if own:
                how: dict[str, Any] = {"stage": self.stage, "limit": self.limit, "host": host}
                self._gloo = gloo_of(self.place, self.width, address, **how)
        self.maximum(torch.zeros(1))  # a barrier: all ranks of the stage are connected
        if self.stages > 1:
            with self._shut_down_if_it_fails():
                self._close_ring(key)
            self.round(torch.zeros(1))

    def _close_ring(self, key: bytes | None) -> None:
        """Connect to the previous and the next stage, at the same place; of two stages they are the same."""
        steps = [(stage, stage + 1) for stage in range(self.stages - 1)]
        if self.stages > 2:
            steps.append((0, self.stages - 1))
        pairs = [tuple(n * self.width + place for n in step) for step in steps for place in range(self.width)]
        links: dict[int, Link] = {}
        to_all = dict(enumerate(self._links, start=1))
        for first, second in pairs:
            if self.rank == 0:
                link = connect_ranks(to_all, first, second, key=key, limit=self.limit)
                if link is not None:
                    links[second] = link
            elif self.rank in (first, second):
                accepted = accept_rank(self._links[0], key)
                links[accepted.rank] = accepted.link
        before, behind = ((self.rank + step * self.width) % self.size for step in (-1, 1))
        self._ring = links[before], links[behind]

    def maximum(self, values: Tensor) -> Tensor:
        """Element-wise maximum over all ranks of float32 numbers >= 0; NaN exceeds any number.

        Overwrites `values`.
        """
        if self.width == 1:
            return values
        if self.exchange is not None:
            self._moving(partial(self.exchange.largest, values.numpy()))
            return values
        # As integers they have the same order, independent of a library's handling of NaN.
        self._all(values.view(torch.int32), dist.ReduceOp.MAX)
        return values

    def total(self, values: Tensor) -> Tensor:
        """Element-wise sum over all ranks of int32 numbers; overwrites `values`."""
        if self.width == 1:
            return values
        if self.exchange is not None:
            self._moving(partial(self.exchange.add, values.numpy()))
        else:
            self._all(values, dist.ReduceOp.SUM)
        return values

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Concatenate all ranks' parts at rank 0, [R, sum of widths]; other ranks get their own part back.

        Called by the ranks of the first stage.
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
        """Send a message to all followers of the first `stages` stages; called by rank 0, does not wait."""
        self._check()
        with self._shut_down_if_it_fails():
            for link in self._links[: stages * self.width - 1]:
                link.send(message)

    def receive(self) -> bytes:
        """Wait without limit for rank 0's next message; called by followers, raises as Link."""
        return self._links[0].receive()

    def send_reply(self, values: Tensor) -> None:
        """Send values to rank 0; called by followers."""
        self._links[0].send(_bytes_of(values))

    def reply(self, rank: int, like: Tensor, patience: float = 0.0) -> Tensor:
        """Values sent by another rank, with the shape and dtype of `like`; called by rank 0.

        Waits `patience` seconds longer than for an exchange.
        """
        with self.times.counting("waiting"):
            return self._take(self._links[rank - 1], like, self.limit + patience)

    def send_on(self, values: Tensor, patience: float | None = None) -> None:
        """Send values to the next stage, which may be `patience` seconds late; None: no limit."""
        assert self._ring is not None, "there is only one stage"
        behind = self._ring[1]
        self._check()
        with self._shut_down_if_it_fails(), self.times.counting("exchanging"):
            behind.within(None if patience is None else self.limit + patience)
            behind.send(_bytes_of(values))

    def receive_on(self, like: Tensor, patience: float | None = None) -> Tensor:
        """Values from the previous stage, with the shape and dtype of `like`; `patience` as in `send_on`."""
        assert self._ring is not None, "there is only one stage"
        with self.times.counting("waiting"):
            return self._take(self._ring[0], like, None if patience is None else self.limit + patience)

    def round(self, values: Tensor) -> None:
        """Send values through all stages; called by all ranks."""
        if self.stages == 1:
            return
        if self.stage == 0:
            self.send_on(values)
        values = self.receive_on(values, 0.0)
        if self.stage:
            self.send_on(values)

    def _take(self, link: Link, like: Tensor, limit: float | None) -> Tensor:
        self._check()
        with self._shut_down_if_it_fails():
            link.within(limit)
            found = link.receive()
        if len(found) != like.nbytes:
            raise self.shut_down(f"expected {like.nbytes} bytes from another rank, got {len(found)}")
        return torch.frombuffer(bytearray(found), dtype=like.dtype).view(like.shape)

    def shut_down(self, why: str = "") -> PeerLostError:
        """Shut the group down after a failed or missed exchange; return the error that names the lost rank.

        `why` is the reason, if it is known here.
        """
        with self._shutting_down:  # `watch` may call it at the same time
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
        return PeerLostError(f"{words}; the group is shut down: start the model again", rank)

    def watch(self, on_lost: Callable[[PeerLostError], object]) -> None:
        """Call `on_lost` in a thread if a rank ends while no exchange is in progress."""
        if self._peers is not None:
            self._peers.on_end = lambda: on_lost(self.shut_down())

    def read_times(self) -> None:
        """Read the times requested from followers; called by rank 0."""
        like = torch.empty(len(DOING), dtype=torch.float64)
        self.times.record([self.reply(rank, like).tolist() for rank in range(1, self.size)])

    def seconds(self, width: int, rows: int = _ROWS) -> float:
        """Median time of an exchange of sums of `rows` rows; all ranks call it at once."""
        return _median_of(lambda: self.total(torch.zeros(rows, width, dtype=torch.int32)))

    def hop_seconds(self, width: int, dtype: torch.dtype) -> float:
        """Median time of sending 16 rows to the next stage; all ranks call it at once."""
        return _median_of(lambda: self.round(torch.zeros(_ROWS, width, dtype=dtype))) / self.stages

    def close(self) -> None:
        """Close all links; followers end when rank 0 does so. Idempotent."""
        self._closed = True
        if self._peers is not None:  # first, so that they know that links are closed on purpose
            self._peers.close()
        for link in (*self._links, *(self._ring or ())):
            link.close()
        self._gloo = None

    def free(self) -> None:
        """Close, and unmap the shared memory; the model must be gone, as its tensors point there."""
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
        """Run an exchange; raises PeerLostError if it fails."""
        self._check()
        try:
            move()
        except (RuntimeError, PeerLostError) as error:
            raise self.shut_down() from error

    @contextmanager
    def _shut_down_if_it_fails(self) -> Iterator[None]:
        """Shut the group down if the block fails to connect or to move messages, and raise PeerLostError."""
        try:
            yield
        except (RuntimeError, OSError, EOFError, ValueError) as error:
            raise self.shut_down() from error

    def _check(self) -> None:
        if self._closed:
            raise self.shut_down("the group was closed")


def _bytes_of(values: Tensor) -> bytes:
    return values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _median_of(exchange: Callable[[], object]) -> float:
    found: list[float] = []
    for _ in range(_TRIALS):
        began = time.perf_counter()
        exchange()
        found.append(time.perf_counter() - began)
    return median(found)


def _receive(into: Tensor, rank: int, gloo: Any) -> Any:
    return gloo.recv([into], rank, 0)
