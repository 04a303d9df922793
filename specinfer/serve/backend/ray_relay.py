"""Processes of a server that talk to Ray, and what runs in its actors: the only module that loads ray.

    the server           a relay, a process beside it          an actor, on some node of the cluster
    a config, commands   ------------------------------->      EngineProcess, as in a process of its own
                         <-------------------------------      one stream of messages, and its log

A relay is to the server what the engine's own process is (engine_process.py): the same socket, the same
messages, the same end. It is a driver of Ray, whose actor and placement group end with it, however it ends:
Ray may end drivers when it loses its head, and must not end the server. Ray starts no actor again; the
server does, with a new relay. Ranks of a model are processes that the actor starts, on its node.

    python -m specinfer.serve.backend.ray_relay FD LEVEL FORMAT NAME ADDRESS CPUS    is a relay
    python -m specinfer.serve.backend.ray_relay FD ADDRESS                           tells of a cluster
    python -m specinfer.serve.backend.ray_relay FD =FOLDER                           keeps one until FD closes
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from specinfer.config import EngineConfig
from specinfer.kernels.machine import usable_cores
from specinfer.serve.backend import engine_process
from specinfer.serve.backend.cluster import reach
from specinfer.serve.config import configure
from specinfer.version import VERSION

_LOG = logging.getLogger(__name__)
_PLACING: Final = 30.0  # seconds that CPUs may take to become free, as those of an actor that has just ended
_STORE: Final = 80 << 20  # bytes for objects: messages are too small to be kept there
_CANNOT_START: Final = 2  # statuses of a relay: nothing was started,
_LOST: Final = 75  # and its actor has ended, a temporary failure
_MOST_SAID: Final = 300  # characters of what Ray says
_LINGER: Final = 0.2  # seconds for the last lines of a log, which an actor that ends would take along
_LOG_BYTES: Final = 1 << 16  # that are read of a log at once
_MESSAGES: Final = {"concurrency_group": "messages"}
_COMMANDS: Final = {"concurrency_group": "commands"}
_Said = list[tuple[bool, bytes]]  # messages as they lie on a socket; or, where it is True, text of the log


class EngineActor:
    """What an actor is: an engine with the commands and the messages of one in a process of its own."""

    def __init__(self) -> None:
        self._line, its = socket.socketpair()
        self._ours = Connection(self._line.dup().detach())
        self.connection = Connection(its.detach())  # the engine's

    def tell(self, command: bytes) -> None:
        """Hand a command on; an empty one hangs up."""
        with contextlib.suppress(OSError):  # the engine has ended
            if command:
                self._ours.send_bytes(command)
            else:
                self._line.shutdown(socket.SHUT_WR)

    def serve(self, config: bytes, log: tuple[str, str, str], folder: str, version: str) -> Iterator[_Said]:
        """Start the engine and give what it says, all that is there at a time, until it has ended."""
        if version != VERSION:
            raise RuntimeError(f"specinfer is {VERSION} on this node and {version} on the server's")
        reading, writing = os.pipe()
        os.dup2(writing, 2)  # of followers and native code, too
        os.close(writing)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        with contextlib.suppress(OSError):  # the server's folder, where this node has it
            os.chdir(folder)
        configure(*log)
        threading.Thread(target=self.run, args=(config,), name="engine", daemon=True).start()
        rest = b""  # of the log, whose lines are told whole: others write where they go
        while True:
            ready, said, ended = wait([self._ours, reading]), [], False
            if reading in ready:
                lines, end, rest = (rest + os.read(reading, _LOG_BYTES)).rpartition(b"\n")
                said += [(True, lines + end)] if lines else []
            try:
                while self._ours.poll(0):
                    said.append((False, self._ours.recv_bytes()))
            except (EOFError, OSError):
                ended = True
            if said:
                yield said
            if ended:
                return

    def run(self, config: bytes) -> None:
        """Be the engine, in a thread of its own."""
        try:
            engine_process.load_code()
            engine_process.run(self.connection, _fitted(pickle.loads(config)), linger=_LINGER)
        except BaseException:
            _LOG.exception("the engine ends")
        self.connection.close()


def _fitted(config: EngineConfig) -> EngineConfig:
    """The config with threads for the CPUs that this actor has: its share of the cores, a part a rank."""
    context = ray.get_runtime_context()
    cpus = context.get_assigned_resources()["CPU"]
    _LOG.info("an actor with %g CPUs of node %s", cpus, ray.util.get_node_ip_address())
    if config.threads is not None:
        return config
    [node] = [one for one in ray.nodes() if one["NodeID"] == context.get_node_id()]
    share = min(cpus, usable_cores() * cpus / node["Resources"]["CPU"])
    return replace(config, threads=max(1, int(share) // config.ranks))


def relay(connection: Connection, log: tuple[str, str, str], address: str, cpus: int) -> int:
    """Have an actor serve the config that comes first, until the server hangs up; returns a status."""
    try:
        config = connection.recv_bytes()
    except (EOFError, OSError):  # the server ended before it had a config
        return 0
    heard = False
    hung_up = threading.Event()
    try:
        connect(address)
        engine = placed(EngineActor, cpus)
        stream = engine.serve.options(num_returns="streaming", **_MESSAGES).remote(
            config, log, os.getcwd(), VERSION
        )
        telling = threading.Thread(target=_tell, args=(connection, engine, hung_up), daemon=True)
        telling.start()
        for reference in stream:
            for is_log, said in ray.get(reference):
                if is_log:
                    sys.stderr.write(said.decode(errors="replace"))
                else:
                    with contextlib.suppress(OSError):  # the server has hung up, and the engine hears of it
                        connection.send_bytes(said)
                    heard = True
    except Exception as error:  # of Ray's, there are many kinds
        if not heard:
            with contextlib.suppress(OSError):
                connection.send(("failed", _line(error)))
            return _CANNOT_START
        _LOG.error("the actor is lost: %s", _line(error))
        return _LOST
    return 0 if hung_up.is_set() else _LOST


def _tell(connection: Connection, engine: Any, hung_up: threading.Event) -> None:
    """The thread that hands commands on."""
    tell = engine.tell.options(**_COMMANDS)
    while True:
        try:
            tell.remote(connection.recv_bytes())
        except (EOFError, OSError):
            hung_up.set()
            tell.remote(b"")
            return


def connect(address: str) -> None:
    """Become a driver of the cluster at an address."""
    if not address:
        raise ConnectionError("no Ray cluster is named any more; start one with `ray start --head`")
    reach(address)
    ray.init(address=address, **_quiet())


def placed(kind: type, cpus: int) -> Any:
    """An actor with so many CPUs of one node, in a placement group of its own.

    Raises ConnectionError where no node has them; Ray would wait for ever.
    """
    group = placement_group([{"CPU": cpus}])
    if not group.wait(_PLACING):
        raise ConnectionError(
            f"no node of the Ray cluster has {cpus} free CPUs; that was waited for {_PLACING:g} seconds"
        )
    made = ray.remote(
        num_cpus=cpus,
        max_restarts=0,  # the server starts it again, with its works
        concurrency_groups={"messages": 1, "commands": 1},  # one thread each, which keeps their order
    )(kind)
    return made.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote()


def keep(connection: Connection, where: str) -> int:
    """Tell the address of a cluster and the free CPUs of its nodes; keep one's own until the server ends."""
    own, folder = where.startswith("="), where[1:]
    try:
        if own:
            found = ray.init(
                address="local",
                num_cpus=usable_cores(),
                object_store_memory=_STORE,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",  # on which it listens, too
                _temp_dir=folder,
                **_quiet(),
            )
            where = found.address_info["address"]
        else:
            connect(where)
        # Ray tells this of single nodes nowhere else.
        from ray._private.state import available_resources_per_node

        free = [float(node.get("CPU", 0)) for node in available_resources_per_node().values()]
    except Exception as error:
        connection.send((f"the Ray cluster cannot be used: {_line(error)}", "", []))
        return _CANNOT_START
    with contextlib.suppress(EOFError, OSError):
        connection.send(("", where, free))
        if own:
            connection.recv()  # nothing ever comes
    ray.shutdown()
    if own:
        shutil.rmtree(folder, ignore_errors=True)  # the server may have been killed
    return 0


