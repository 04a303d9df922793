"""The program `specinfer` of the pages' blocks: python -m tests.page_command generate ...

`serve` starts the server in the background, in place of an earlier one, at the port of the page, and returns
when it is ready. Other commands answer fewer prompts and tokens, unless the page says how many.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

FEWER = {  # options that are appended unless the page has them
    "generate": {"--max-tokens": "16"},
    "check": {"--prompts": "1", "--max-tokens": "8", "--samples": "24"},
    "bench": {"--max-tokens": "16"},
    "serve": {"--kv-cache-memory": "64MB"},
}
PROGRAM = [sys.executable, "-m", "specinfer"]


def main(arguments: list[str]) -> int:
    """Run a command; return its exit status."""
    given = {argument.partition("=")[0] for argument in arguments}
    for option, value in FEWER.get(arguments[0], {}).items():
        if option not in given and ("--suite" not in given or option == "--prompts"):
            arguments = [*arguments, option, value]
    if arguments[0] != "serve":
        return subprocess.run([*PROGRAM, *arguments], stdin=subprocess.DEVNULL, check=False).returncode
    stop()
    port = os.environ["PAGE_PORT"]
    log = Path(os.environ["PAGE_SERVER"]).with_suffix(".log")
    with log.open("wb") as out:
        command = [*PROGRAM, *arguments, "--port", port]  # the last one counts
        server = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    Path(os.environ["PAGE_SERVER"]).write_text(str(server.pid))
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                return 0
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    print(log.read_text(), file=sys.stderr)
    return server.returncode or 1


def stop() -> None:
    """End the server of the page, if one runs."""
    pid = Path(os.environ["PAGE_SERVER"])
    if not pid.exists():
        return
    process = int(pid.read_text())
    pid.unlink()
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGTERM)
    for _ in range(600):
        try:
            with open(f"/proc/{process}/stat") as state:
                if state.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return
        except OSError:
            return
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
