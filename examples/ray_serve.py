"""Run the whole server as a Ray Serve deployment, with its autoscaling (pip install 'ray[serve]').

    python examples/ray_serve.py                 serves, sends itself one request, and ends
    serve run examples.ray_serve:deployment      serves on port 8000

Each replica has its own engine process. Ray Serve chooses the replica, so sessions do not reuse their prefix,
and a replica that dies loses its answers. `specinfer serve --cluster ray` has neither limit.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from ray import serve
from starlette.applications import Starlette

MODEL = "smollm2-135m"


def application() -> Starlette:
    """Return the server's application; its engine lives as long."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        from specinfer.config import EngineConfig
        from specinfer.hub.resolution import resolve
        from specinfer.serve.app import build_app
        from specinfer.serve.backend.engine_child import EngineChild
        from specinfer.serve.config import ServeConfig
        from specinfer.serve.http.access import Keys
        from specinfer.serve.startup import open_service

        config = ServeConfig(page=False)
        engine = EngineConfig.from_options(MODEL, {"quantization": "int8", "threads": 1})
        with EngineChild((config.log_level, config.log_format)) as child:
            async with open_service(config, engine, child, resolve(MODEL)) as service:
                app.mount("/", build_app(service, Keys([])))
                yield

    return Starlette(lifespan=lifespan)


@serve.deployment(
    ray_actor_options={"num_cpus": 1},
    autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 16},
)
@serve.ingress(application)
class SpecInfer:
    """One replica."""


deployment = SpecInfer.bind()

if __name__ == "__main__":
    serve.run(deployment)
    asked = {"messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 32}
    answer = httpx.post("http://127.0.0.1:8000/v1/chat/completions", json=asked, timeout=60)
    print(answer.json()["choices"][0]["message"]["content"])
    serve.shutdown()