def _quiet() -> dict[str, Any]:
    return {"log_to_driver": False, "configure_logging": False, "logging_level": "ERROR"}


def _line(error: Exception) -> str:
    """What Ray says, in a line."""
    cause = error.__cause__ if isinstance(error, RayError) and error.__cause__ is not None else error
    said = " ".join(str(cause).split())
    for behind in ("The actor is dead because ", "Worker exit detail: "):
        said = said.rpartition(behind)[2]
    return said.partition(" There are some potential root causes")[0][:_MOST_SAID] or repr(cause)


def main() -> None:
    """Be one of them, at the other end of an inherited socket."""
    number, *rest = sys.argv[1:]
    connection = Connection(socket.socket(fileno=int(number)).detach())
    # Ray's own processes and libraries write to the descriptor, many lines where they end.
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    if len(rest) == 1:
        os._exit(keep(connection, rest[0]))
    threading.Thread(target=engine_process.end_with, args=(os.getppid(),), daemon=True).start()
    level, form, name, address, cpus = rest
    log = (form, level, name)
    configure(*log)
    os._exit(relay(connection, log, address, int(cpus)))  # the rest of Ray ends with it


if __name__ == "__main__":
    from specinfer.serve.backend.ray_relay import main as run  # actors are of a class that nodes can import

    run()
