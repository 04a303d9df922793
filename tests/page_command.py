"""The program `specinfer` of the pages' blocks: python -m tests.page_command generate ...

`serve` starts the server in the background, in place of an earlier one, at the port of the page, and returns
when it is ready; with `--master` it returns at once. `follow` and `torchrun` start a process of another host
and return when the server is ready. Other commands answer fewer prompts and tokens, unless the page says how
many. Models of the hub are stand-ins.
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
from collections.abc import Sequence
from pathlib import Path

FEWER = {  # options that are appended unless the page has them
    "generate": {"--max-tokens": "16"},
    "bench": {"--max-tokens": "16"},
    "serve": {"--kv-cache-memory": "64MB"},
    "tune": {"--max-tokens": "16", "--collect-minutes": "0.05"},
}
SHORTER = {  # options that replace the page's
    "check": {"--prompts": "1", "--max-tokens": "6", "--samples": "24"},
    "tune": {"--minutes": "0.1"},
}
HUB = "Qwen/Qwen2.5-Coder"  # beginning of names on the hub
STANDIN = "smollm2-135m"
PROGRAM = [sys.executable, "-m", "specinfer"]


def main(arguments: list[str]) -> int:
    """Run a command; return its exit status."""
    if "_SPECINFER_COMPLETE" in os.environ:  # a shell that completes
        return subprocess.run([*PROGRAM, *arguments], check=False).returncode
    if arguments[0] == "torchrun":
        start([sys.executable, "-m", "torch.distributed.run", *arguments[1:]])
        return until_ready()
    given = {argument.partition("=")[0] for argument in arguments}
    fewer, shorter = (options.get(arguments[0], {}) for options in (FEWER, SHORTER))
    for option, value in [*((o, v) for o, v in fewer.items() if o not in given), *shorter.items()]:
        if "--suite" not in given or option == "--prompts":
            arguments = [*arguments, option, value]  # the last one counts
    # 2048 is the longest context of the stand-in.
    arguments = [STANDIN if one.startswith(HUB) else one.replace("32768", "2048") for one in arguments]
    if arguments[0] == "serve":
        stop()
        start([*PROGRAM, *arguments, "--port", os.environ["PAGE_PORT"]])
        return 0 if "--master" in given else until_ready()
    if arguments[0] == "follow":
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun runs it and signals it
            os.execv(sys.executable, [*PROGRAM, *arguments])
        start([*PROGRAM, *arguments])
        return until_ready()
    asked = "Name a river.\n" if arguments[0] == "chat" else ""
    return subprocess.run([*PROGRAM, *arguments], input=asked, text=True, check=False).returncode


def start(command: Sequence[str]) -> None:
    """Start a process that `stop` ends."""
    pids = Path(os.environ["PAGE_SERVER"])
    with pids.with_suffix(".log").open("ab") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    with pids.open("a") as kept:
        kept.write(f"{process.pid}\n")


def until_ready() -> int:
    """Wait for the server; return 0, or 1 with the log of all processes if one has ended."""
    pids = Path(os.environ["PAGE_SERVER"])
    while all(map(runs, map(int, pids.read_text().split()))):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{os.environ['PAGE_PORT']}/ready", timeout=5):
                return 0
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    print(pids.with_suffix(".log").read_text(), file=sys.stderr)
    return 1


def stop() -> None:
    """End the server of the page and the processes of other hosts, if any run."""
    pids = Path(os.environ["PAGE_SERVER"])
    if not pids.exists():
        return
    processes = [int(pid) for pid in pids.read_text().split()]
    pids.unlink()
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    for process in processes:
        for _ in range(600):
            if not runs(process):
                break
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def runs(process: int) -> bool:
    """True unless the process has ended; a zombie has."""
    try:
        with open(f"/proc/{process}/stat") as state:
            return state.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
