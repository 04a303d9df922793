"""Ranks for tests: forked processes that share an exchange."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from specinfer.errors import PeerLostError
from specinfer.kernels.exchange import SLOT, SharedExchange, shared_file
from specinfer.kernels.library import Library

_FORK = multiprocessing.get_context("fork")
GONE = "gone"  # result of a rank that ends without an answer


def run_ranks(
    library: Library,
    count: int,
    work: Callable[[SharedExchange], Any],
    *,
    slot: int = SLOT,
    limit: float = 20.0,
    silent: tuple[int, ...] = (),
) -> list[Any]:
    """Run `work` in `count` ranks; return each one's result or PeerLostError.

    Ranks in `silent` are not awaited, but killed at the end.
    """
    file = shared_file()
    ranks = []
    try:
        for rank in range(count):
            ours, theirs = _FORK.Pipe(duplex=False)
            process = _FORK.Process(
                target=_run, args=(library, file, count, rank, slot, limit, work, theirs), daemon=True
            )
            process.start()
            theirs.close()
            ranks.append((process, ours))
        return [GONE if rank in silent else _received(ours) for rank, (_, ours) in enumerate(ranks)]
    finally:
        os.close(file)
        for process, ours in ranks:
            process.kill()
            process.join()
            ours.close()


def _run(
    library: Library,
    file: int,
    count: int,
    rank: int,
    slot: int,
    limit: float,
    work: Callable[[SharedExchange], Any],
    answer: Connection,
) -> None:
    exchange = SharedExchange(library, file, count, rank, slot=slot, limit=limit)
    try:
        answer.send(work(exchange))
    except PeerLostError as error:
        answer.send(error)
    finally:
        exchange.close()


def _received(answer: Connection) -> Any:
    try:
        return answer.recv()
    except EOFError:
        return GONE
