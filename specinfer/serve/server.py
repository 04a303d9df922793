"""The server as a process: it starts the engine, listens, drains when it is told to end."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from specinfer.config import EngineConfig
from specinfer.errors import ConfigError, UserError
from specinfer.hub.model_files import ModelFiles
from specinfer.hub.resolution import resolve
from specinfer.progress import Progress
from specinfer.serve.access import Keys
from specinfer.serve.api_error import ApiError
from specinfer.serve.backend import BackendError
from specinfer.serve.config import ServeConfig
from specinfer.serve.dialect import Dialect
from specinfer.serve.engine_child import EngineChild
from specinfer.serve.hosts import Hosts, is_loopback
from specinfer.serve.logs import configure
from specinfer.serve.metrics import Metrics
from specinfer.serve.observer import observers
from specinfer.serve.process_backend import ProcessBackend
from specinfer.serve.service import Service
from specinfer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fastapi import FastAPI

_LOG = logging.getLogger(__name__)
_NO_HTTP: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"connection: close\r\n\r\n%b"
)
_MOST_QUEUED: Final = 16  # requests of one connection; of others nothing is read before one is answered
_ENDING: Final = (signal.SIGTERM, signal.SIGINT)
_FAREWELL_SECONDS: Final = 0.2  # for a load balancer to see that the server is not ready


def serve(
    config: ServeConfig,
    engine: EngineConfig,
    child: EngineChild,
    progress: Progress,
    ready: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT, with the engine in `child`; `ready` gets the URL when it listens.

    Raises UserError, before the port opens, for a port that is taken, a model that is missing, and whatever
    else the engine cannot be started with.
    """
    configure(config.log_format, config.log_level, "server")
    keys = Keys(read_keys(config))
    with listen(config) as listener:
        if not keys and not is_loopback(listener.getsockname()[0]):
            _LOG.warning(
                "%s can be reached from other machines, and anybody may use this server: give --api-key",
                config.host,
            )
        files = resolve(engine.model, progress=progress)
        asyncio.run(_serve(config, engine, child, keys, listener, files, ready))


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
    child: EngineChild,
    keys: Keys,
    listener: socket.socket,
    files: ModelFiles,
    ready: Callable[[str], None],
) -> None:
    names = list(dict.fromkeys(config.served_model_name or [engine.model]))  # the usual one first
    metrics = Metrics(names[0])
    backend = ProcessBackend(engine, (config.log_level, config.log_format), child)
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
            host, port = listener.getsockname()[:2]
            hosts = Hosts.of(config.host, config.allowed_host, keyed=bool(keys), address=host)

            def crowded() -> bool:
                return len(server.server_state.connections) > config.max_connections

            server = _Server(_uvicorn_config(config, build_app(service, keys, hosts, crowded)), service)
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
        """SIGTERM and Ctrl-C drain, and the process ends with 0; uvicorn's own would raise them again.

        The event loop does not watch for them: it loses a signal while the pipe that wakes it is full, as it
        is where an engine has told of hundreds of steps since the loop last looked.
        """
        earlier = {number: signal.signal(number, self.handle_exit) for number in _ENDING}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.draining = True
        await asyncio.sleep(_FAREWELL_SECONDS)
        await super().shutdown(sockets)


def _protocol(idle: float) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, which waits neither for half a request nor for a reader that takes nothing.

    And which tells the request that is being answered when the client goes away: where a client sends several
    at once, uvicorn tells the last one alone, which waits behind it. What is no HTTP is told so as any other
    fault is.
    """

    class Patient(HttpToolsProtocol):
        _waiting: asyncio.TimerHandle | None = None  # for the rest of a request's headers
        _stuck: asyncio.TimerHandle | None = None  # since the client takes nothing

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._unanswered: deque[RequestResponseCycle] = deque()  # in the order in which they came

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._wait()

        def on_headers_complete(self) -> None:
            _cancel(self._waiting)
            earlier = self.cycle
            super().on_headers_complete()
            if self.cycle is not earlier:
                self._unanswered.append(self.cycle)
            if len(self._unanswered) <= _MOST_QUEUED:
                # uvicorn stops reading behind a second one, and then hears of no end either.
                self.flow.resume_reading()

        def on_response_complete(self) -> None:
            self._unanswered.popleft()
            super().on_response_complete()

        def send_400_response(self, msg: str) -> None:
            error = ApiError(f"{msg} Send HTTP/1.1 requests to this port; TLS is a proxy's.")
            body = json.dumps(error.body).encode()
            self.transport.write(_NO_HTTP % (len(body), body))
            self.transport.close()

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
            for cycle in self._unanswered:
                cycle.disconnected = True
                cycle.message_event.set()
            super().connection_lost(exc)

        def _wait(self) -> None:
            _cancel(self._waiting)
            self._waiting = self.loop.call_later(idle, self._give_up)

        def _give_up(self) -> None:
            if self._unanswered:
                self._wait()  # it is we who keep it waiting: an earlier request is being answered
            else:
                self.transport.close()

    return Patient


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
