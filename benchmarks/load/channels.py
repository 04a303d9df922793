"""Measures the cost of a message from an engine to the server: a process on the host, or a Ray actor.

A fake engine sends deltas of 16 works at SmolLM2's step rate, each message with its time of sending. Run it
with `python -m benchmarks.load.replicas --only channel`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from specinfer.config import EngineConfig
from specinfer.request import Delta
from specinfer.serve.backend.cluster import Cluster
from specinfer.serve.backend.engine_child import EngineChild
from specinfer.serve.backend.work import EngineInfo

WORKS = 16  # works per message
_QUESTIONS = 200
_MODULE = "benchmarks.load.channels"
_LOADED = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}


def talk(connection: Connection) -> None:
    """Act as the engine: answer questions, and on the command "talk" send messages at a fixed rate."""
    connection.send(("ready", EngineInfo(10, 10)))
    while True:
        try:
            command, argument = connection.recv()
        except (EOFError, OSError):
            return
        if command == "ask":
            connection.send(("answer", argument, None))
            continue
        count, every = argument
        begun, used = time.monotonic(), time.process_time()
        for number in range(count):
            time.sleep(max(0.0, begun + number * every - time.monotonic()))
            deltas = [Delta(f"cmpl-{number:032}-{n}", " word", (number,)) for n in range(WORKS)]
            connection.send(("deltas", deltas, time.monotonic()))
        connection.send(("done", time.process_time() - used, None))


class Beside:
    """Replaces a Cluster: the process beside the server sends messages itself."""

    relay = (_MODULE,)
    env = {**os.environ, **_LOADED}


class OnRay(Cluster):
    """A cluster whose actors send messages."""

    @property
    def relay(self) -> tuple[str, ...]:
        return (_MODULE, *super().relay[1:])


async def measured(cluster: Any, messages: int, every: float) -> dict[str, float]:
    """Return the lag of messages and questions, and their CPU cost in this process, its child and the
    sender.
    """
    loop = asyncio.get_running_loop()
    lags: list[float] = []
    questions: dict[int, asyncio.Future[None]] = {}
    done: asyncio.Future[float] = loop.create_future()

    def deliver(child: EngineChild, message: tuple[Any, ...]) -> None:
        kind, said, sent = message
        if kind == "deltas":
            lags.append(time.monotonic() - sent)
        elif kind == "answer":
            questions[said].set_result(None)
        else:
            done.set_result(said)

    with EngineChild(("warning", "text"), cluster=cluster) as child:
        await child.start(EngineConfig(model="none"), loop, deliver, lambda _: None)
        rounds = []
        for number in range(_QUESTIONS):
            questions[number] = loop.create_future()
            asked = time.monotonic()
            child.send(("ask", number))
            await questions[number]
            rounds.append(time.monotonic() - asked)
        process = psutil.Process(child.pid)
        before, used = process.cpu_times(), time.process_time()
        child.send(("talk", (messages, every)))
        talker = await done
        after = process.cpu_times()
        server = time.process_time() - used
        relay = after.user + after.system - before.user - before.system
        await child.close()
    lags.sort()
    rounds.sort()
    return {
        "lag": lags[len(lags) // 2],
        "lag_p99": lags[int(0.99 * len(lags))],
        "answer": rounds[len(rounds) // 2],
        "server_cpu": server / messages,
        "process_cpu": relay / messages,
        "talker_cpu": talker / messages,
    }


def measure(kind: str, messages: int = 1000, every: float = 0.02) -> dict[str, float]:
    """Return the figures of a channel, "process" or "ray", in seconds per message."""
    if kind == "process":
        return asyncio.run(measured(Beside(), messages, every))
    os.environ.update(_LOADED)
    with OnRay(EngineConfig(model="none", threads=1), 1) as cluster:
        return asyncio.run(measured(cluster, messages, every))


def main() -> None:
    """Send messages, or be the relay of an actor that does."""
    if len(sys.argv) == 5:
        connection = Connection(int(sys.argv[1]))
        connection.recv()  # the config
        talk(connection)
    else:  # without a cluster Ray is never imported
        from specinfer.serve.backend import ray_relay

        class Talker(ray_relay.EngineActor):
            def run(self, config: bytes) -> None:
                talk(self.connection)
                self.connection.close()

        placed = ray_relay.start_actor
        ray_relay.start_actor = lambda kind, cpus: placed(Talker, cpus)
        ray_relay.main()


if __name__ == "__main__":
    main()
