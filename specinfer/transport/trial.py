"""Measures the time of an exchange between processes of this host, without a model, for `specinfer doctor`.

The other ranks are `python -m specinfer.transport.trial RANK RANKS SOCKET [MEMORY]`: they make the same
exchanges and exit.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Final

from specinfer.kernels.exchange import SharedExchange, shared_file
from specinfer.kernels.library import Library, load_library
from specinfer.transport.group import Group
from specinfer.transport.link import Link

WIDTH: Final = 1536  # sums per row
ROWS: Final = (1, 16)
_LIMIT: Final = 60.0  # seconds in which processes start


def exchange_seconds(ranks: int, library: Library | None) -> list[float]:
    """Median time of an exchange for each of ROWS: over shared memory, or over gloo without a library.

    Raises PeerLostError if one of the processes does not connect, or ends.
    """
    memory = [] if library is None else [shared_file()]
    links: list[Link] = []
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(1, ranks):
            parent, child = socket.socketpair()
            links.append(Link(parent))
            with child:
                files = [child.fileno(), *memory]
                command = [
                    sys.executable,
                    "-m",
                    "specinfer.transport.trial",
                    *map(str, (rank, ranks, *files)),
                ]
                processes.append(subprocess.Popen(command, pass_fds=files, stdin=subprocess.DEVNULL))
        return _timed(0, ranks, links, library, *memory)
    finally:
        for link in links:
            link.close()
        for file in memory:
            os.close(file)
        for process in processes:
            process.kill()  # it has ended, or waits for a message that never arrives
            process.wait()


def _timed(rank: int, ranks: int, links: list[Link], library: Library | None, *memory: int) -> list[float]:
    exchange = None
    if library is not None:
        exchange = SharedExchange(library, memory[0], ranks, rank, limit=_LIMIT)
    group = Group(rank, ranks, links, exchange=exchange, limit=_LIMIT)
    try:
        group.connect()
        return [group.seconds(WIDTH, rows) for rows in ROWS]
    finally:
        group.free()


def main() -> None:
    """Entry point of another rank, over an inherited socket."""
    rank, ranks, link, *memory = map(int, sys.argv[1:])
    _timed(rank, ranks, [Link.of(link)], load_library() if memory else None, *memory)


if __name__ == "__main__":
    main()
