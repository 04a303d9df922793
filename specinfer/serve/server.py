"""The server process: starts the engine, listens, drains on SIGTERM and hands over its port on SIGHUP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvicorn

from specinfer.errors import ConfigError
from specinfer.hub.resolution import resolve
from specinfer.progress import Progress
from specinfer.serve.backend.engine_child import EngineChild
from specinfer.serve.config import ServeConfig, ServedModel, configure, is_loopback
from specinfer.serve.handover import Inheritance, Successor, has_terminal
from specinfer.serve.http.access import Hosts, Keys
from specinfer.serve.model_pool import ModelPool
from specinfer.serve.startup import open_pool

if TYPE_CHECKING:
    from starlette.applications import Starlette

_LOG = logging.getLogger(__name__)
_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_ROLLING: Final = signal.SIGUSR1  # replaces the engines
_CLOSING: Final = (b"connection", b"close")  # header of answers after which a connection ends
_LINGER_SECONDS: Final = 1.0  # in which clients of a server that is replaced may close their connections
_MAX_HEAD: Final = 32 << 10  # bytes of a request line and headers, or between two pieces of a body
_UNREADY_SECONDS: Final = 0.2  # so that a load balancer sees that the server is not ready
_CUT: Final = "the server shut down before the answer was complete; send the request again"
_CUT_SECONDS: Final = 2.0  # for the error events of cut answers to be sent


def serve(
    config: ServeConfig,
    models: Sequence[ServedModel],
    child: EngineChild | None,
    progress: Progress,
    ready: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT, one model with the first engine in `child`; calls `ready` with the URL.

    Raises UserError, before the port opens, if the port is taken, or if a single model is missing or its
    engine cannot start. Several models start at their first requests.
    """
    configure(config.log_format, config.log_level, "server")
    names = ", ".join(one.names[0] for one in models)
    _LOG.info(
        "starting: %s %s", "the models" if len(models) > 1 else "the engine's code, then the model", names
    )
    signal.signal(_ROLLING, signal.SIG_IGN)  # until the engines run
    keys = Keys(read_keys(config))
    inherited = Inheritance.take()
    with listen(config) if inherited is None else inherited.listener as listener:
        if not keys and not is_loopback(listener.getsockname()[0]):
            _LOG.warning(
                "%s can be reached from other machines, and requests need no key: give --api-key",
                config.host,
            )
        files = None if len(models) > 1 else resolve(models[0].engine.model, progress=progress)

        async def run() -> None:
            async with open_pool(config, models, files, child) as pool:
                from specinfer.serve.app import build_app  # loaded while the engine started

                host, port = listener.getsockname()[:2]
                hosts = Hosts.of(config.host, config.allowed_host, keyed=bool(keys), address=host)
                server = _Server(_uvicorn_config(config, build_app(pool, keys, hosts)), pool)
                url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
                server.on_ready = lambda: _report_ready(ready, pool, names, url, inherited)
                await server.serve(sockets=[listener])

        asyncio.run(run())


def _report_ready(
    ready: Callable[[str], None], pool: ModelPool, names: str, url: str, inherited: Inheritance | None
) -> None:
    facts = "; ".join(one.facts.summary for one in pool.services) or "each starts at its first request"
    _LOG.info("ready: %s; %s; %s", names, facts, url)
    ready(url)
    if inherited is not None:
        inherited.report_ready()


def read_keys(config: ServeConfig) -> list[str]:
    """Return the keys of the options and of their file; raises ConfigError if it cannot be read.

    Lines of the file that begin with # are comments.
    """
    keys = list(config.api_key)
    if config.api_key_file is not None:
        try:
            lines = Path(config.api_key_file).read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not ASCII text"
            raise ConfigError(f"cannot read api_key_file {config.api_key_file}: {reason}") from None
        found = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
        if not found:
            raise ConfigError(f"api_key_file {config.api_key_file} has no key; write one key a line")
        keys += found
    return keys


def listen(config: ServeConfig) -> socket.socket:
    """Return a socket that is bound to the port and does not listen yet; raises ConfigError."""
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        bound = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"host {config.host!r} is not an address: {error.strerror or error}") from None
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


