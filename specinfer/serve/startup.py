"""Startup of a server: load engines, tokenizer and observers in parallel into a Service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from functools import partial
from typing import Final

from specinfer.errors import ConfigError, UserError
from specinfer.hub.model_files import ModelFiles, sampling_defaults
from specinfer.sampling_params import usual_sampling
from specinfer.serve.api.service import Service
from specinfer.serve.backend.engine_child import EngineChild
from specinfer.serve.backend.replica_backend import ReplicaBackend
from specinfer.serve.backend.work import BackendError, EngineInfo, Observe
from specinfer.serve.config import ServeConfig, ServedModel
from specinfer.serve.dialect.dialect import Dialect
from specinfer.serve.model_pool import MakeRoom, ModelPool
from specinfer.serve.observe.metrics import Metrics
from specinfer.tokenizer import Tokenizer

_TRAFFIC_BYTES: Final = 256 << 20  # size at which the log of traffic is rotated


@asynccontextmanager
async def open_service(
    config: ServeConfig,
    model: ServedModel,
    files: ModelFiles,
    metrics: Metrics,
    make_room: MakeRoom | None = None,
    child: EngineChild | None = None,
) -> AsyncIterator[Service]:
    """Open the Service of a model whose engines run until the block ends, the first one in `child` if given.

    `files` are the model's. `make_room` is awaited before an engine loads them. Raises UserError if the first
    engine cannot start.
    """
    engine, log = model.engine, (config.log_level, config.log_format)
    with child or EngineChild(log) as first:  # it imports the engine's code while room is made
        backend = ReplicaBackend(
            engine, config.replicas, log, first, max_wait=config.max_wait, timeout=config.engine_timeout
        )
        starting = asyncio.ensure_future(_start(backend, make_room))
        try:
            await asyncio.sleep(0)  # starting the engines takes seconds; the rest loads meanwhile
            import specinfer.serve.app  # noqa: F401 - callers build the application next

            # In threads, as other models answer meanwhile.
            tokenizer = await asyncio.to_thread(Tokenizer.load, files, engine.chat_template)
            dialect = await asyncio.to_thread(Dialect.of, tokenizer, config.call_format)
            with observers(config, model.names[0], metrics, tokenizer) as observing:
                yield Service(
                    config,
                    backend,
                    tokenizer,
                    await starting,
                    dialect,
                    models=model.names,
                    adapters=list(engine.adapters),
                    batch=engine.scheduler.max_batch_size * config.replicas,
                    metrics=metrics,
                    observers=observing,
                    sampling=usual_sampling(
                        sampling_defaults(files) if engine.generation_config == "auto" else {}
                    ),
                )
        except BackendError as error:
            raise UserError(str(error)) from None
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await backend.close()


async def _start(backend: ReplicaBackend, make_room: MakeRoom | None) -> EngineInfo:
    if make_room is not None:
        await make_room()
    return await backend.start()


@asynccontextmanager
async def open_pool(
    config: ServeConfig, models: Sequence[ServedModel], files: ModelFiles | None, child: EngineChild | None
) -> AsyncIterator[ModelPool]:
    """Open the models of a server until the block ends.

    A single one, of these `files`, is loaded at once, with its first engine in `child`. Raises UserError if
    it cannot start.
    """
    if files is not None:
        [model] = models
        async with open_service(config, model, files, Metrics(model.names[0]), child=child) as service:
            yield ModelPool.of(service, model)
        return
    import specinfer.serve.app  # noqa: F401 - callers build the application next

    pool = ModelPool.of_several(config, models, partial(open_service, config))
    try:
        yield pool
    finally:
        await pool.close()


@contextmanager
def observers(
    config: ServeConfig, model: str, metrics: Metrics, tokenizer: Tokenizer
) -> Iterator[Sequence[Observe]]:
    """Open the observers that the options select, until the block ends; raises ConfigError."""
    found: list[Observe] = []
    with ExitStack() as opened:
        if config.log_traffic is not None:
            from specinfer.serve.observe.traffic_log import TrafficLog

            log = TrafficLog(
                config.log_traffic,
                _TRAFFIC_BYTES,
                model=model,
                tokenizer=tokenizer,
                lost=metrics.traffic_log_lost.inc,
            )
            found.append(opened.enter_context(closing(log)).observe)
        if config.otlp_endpoint is not None:
            try:
                from specinfer.serve.observe.spans import open_spans

                spans = open_spans(config.otlp_endpoint, model)
            except ImportError as error:
                raise ConfigError(
                    f"{error.name} is not installed; otlp_endpoint needs it: pip install 'specinfer[otel]'"
                ) from None
            found.append(opened.enter_context(closing(spans)).observe)
        yield found
