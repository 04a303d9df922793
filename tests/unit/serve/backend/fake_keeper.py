"""In ray_relay's place, a process that tells of a cluster that nobody made.

python -m tests.unit.serve.backend.fake_keeper FD =FOLDER  as FAKE_KEEPER says: kept, dead, or why not
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

if __name__ == "__main__":
    connection = Connection(socket.socket(fileno=int(sys.argv[1])).detach())
    says = os.environ["FAKE_KEEPER"]
    if says == "dead":
        sys.exit(1)
    connection.send(("" if says == "kept" else says, f"127.0.0.1:{os.getpid()}", [4.0, 2.0]))
    with suppress(EOFError):
        connection.recv()