def _uvicorn_config(config: ServeConfig, app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",  # bounds heads; the other protocol does not
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(config.trusted_proxy),
        forwarded_allow_ips=list(config.trusted_proxy),
        timeout_keep_alive=max(1, int(config.idle_timeout)),
        limit_concurrency=config.max_connections + 1,  # uvicorn refuses the last one, too
        h11_max_incomplete_event_size=_MAX_HEAD,
        root_path=config.root_path,
    )


class _Server(uvicorn.Server):
    """uvicorn's server; at shutdown it first refuses new requests."""

    def __init__(self, config: uvicorn.Config, pool: ModelPool) -> None:
        super().__init__(config)
        self._pool = pool
        self.on_ready: Callable[[], None] = lambda: None
        self._roll_requested = False  # SIGUSR1 was received and the engines are not replaced yet
        self._hand_over_requested = False  # SIGHUP was received
        self._replaced = False  # another process accepts connections
        self._successor: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain on SIGTERM and SIGINT, and exit with status 0; uvicorn's version raises them again.

        SIGHUP does the same if the process has a terminal, which may be closing; else it hands over the port.
        A SIGHUP that nohup ignores stays ignored.
        """
        caught = [one for one in _ENDING if signal.getsignal(one) is not signal.SIG_IGN]
        earlier = {number: signal.signal(number, self.handle_exit) for number in caught}
        if signal.SIGHUP in caught and not has_terminal():
            signal.signal(signal.SIGHUP, self._handle_hand_over)
        earlier[_ROLLING] = signal.signal(_ROLLING, self._handle_roll)
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def _handle_roll(self, *_: object) -> None:
        self._roll_requested = True

    def _handle_hand_over(self, *_: object) -> None:
        self._hand_over_requested = True

    async def _hand_over(self) -> None:
        """Start this server again in a new process; once that is ready, end without refusing a request."""
        try:
            successor = Successor(self.servers[0].sockets[0].fileno())
        except OSError as error:
            _LOG.error("SIGHUP: a new process cannot start: %s; this one goes on", error)
            return
        _LOG.info("SIGHUP: process %d starts with the same command, and takes over", successor.pid)
        try:
            status = await successor.failure()
        except asyncio.CancelledError:
            successor.cancel()
            raise
        if status is not None:
            _LOG.error("process %d ended with status %d; this one goes on", successor.pid, status)
            return
        self._replaced = True
        for server in self.servers:
            server.close()
        self.config.encoded_headers.append(_CLOSING)  # for the next answers; read once a second
        self.server_state.default_headers = [*self.server_state.default_headers, _CLOSING]
        await asyncio.sleep(_LINGER_SECONDS)
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Return True if the server is to exit; uvicorn calls this ten times a second."""
        if self._roll_requested:
            self._roll_requested = False
            self._pool.begin_roll()
        if self._hand_over_requested:
            self._hand_over_requested = False
            if self._successor is None or self._successor.done():
                self._successor = asyncio.ensure_future(self._hand_over())
        # uvicorn refuses requests of too many connections, but keeps those that send none.
        every, most = self.server_state.connections, self._pool.config.max_connections
        for one in [one for one in every if _is_silent(one)][: max(0, len(every) - most)]:
            one.transport.abort()
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._successor is not None:
            self._successor.cancel()
        if not self._replaced:
            self._pool.drain()
            await asyncio.sleep(_UNREADY_SECONDS)
        ending = asyncio.ensure_future(super().shutdown(sockets))
        done, _ = await asyncio.wait({ending}, timeout=self._pool.config.grace)
        if not done:
            cut = self._pool.cut(_CUT)
            await asyncio.wait({ending}, timeout=_CUT_SECONDS)
            # The clients of the open connections neither send their request nor read their answer.
            for connection in [*self.server_state.connections]:
                connection.transport.abort()
            _LOG.warning("%d answers were cut off at the end of --grace", cut)
        await ending


def _is_silent(connection: object) -> bool:
    """Return whether one of uvicorn's connections has no request that waits for its answer."""
    cycle = getattr(connection, "cycle", None)
    return cycle is None or cycle.response_complete or cycle.transport.is_closing()
