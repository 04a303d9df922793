"""Ray processes of a server, and the engine actor: the only module that loads ray.

    server               relay, a child process                actor, on some node of the cluster
    config, commands     ------------------------------->      EngineProcess
                         <-------------------------------      one stream of messages, and the log

For the server a relay looks like an engine process (engine_process.py): same socket, messages and exit. It is
a Ray driver, and its actor and placement group end with it. It is a separate process because Ray may end
drivers when the cluster's head is lost, and must not end the server. The server restarts actors, each
with a new relay; Ray restarts none. The actor starts the ranks of its model on its own node.

    python -m specinfer.serve.backend.ray_relay FD LEVEL FORMAT NAME ADDRESS CPUS    relay to an actor
    python -m specinfer.serve.backend.ray_relay ADDRESS                              query a cluster
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
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
_PLACING: Final = 30.0  # seconds to wait for CPUs that an ended actor returns
_CANNOT_START: Final = 2  # exit status of a relay that started nothing
_LOST: Final = 75  # exit status of a relay whose actor has ended (EX_TEMPFAIL)
_MAX_REASON: Final = 300  # characters of an error message of Ray
_LINGER: Final = 0.2  # seconds to send the last log lines before the actor exits
_LOG_BYTES: Final = 1 << 16  # read from the log at once
_MESSAGES: Final = {"concurrency_group": "messages"}
_COMMANDS: Final = {"concurrency_group": "commands"}
_Output = list[tuple[bool, bytes]]  # (False, pickled message) or (True, log text)


class EngineActor:
    """Ray actor that runs an engine, with the commands and messages of an engine process."""

    def __init__(self) -> None:
        self._line, its = socket.socketpair()
        self._ours = Connection(self._line.dup().detach())
        self.connection = Connection(its.detach())  # the engine's end

    def send(self, command: bytes) -> None:
        """Forward a command to the engine; an empty one closes its socket."""
        with contextlib.suppress(OSError):  # the engine has ended
            if command:
                self._ours.send_bytes(command)
            else:
                self._line.shutdown(socket.SHUT_WR)

    def serve(self, config: bytes, log: tuple[str, str, str], folder: str, version: str) -> Iterator[_Output]:
        """Start the engine and yield its messages and log lines in batches, until it has ended."""
        if version != VERSION:
            raise RuntimeError(f"specinfer is {VERSION} on this node and {version} on the server's")
        reading, writing = os.pipe()
        os.dup2(writing, 2)  # collects the stderr of native code and of the other ranks, too
        os.close(writing)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        with contextlib.suppress(OSError):  # the server's folder, if this node has it
            os.chdir(folder)
        configure(*log)
        threading.Thread(target=self.run, args=(config,), name="engine", daemon=True).start()
        rest = b""  # start of an unfinished log line: only whole lines are sent
        while True:
            ready, output, ended = wait([self._ours, reading]), [], False
            if reading in ready:
                lines, end, rest = (rest + os.read(reading, _LOG_BYTES)).rpartition(b"\n")
                output += [(True, lines + end)] if lines else []
            try:
                while self._ours.poll(0):
                    output.append((False, self._ours.recv_bytes()))
            except (EOFError, OSError):
                ended = True
            if output:
                yield output
            if ended:
                return

    def run(self, config: bytes) -> None:
        """Run the engine, in a thread; closes the connection at its end."""
        try:
            engine_process.load_code()
            engine_process.run(self.connection, _fitted(pickle.loads(config)), linger=_LINGER)
        except BaseException:
            _LOG.exception("the engine ends")
        self.connection.close()


def _fitted(config: EngineConfig) -> EngineConfig:
    """The config with `threads` set to this actor's share of the node's cores, divided among its ranks."""
    context = ray.get_runtime_context()
    cpus = context.get_assigned_resources()["CPU"]
    _LOG.info("an actor with %g CPUs of node %s", cpus, ray.util.get_node_ip_address())
    if config.threads is not None:
        return config
    [node] = [one for one in ray.nodes() if one["NodeID"] == context.get_node_id()]
    share = min(cpus, usable_cores() * cpus / node["Resources"]["CPU"])
    return replace(config, threads=max(1, int(share) // config.ranks))


def relay(connection: Connection, log: tuple[str, str, str], address: str, cpus: int) -> int:
    """Serve the config that comes first in an actor, until the server hangs up; returns the exit status."""
    try:
        config = connection.recv_bytes()
    except (EOFError, OSError):  # the server ended before it had a config
        return 0
    replied = False
    hung_up = threading.Event()
    try:
        connect(address)
        engine = start_actor(EngineActor, cpus)
        stream = engine.serve.options(num_returns="streaming", **_MESSAGES).remote(
            config, log, os.getcwd(), VERSION
        )
        threading.Thread(target=_forward, args=(connection, engine, hung_up), daemon=True).start()
        for reference in stream:
            for is_log, output in ray.get(reference):
                if is_log:
                    sys.stderr.write(output.decode(errors="replace"))
                else:
                    with contextlib.suppress(OSError):  # the server hung up; `_forward` does so too
                        connection.send_bytes(output)
                    replied = True
    except Exception as error:  # Ray raises many kinds
        if not replied:
            with contextlib.suppress(OSError):
                connection.send(("failed", _line(error)))
            return _CANNOT_START
        _LOG.error("the actor is lost: %s", _line(error))
        return _LOST
    return 0 if hung_up.is_set() else _LOST


def _forward(connection: Connection, engine: Any, hung_up: threading.Event) -> None:
    """Forward the server's commands to the actor, in a thread."""
    send = engine.send.options(**_COMMANDS)
    while True:
        try:
            send.remote(connection.recv_bytes())
        except (EOFError, OSError):
            hung_up.set()
            send.remote(b"")
            return


