"""The server as a process: it starts the engine, listens, drains when it is told to end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from specinfer.config import EngineConfig
from specinfer.errors import ConfigError, UserError
from specinfer.hub.model_files import ModelFiles
from specinfer.hub.resolution import resolve
from specinfer.progress import Progress
from specinfer.serve.access import Keys
from specinfer.serve.backend import BackendError
from specinfer.serve.config import ServeConfig
from specinfer.serve.dialect import Dialect
from specinfer.serve.logs import configure
from specinfer.serve.metrics import Metrics
from specinfer.serve.observer import observers
from specinfer.serve.process_backend import ProcessBackend
from specinfer.serve.service import Service
from specinfer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fastapi import FastAPI

_LOG = logging.getLogger(__name__)
_FAREWELL_SECONDS: Final = 0.2  # for a load balancer to see that the server is not ready


def serve(
    config: ServeConfig, engine: EngineConfig, progress: Progress, ready: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT; `ready` gets the server's URL when it listens.

    Raises UserError, before the port opens, for a port that is taken, a model that is missing, and whatever
    else the engine cannot be started with.
    """
    configure(config.log_format, config.log_level, "server")
    keys = Keys(read_keys(config))
    if not keys and not config.loopback:
        _LOG.warning(
            "%s can be reached from other machines, and anybody may use this server: give --api-key",
            config.host,
        )
    with listen(config) as listener:
        files = resolve(engine.model, progress=progress)
        asyncio.run(_serve(config, engine, keys, listener, files, ready))


def read_keys(config: ServeConfig) -> list[str]:
    """The keys of the options and of their file; raises ConfigError where it cannot be read."""
    keys = list(config.api_key)
    if config.api_key_file is not None:
        try:
            lines = Path(config.api_key_file).read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
            raise ConfigError(f"cannot read api_key_file {config.api_key_file}: {reason}") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ConfigError(f"api_key_file {config.api_key_file} has no key; write one to a line")
        keys += found
    return keys


def listen(config: ServeConfig) -> socket.socket:
    """A socket bound to the port, on which nobody is listened to yet; raises ConfigError."""
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        bound = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"host {config.host!r} is no address: {error.strerror or error}") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}; give another --port"
        ) from None
    bound.set_inheritable(True)
    return bound


async def _serve(
    config: ServeConfig,
    engine: EngineConfig,
    keys: Keys,
    listener: socket.socket,
    files: ModelFiles,
    ready: Callable[[str], None],
) -> None:
    names = list(dict.fromkeys(config.served_model_name or [engine.model]))  # the usual one first
    metrics = Metrics(names[0])
    backend = ProcessBackend(engine, (config.log_level, config.log_format))
    starting = asyncio.ensure_future(backend.start())
    try:
        await asyncio.sleep(0)  # it takes seconds, and these are loaded meanwhile
        from specinfer.serve.app import build_app

        tokenizer = Tokenizer.load(files)
        dialect = Dialect.of(tokenizer, config.call_format)
        with observers(config, names[0], metrics, tokenizer) as observing:
            service = Service(
                config,
                backend,
                tokenizer,
                await starting,
                dialect,
                models=names,
                batch=engine.scheduler.max_batch_size,
                metrics=metrics,
                observers=observing,
            )
            server = _Server(_uvicorn_config(config, build_app(service, keys)), service)
            host, port = listener.getsockname()[:2]
            server.on_ready = lambda: ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
            await server.serve(sockets=[listener])
    except BackendError as error:
        raise UserError(str(error)) from None
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await backend.close()


def _uvicorn_config(config: ServeConfig, app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_protocol(config.idle_timeout),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=config.max_connections,
        timeout_keep_alive=max(1, int(config.idle_timeout)),
        timeout_graceful_shutdown=max(1, int(config.grace)),
        root_path=config.root_path,
    )


class _Server(uvicorn.Server):
    """uvicorn's, which stops taking work first when it is told to end."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self.on_ready: Callable[[], None] = lambda: None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C drain, and the process ends with 0; uvicorn's own would raise them again."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.draining = True
        await asyncio.sleep(_FAREWELL_SECONDS)
        await super().shutdown(sockets)


def _protocol(idle: float) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, which waits neither for half a request nor for a reader that takes nothing."""

    class Patient(HttpToolsProtocol):
        _waiting: asyncio.TimerHandle | None = None  # for the rest of a request's headers
        _stuck: asyncio.TimerHandle | None = None  # since the client takes nothing

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._wait()

        def on_headers_complete(self) -> None:
            _cancel(self._waiting)
            super().on_headers_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            # Access lets go of it before; a transport that is closed would still wait for it to read.
            self._stuck = self.loop.call_later(2 * idle, self.transport.abort)

        def resume_writing(self) -> None:
            _cancel(self._stuck)
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            _cancel(self._waiting)
            _cancel(self._stuck)
            super().connection_lost(exc)

        def _wait(self) -> None:
            _cancel(self._waiting)
            self._waiting = self.loop.call_later(idle, self._give_up)

        def _give_up(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self._wait()  # it is we who keep it waiting: an earlier request is being answered
            else:
                self.transport.close()

    return Patient


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
