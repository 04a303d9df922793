"""What an exchange between processes of this host takes, without a model; `specinfer doctor` tells it.

The other ranks are `python -m specinfer.parallel.trial RANK RANKS SOCKET [MEMORY]`: they make the same
exchanges, and end.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Final

from specinfer.kernels.exchange import SharedExchange, shared_file
from specinfer.kernels.library import Library
from specinfer.kernels.native import load_library
from specinfer.parallel.group import Group
from specinfer.parallel.link import Link

WIDTH: Final = 1536  # sums of a row
ROWS: Final = (1, 16)
_COMING: Final = 60.0  # seconds in which processes start


def exchange_seconds(ranks: int, library: Library | None) -> list[float]:
    """What an exchange takes, a median for each of ROWS: over shared memory, without a library over gloo.

    Raises PeerLostError where one of the processes does not come, or ends.
    """
    memory = [] if library is None else [shared_file()]
    links: list[Link] = []
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(1, ranks):
            ours, its = socket.socketpair()
            links.append(Link(ours))
            with its:
                files = [its.fileno(), *memory]
                command = [sys.executable, "-m", "specinfer.parallel.trial", *map(str, (rank, ranks, *files))]
                processes.append(subprocess.Popen(command, pass_fds=files, stdin=subprocess.DEVNULL))
        return _timed(0, ranks, links, library, *memory)
    finally:
        for link in links:
            link.close()
        for file in memory:
            os.close(file)
        for process in processes:
            process.kill()  # it has ended, or waits for what does not come
            process.wait()


def _timed(rank: int, ranks: int, links: list[Link], library: Library | None, *memory: int) -> list[float]:
    exchange = None
    if library is not None:
        exchange = SharedExchange(library, memory[0], ranks, rank, limit=_COMING)
    group = Group(rank, ranks, links, exchange=exchange, limit=_COMING)
    try:
        group.connect()
        return [group.seconds(WIDTH, rows) for rows in ROWS]
    finally:
        group.free()


def main() -> None:
    """Be another rank, at the other end of an inherited socket."""
    rank, ranks, link, *memory = map(int, sys.argv[1:])
    _timed(rank, ranks, [Link.of(link)], load_library() if memory else None, *memory)


if __name__ == "__main__":
    main()
