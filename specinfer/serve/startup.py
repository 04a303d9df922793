"""Startup of a server: load engines, tokenizer and observers in parallel into a Service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from typing import Final

from specinfer.config import EngineConfig
from specinfer.errors import ConfigError, UserError
from specinfer.hub.model_files import ModelFiles, sampling_defaults
from specinfer.sampling_params import usual_sampling
from specinfer.serve.api.service import Service
from specinfer.serve.backend.engine_child import EngineChild
from specinfer.serve.backend.replica_backend import ReplicaBackend
from specinfer.serve.backend.work import BackendError, Observe
from specinfer.serve.config import ServeConfig
from specinfer.serve.dialect.dialect import Dialect
from specinfer.serve.observe.metrics import Metrics
from specinfer.tokenizer import Tokenizer

_TRAFFIC_BYTES: Final = 256 << 20  # size at which the log of traffic is rotated


@asynccontextmanager
async def open_service(
    config: ServeConfig, engine: EngineConfig, child: EngineChild, files: ModelFiles
) -> AsyncIterator[Service]:
    """Open a Service whose engines run until the block ends, the first one in `child`.

    `files` are the files of the engines' model. Raises UserError if the first engine cannot start.
    """
    names = list(dict.fromkeys(config.served_model_name or [engine.model]))  # the default first
    if both := engine.adapters.keys() & set(names):
        raise ConfigError(f"{min(both)!r} names both the model and an adapter; rename the adapter")
    metrics = Metrics(names[0])
    backend = ReplicaBackend(
        engine,
        config.replicas,
        (config.log_level, config.log_format),
        child,
        max_wait=config.max_wait,
        timeout=config.engine_timeout,
    )
    starting = asyncio.ensure_future(backend.start())
    try:
        await asyncio.sleep(0)  # starting the engines takes seconds; the rest loads meanwhile
        import specinfer.serve.app  # noqa: F401 - callers build the application next

        tokenizer = Tokenizer.load(files, engine.chat_template)
        dialect = Dialect.of(tokenizer, config.call_format)
        with observers(config, names[0], metrics, tokenizer) as observing:
            yield Service(
                config,
                backend,
                tokenizer,
                await starting,
                dialect,
                models=names,
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
