"""`specinfer follow`: ranks of a model whose rank 0 runs on another host, for one engine after another."""

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

from specinfer.cli.options import Command, complete_model
from specinfer.errors import ConfigError
from specinfer.option import name_of_address, parse_address
from specinfer.parallel.listener import CANNOT_LOAD, PEER_LOST, join_group
from specinfer.parallel.processes import spawn
from specinfer.transport.link import Link, read_key

_RETRY_SECONDS: Final = 0.5  # between attempts to connect to the master
_POLL_SECONDS: Final = 0.05  # between checks that processes live
_GRACE_SECONDS: Final = 1.0  # for the other processes when one has ended
_TERMINATED: Final = 128 + signal.SIGTERM
_ENDS: Final = {
    0: "the engine has ended",
    CANNOT_LOAD: "it could not load the model",
    PEER_LOST: "another rank was lost",
}


@click.command(cls=Command)
@click.argument("model", shell_complete=complete_model)
@click.option(
    "--rank", type=click.IntRange(1), required=True, envvar="RANK", help="First rank here: 1, 2, ..."
)
@click.option("--master", metavar="HOST:PORT", help="Address of rank 0, as its own --master.")
@click.option("--key-file", required=True, metavar="FILE", help="File with the shared key.")
@click.option(
    "--local-ranks",
    type=click.IntRange(1),
    default=1,
    help="Ranks of this host, from --rank on.",
)
def follow(model: str, rank: int, master: str | None, key_file: str, local_ranks: int) -> None:
    """Compute a part of MODEL for an engine on another host.

    MODEL must be the model of the engine at --master. The command waits for the engine, computes until the
    engine ends, and waits for the next one, until a signal ends it. Without --rank and --master the variables
    RANK, MASTER_ADDR and MASTER_PORT are used.

    Exit statuses: 2, an option is wrong, or the engine has another key or no such rank; 130, Ctrl-C;
    143, SIGTERM.
    """
    from specinfer.hub import resolve
    from specinfer.progress import ProgressBar

    address = parse_address("master", master or _master_of_environment())
    key = read_key(key_file)
    path = resolve(model, progress=ProgressBar()).path.resolve()
    ranks = range(rank, rank + local_ranks)
    signal.signal(signal.SIGTERM, _terminate)
    while True:
        host, links = secrets.token_hex(16), list[Link]()
        for one in ranks:
            links.append(_wait_for_engine(address, key, one, host))
        for one in ranks:
            _log(one, f"follows the engine at {name_of_address(address)}")
        try:
            status = _run(links, ranks, path, key_file)
        except OSError as error:  # out of memory or processes; the engine sees its links close
            ends = [f"its process cannot be started: {error}" for _ in ranks]
        else:
            ends = [_ENDS.get(found, f"its process has ended with status {found}") for found in status]
        for one, end in zip(ranks, ends, strict=True):
            _log(one, end)
        time.sleep(_RETRY_SECONDS)


def _run(links: Sequence[Link], ranks: Sequence[int], path: Path, key_file: str) -> list[int]:
    """Run each rank in a process until one of them ends; returns their exit statuses.

    Raises OSError if a process cannot be started; the others are then killed.
    """
    memory: dict[int, int] = {}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        try:
            if len(ranks) > 1:  # any of them may be the first of a stage
                from specinfer.kernels.exchange import shared_file

                memory |= {rank: shared_file() for rank in ranks}
            processes += (spawn(link.number, path, memory, key_file) for link in links)
        finally:
            for file in memory.values():
                os.close(file)
            for link in links:
                link.close()
        while all(one.poll() is None for one in processes):
            time.sleep(_POLL_SECONDS)
        until = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < until and any(one.poll() is None for one in processes):
            time.sleep(_POLL_SECONDS)
    finally:
        for one in processes:
            one.kill()
            one.wait()
    return [one.returncode for one in processes]


def _wait_for_engine(address: tuple[str, int], key: bytes, rank: int, host: str) -> Link:
    """Wait for an engine that takes this rank and return the link; raises ConfigError if it refuses."""
    logged: set[str] = set()
    while True:
        try:
            return join_group(address, key, rank, host)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            if why not in logged:
                logged.add(why)
                _log(rank, f"waits for an engine at {name_of_address(address)} ({why})")
            time.sleep(_RETRY_SECONDS)


def _master_of_environment() -> str:
    """The master's address in torchrun's variables; raises UsageError if they are not set."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise click.UsageError("the master is missing; give --master, or set MASTER_ADDR and MASTER_PORT")
    return name_of_address((host, port))


def _log(rank: int, what: str) -> None:
    click.echo(f"specinfer follow: rank {rank}: {what}", err=True)


def _terminate(*_: object) -> None:
    raise SystemExit(_TERMINATED)