def connect(address: str) -> None:
    """Connect this process to the cluster at an address, as a driver."""
    reach(address)
    ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level="ERROR")


def start_actor(kind: type, cpus: int) -> Any:
    """Start an actor with `cpus` CPUs of one node, in its own placement group.

    Raises ConnectionError if no node has them free within 30 seconds; Ray would wait without limit.
    """
    group = placement_group([{"CPU": cpus}])
    if not group.wait(_PLACING):
        raise ConnectionError(
            f"no node of the Ray cluster had {cpus} free CPUs within {_PLACING:g} seconds; stop other work "
            "on it, add a node, or give fewer threads or ranks"
        )
    made = ray.remote(
        num_cpus=cpus,
        max_restarts=0,  # the server restarts it and sends its works again
        concurrency_groups={"messages": 1, "commands": 1},  # one thread each, so that their order stays
    )(kind)
    return made.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote()


def query(address: str) -> int:
    """Print the free CPUs of a cluster's nodes as JSON, or why it cannot be used; returns the exit status."""
    try:
        connect(address)
        # Ray has no public function that returns free CPUs by node.
        from ray._private.state import available_resources_per_node

        free = [float(node.get("CPU", 0)) for node in available_resources_per_node().values()]
    except Exception as error:
        print(f"the Ray cluster cannot be used: {_line(error)}", flush=True)
        return _CANNOT_START
    print(json.dumps(free), flush=True)
    return 0


def _line(error: Exception) -> str:
    """The cause of an error of Ray, in one line."""
    cause = error.__cause__ if isinstance(error, RayError) and error.__cause__ is not None else error
    reason = " ".join(str(cause).split())
    for behind in ("The actor is dead because ", "Worker exit detail: "):
        reason = reason.rpartition(behind)[2]
    return reason.partition(" There are some potential root causes")[0][:_MAX_REASON] or repr(cause)


def main() -> None:
    """Query a cluster, or relay messages on an inherited socket."""
    # Ray's processes and libraries write many lines to descriptor 2 at their end: keep them out of the log.
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    if len(sys.argv) == 2:
        os._exit(query(sys.argv[1]))
    number, level, form, name, address, cpus = sys.argv[1:]
    connection = Connection(socket.socket(fileno=int(number)).detach())
    threading.Thread(target=engine_process.end_with, args=(os.getppid(),), daemon=True).start()
    log = (form, level, name)
    configure(*log)
    os._exit(relay(connection, log, address, int(cpus)))  # ends Ray's threads as well


if __name__ == "__main__":
    # Nodes have to be able to import the actor's class, so it may not be __main__'s.
    from specinfer.serve.backend.ray_relay import main as run

    run()
