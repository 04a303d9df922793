"""Shows a Ray Serve client's stream when its replica is killed: python -m benchmarks.load.ray_serve_stream

A deployment of two replicas streams 400 lines, 20 ms apart; the streaming replica is killed after 100. It
needs ray[serve]. `python -m benchmarks.load.replicas --only kills` does the same to our replicas.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import httpx
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from ray import serve

LINES, EVERY, KILLED_AT = 400, 0.02, 100
app = FastAPI()


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.5})
@serve.ingress(app)
class Streams:
    """A replica."""

    @app.get("/")
    async def lines(self) -> StreamingResponse:
        async def numbers() -> AsyncIterator[str]:
            for number in range(LINES):
                yield f"{os.getpid()} {number}\n"
                await asyncio.sleep(EVERY)

        return StreamingResponse(numbers())


def main() -> None:
    serve.run(Streams.bind())  # type: ignore[attr-defined]  # a deployment is more than its class
    got, ended, killed = 0, "as a whole answer ends", 0.0
    try:
        with httpx.stream("GET", "http://127.0.0.1:8000/", timeout=60) as answer:
            for line in answer.iter_lines():
                got += 1
                if got == KILLED_AT:
                    killed = time.monotonic()
                    os.kill(int(line.split()[0]), signal.SIGKILL)
    except httpx.HTTPError as error:
        ended = f"with {error!r}"
    seconds = time.monotonic() - killed
    summary = f"status {answer.status_code}: {got} of {LINES} lines"
    print(f"{summary}; the stream ended {ended}, {seconds:.2f} s later")
    serve.shutdown()


if __name__ == "__main__":
    main()
