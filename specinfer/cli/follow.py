"""`specinfer follow`: a rank of a model whose rank 0 is on another host, for one engine after another."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from specinfer.errors import ConfigError
from specinfer.option import name_of_address, parse_address
from specinfer.parallel.link import Link, read_key
from specinfer.parallel.listener import CANNOT_LOAD, PEER_LOST, join_group, spawn

_AGAIN: Final = 0.5  # seconds after which the master is looked for again
_LOOK: Final = 0.05  # seconds after which it is looked again whether processes live
_GRACE: Final = 1.0  # seconds that the others have to end when one has
_TERMINATED: Final = 128 + signal.SIGTERM
_ENDS: Final = {
    0: "the engine has ended",
    CANNOT_LOAD: "it could not load the model",
    PEER_LOST: "another rank was lost",
}


@click.command()
@click.argument("model")
@click.option("--rank", type=click.IntRange(1), required=True, envvar="RANK", help="Which one: 1, 2, ...")
@click.option("--master", metavar="HOST:PORT", help="Where rank 0 listens: its own --master.")
@click.option("--key-file", required=True, metavar="FILE", help="A file with the key that they share.")
@click.option(
    "--local-ranks", type=click.IntRange(1), default=1, help="So many ranks, from --rank on, here.  [1]"
)
def follow(model: str, rank: int, master: str | None, key_file: str, local_ranks: int) -> None:
    """Compute a part of MODEL, which must be the model that the engine at --master runs.

    Waits for the engine, ends what it has loaded when that ends, and waits for the next one, until a signal
    ends it. Without --rank and --master the variables RANK, MASTER_ADDR and MASTER_PORT say what they are.

    Exit statuses: 2, what is given is wrong, or the engine has another key or no such rank; 130, Ctrl-C;
    143, SIGTERM.
    """
    from specinfer.hub import resolve
    from specinfer.progress import ProgressBar

    address = parse_address("master", master or _of_variables())
    key = read_key(key_file)
    path = resolve(model, progress=ProgressBar()).path.resolve()
    ranks = range(rank, rank + local_ranks)
    signal.signal(signal.SIGTERM, _terminate)
    while True:
        host, links = secrets.token_hex(16), list[Link]()
        for one in ranks:
            links.append(_waited_for(address, key, one, host))
        for one in ranks:
            _say(one, f"follows the engine at {name_of_address(address)}")
        try:
            status = _run(links, ranks, path, key_file)
        except OSError as error:  # no memory or no process is left; the engine notices that its links end
            ends = [f"its process cannot be started: {error}" for _ in ranks]
        else:
            ends = [_ENDS.get(found, f"its process has ended with status {found}") for found in status]
        for one, end in zip(ranks, ends, strict=True):
            _say(one, end)
        time.sleep(_AGAIN)


def _run(links: Sequence[Link], ranks: Sequence[int], path: Path, key_file: str) -> list[int]:
    """Have a process run each of these ranks until one has ended; their statuses.

    Raises OSError where one cannot be started; then none is left.
    """
    memory: dict[int, int] = {}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        try:
            if len(ranks) > 1:  # a stage may begin with any of them
                from specinfer.kernels.exchange import shared_file

                memory |= {rank: shared_file() for rank in ranks}
            processes += (spawn(link.number, path, memory, key_file) for link in links)
        finally:
            for file in memory.values():
                os.close(file)
            for link in links:
                link.close()
        while all(one.poll() is None for one in processes):
            time.sleep(_LOOK)
        until = time.monotonic() + _GRACE
        while time.monotonic() < until and any(one.poll() is None for one in processes):
            time.sleep(_LOOK)
    finally:
        for one in processes:
            one.kill()
            one.wait()
    return [one.returncode for one in processes]


def _waited_for(address: tuple[str, int], key: bytes, rank: int, host: str) -> Link:
    """The link to an engine that takes this rank; raises ConfigError where none will."""
    told: set[str] = set()
    while True:
        try:
            return join_group(address, key, rank, host)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            if why not in told:
                told.add(why)
                _say(rank, f"waits for an engine at {name_of_address(address)} ({why})")
            time.sleep(_AGAIN)


def _of_variables() -> str:
    """The master as torchrun's variables have it; raises UsageError where they are not set."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise click.UsageError("no --master is given, nor MASTER_ADDR and MASTER_PORT; give one")
    return name_of_address((host, port))


def _say(rank: int, what: str) -> None:
    click.echo(f"specinfer follow: rank {rank}: {what}", err=True)


def _terminate(*_: object) -> None:
    raise SystemExit(_TERMINATED)
