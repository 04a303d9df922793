"""The program `specinfer` of the pages' blocks: it has the test run its command line (tests/page_command.py).

    python -I -S tests/page_program.py SOCKET generate ...

It sends its arguments, folder, environment and standard files to the socket, and exits with the status that
comes back. torchrun signals the processes that it starts, so those run the real program themselves.
"""

import json
import os
import socket
import sys

if "TORCHELASTIC_RUN_ID" in os.environ:
    os.execv(sys.executable, [sys.executable, "-m", "specinfer", *sys.argv[2:]])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as test:
    test.connect(sys.argv[1])
    command = {"arguments": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(test, [json.dumps(command).encode()], [0, 1, 2])
    status = int(test.recv(16) or 1)
sys.exit(status)
