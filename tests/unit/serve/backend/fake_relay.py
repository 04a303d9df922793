"""Process in place of ray_relay that reports a fake cluster.

python -m tests.unit.serve.backend.fake_relay FD =FOLDER  with FAKE_RELAY=kept, dead or an error message
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

if __name__ == "__main__":
    connection = Connection(socket.socket(fileno=int(sys.argv[1])).detach())
    outcome = os.environ["FAKE_RELAY"]
    if outcome == "dead":
        sys.exit(1)
    connection.send(("" if outcome == "kept" else outcome, f"127.0.0.1:{os.getpid()}", [4.0, 2.0]))
    with suppress(EOFError):
        connection.recv()
