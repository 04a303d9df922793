"""ModelPool: the models of one server by name, each with an engine process of its own while it is loaded.

A request for an unloaded model waits until the pool has loaded it; models are loaded one after another. If
memory does not suffice, the least recently used model is unloaded, an idle one before a busy one. A busy one
ends after its last open answer, and new requests for it wait. It stays if the clients that wait for the other
model leave. A model that is idle for `keep_alive` ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Final

import psutil

from specinfer.hub.model_files import ModelFiles
from specinfer.hub.resolution import resolve
from specinfer.kernels.machine import cgroup_free_memory
from specinfer.serve.api.service import Service
from specinfer.serve.backend.work import Health
from specinfer.serve.config import ServeConfig, ServedModel
from specinfer.serve.fields.body import FieldPolicy
from specinfer.serve.http.api_error import ApiError, cut
from specinfer.serve.observe.metrics import Metrics
from specinfer.serve.pooled_model import CACHES, PooledModel, needed_bytes

_LOG = logging.getLogger(__name__)
_PART_OF_FREE: Final = 0.9  # part of the free memory that models may take without `memory`
_PATIENCE: Final = 600.0  # seconds that a request waits for its model without `max_wait`
_RETRY_SECONDS: Final = 10.0  # until a model that fails may start again; doubles with each failure in a row
_MAX_RETRY_SECONDS: Final = 600.0
_LATER: Final = {"Retry-After": "5"}  # header of answers with status 503

MakeRoom = Callable[[], Awaitable[None]]
# Opens the service of a model, whose metrics outlive it; it makes room before the engine loads weights.
Opener = Callable[[ServedModel, ModelFiles, Metrics, MakeRoom], AbstractAsyncContextManager[Service]]


class _NobodyWaits(Exception):
    """The clients that waited for a model have left."""


class ModelPool:
    """The models of one server. Belongs to one event loop.

    Services are opened by `opener`, and take `memory` bytes at most in all; None: a part of the free memory.
    Without an `opener` the only model is loaded already, and stays so.
    """

    def __init__(
        self,
        config: ServeConfig,
        models: Sequence[PooledModel],
        opener: Opener | None = None,
        memory: int | None = None,
    ) -> None:
        self.config = config
        self.models = tuple(models)  # the first is the default
        self.is_fixed = opener is None
        self.draining = False
        self.field_policy = FieldPolicy(config.unknown_fields, config.max_body)
        self._by_name = {name: one for one in models for name in one.names}
        self._by_path = {one.served.engine.model: one for one in reversed(models)}
        self._opener = opener
        self._memory = memory
        self._turn = asyncio.Lock()  # held while a model is loaded or unloaded
        self._tasks = set[asyncio.Task[None]]()

    @classmethod
    def of(cls, service: Service, model: ServedModel) -> ModelPool:
        """Return the pool of a single model, which is loaded."""
        pool = cls(service.config, [PooledModel(model, service.metrics, service)])
        pool.field_policy = service.field_policy
        return pool

    @classmethod
    def of_several(cls, config: ServeConfig, models: Sequence[ServedModel], opener: Opener) -> ModelPool:
        """Return a pool that loads these models on request, within the `memory` of their engines' options."""
        first = Metrics(models[0].names[0])
        more = [Metrics(one.names[0], beside=first) for one in models[1:]]
        if (memory := models[0].engine.memory) is not None:
            memory = max(1, memory - psutil.Process().memory_info().rss)
        return cls(config, [*map(PooledModel, models, (first, *more))], opener, memory)

    @property
    def services(self) -> list[Service]:
        """Services of the models that are loaded."""
        return [one.service for one in self.models if one.service is not None]

    def find(self, name: str | None, *, listed: bool = False) -> PooledModel:
        """Return the model that answers requests for `name`; None is the first model.

        Also the path is a model's name. Any other name is that of a single model without adapters, unless it
        must be `listed`. Raises ApiError with status 404.
        """
        first = self.models[0]
        name = name or first.served.names[0]
        if (found := self._by_name.get(name) or self._by_path.get(name)) is not None:
            return found
        if self.is_fixed and not listed and not first.served.engine.adapters:
            self.field_policy.log_once(
                f"{first.served.names[0]} answers requests for the model {cut(name)!r}"
            )
            return first
        raise ApiError(
            f"the model {cut(name)!r} is not served here; allowed: {', '.join(self._by_name)}",
            param="model",
            status=404,
            code="model_not_found",
        )

    def is_ready(self, name: str | None) -> bool:
        """Return whether a model is loaded, so that its requests need not wait.

        Raises ApiError. Status 404: there is no such model. 429: too many requests wait for it. 500: it could
        not be started a moment ago. 503: the server drains.
        """
        model = self.find(name)
        if model.is_loaded:
            return True
        if self.draining:
            raise _draining()
        if model.failure and time.monotonic() < model.retry_at:
            raise _failed(model)
        limit = model.served.engine.scheduler.max_batch_size + self.config.max_waiting
        if len(model.waiting) >= limit:
            text = f"{limit} requests wait for the model {model.names[0]!r}; try again soon"
            raise ApiError(text, status=429, headers={"Retry-After": "1"})
        return False

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[Service]:
        """Load a model if necessary; its service stays open until the block ends.

        Raises ApiError as `is_ready`. Status 500: the model cannot start. 503: it was not loaded in time.
        """
        model = self.find(name)
        if self.is_ready(name):
            model.begin_use()
        else:
            await self._wait(model)
        try:
            assert model.service is not None, "a model that is in use stays loaded"
            yield model.service
        finally:
            self._end_use(model)

    async def load(self, name: str | None) -> None:
        """Load a model, without delay if it could not be started a moment ago; raises ApiError as `use`."""
        self.find(name).retry_at = 0.0
        async with self.use(name):
            pass

    async def unload(self, name: str | None) -> None:
        """Unload a model after its open answers; raises ApiError, also for the only model of a server."""
        if self.is_fixed:
            raise ApiError("the only model of a server stays loaded; end the server", param="model")
        await asyncio.shield(self._run(self._unload(self.find(name))))

    async def health(self) -> list[Health]:
        """Return the health of each loaded model, within a second even if engines hang."""
        return await asyncio.gather(*(one.backend.health() for one in self.services))

    async def metrics(self) -> bytes:
        """Return the metrics of all models in Prometheus' text format."""
        services = self.services
        for one, health in zip(services, await self.health(), strict=True):
            if one in self.services:  # it may have been unloaded meanwhile
                one.metrics.update(health)
        return self.models[0].metrics.text()

    def begin_roll(self) -> None:
        """Replace the engines of the loaded models; see ReplicaBackend."""
        for one in self.services:
            one.backend.begin_roll()

    def drain(self) -> None:
        """Refuse new requests, and those that wait for a model."""
        self.draining = True
        for one in self.services:
            one.draining = True
        for model in self.models:
            self._refuse(model, _draining)

    def cut(self, reason: str) -> int:
        """Fail all open answers and the requests that wait for a model; returns their number."""

        def shut_down() -> ApiError:
            return ApiError(reason, status=503, headers=_LATER)

        waiting = sum(self._refuse(one, shut_down) for one in self.models)
        return waiting + sum(one.backend.cut(reason) for one in self.services)

    async def close(self) -> None:
        """End the engines of the models that the pool has loaded."""
        self.drain()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for model in self.models:
            await model.opened.aclose()

    async def _wait(self, model: PooledModel) -> None:
        """Wait until a model is loaded, and begin to use it."""
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model.waiting.append(ticket)
        if model.loading is None or model.loading.done():
            model.loading = self._run(self._load(model))
        seconds = self.config.max_wait or _PATIENCE
        try:
            async with asyncio.timeout(seconds):
                await ticket
        except BaseException as error:
            if ticket in model.waiting:
                model.waiting.remove(ticket)
            elif not ticket.cancelled() and ticket.exception() is None:
                self._end_use(model)  # the client left just when it got the model
            for one in self.models:
                one.idle.set()  # it may stay: see _end
            if not isinstance(error, TimeoutError):
                raise
            busy = ", ".join(one.names[0] for one in self.models if one.users) or "none"
            raise ApiError(
                f"the model {model.names[0]!r} was not loaded within {seconds:g} seconds; models with open "
                f"answers: {busy}; try again later",
                status=503,
                headers=_LATER,
            ) from None

    def _end_use(self, model: PooledModel) -> None:
        model.users, model.used_at = model.users - 1, time.monotonic()
        if model.users:
            return
        model.idle.set()
        if not self.is_fixed and self.config.keep_alive:
            loop, last_use = asyncio.get_running_loop(), model.used_at
            model.expiry = loop.call_later(
                self.config.keep_alive, lambda: self._run(self._unload(model, last_use))
            )

    def _run(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a task that does not end with the request that began it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load(self, model: PooledModel) -> None:
        """Load a model when its turn comes, and give it to the requests that wait for it, if any still do."""
        try:
            files = await asyncio.to_thread(resolve, model.served.engine.model)
            size = await asyncio.to_thread(needed_bytes, model.served.engine, files)
            async with self._turn:
                while model.service is None and model.is_awaited:
                    with suppress(_NobodyWaits):
                        await self._open(model, files, size)
                if model.service is None:
                    return
                model.begin_use()  # so that it expires if no request waits any more
                for ticket in self._taken(model):
                    model.begin_use()
                    ticket.set_result(None)
                self._end_use(model)
        except Exception as error:  # no exception may end this task: requests wait for it
            seconds = min(_RETRY_SECONDS * 2 ** min(model.failures, 9), _MAX_RETRY_SECONDS)
            model.failures, model.retry_at = model.failures + 1, time.monotonic() + seconds
            model.failure = str(error) or repr(error)
            _LOG.error("%s cannot be started: %s", model.names[0], model.failure)
            self._refuse(model, lambda: _failed(model))

    async def _open(self, model: PooledModel, files: ModelFiles, size: int) -> None:
        """Open a model's service in place of others, so that about `size` bytes are free for its engine."""
        assert self._opener is not None, "a pool without an opener has its model loaded"
        engine, room = replace(model.served.engine, device="cpu"), self._room()
        loaded = [one for one in self.models if one.service is not None]
        loaded.sort(key=lambda one: (one.users == 0, -one.used_at))  # the last one goes first
        leaving: list[PooledModel] = []
        while loaded and sum(one.size for one in loaded) + max(size, model.took) > room:
            leaving.append(loaded.pop())
        fixed = size <= room and engine.offload == "never"  # else caches take the rest of the room
        if fixed:
            # `memory` stays the option: quantization `auto` depends on it, and not on the other models.
            engine = replace(engine, cache=replace(engine.cache, memory=engine.cache.memory or CACHES))
        else:
            engine = replace(engine, memory=max(1, room - sum(one.size for one in loaded)))

        async def make_room() -> None:
            for one in leaving:
                await self._end(one, model)

        opened, served = AsyncExitStack(), replace(model.served, engine=engine)
        service = await opened.enter_async_context(self._opener(served, files, model.metrics, make_room))
        service.draining = self.draining
        model.service, model.opened, model.failure, model.failures = service, opened, "", 0
        model.size = service.facts.memory
        model.took = model.size if fixed else 0
        _LOG.info("loaded: %s; %s", model.names[0], service.facts.summary)
        while loaded and sum(one.size for one in [model, *loaded]) > self._room():  # more than was expected
            self._run(self._unload(loaded.pop()))

    def _room(self) -> int:
        """Return the bytes that all engines may take, those that run now included."""
        if self._memory is not None:
            return self._memory
        rooms = psutil.virtual_memory().available, cgroup_free_memory()
        free = min(room for room in rooms if room is not None)
        return sum(one.size for one in self.models) + int(_PART_OF_FREE * free)

    async def _unload(self, model: PooledModel, last_use: float | None = None) -> None:
        """Unload a model; not if it was used after `last_use`."""
        async with self._turn:
            if model.service is not None and last_use in (None, model.used_at):
                await self._end(model)

    async def _end(self, model: PooledModel, successor: PooledModel | None = None) -> None:
        """End a model's engine after its open answers.

        Raises _NobodyWaits if the requests for `successor`, which needs the memory, have left.
        """
        model.leaving = True
        try:
            while model.users and (successor is None or successor.is_awaited):
                model.idle.clear()
                await model.idle.wait()
            if successor is not None and not successor.is_awaited:
                raise _NobodyWaits
            model.service, model.size = None, 0
            await model.opened.aclose()
            model.metrics.reset()
            _LOG.info("unloaded: %s", model.names[0])
        finally:
            model.leaving = False

    def _refuse(self, model: PooledModel, reason: Callable[[], ApiError]) -> int:
        """Fail the requests that wait for a model; returns their number."""
        taken = self._taken(model)
        for ticket in taken:
            ticket.set_exception(reason())
        return len(taken)

    def _taken(self, model: PooledModel) -> list[asyncio.Future[None]]:
        """Remove the requests that wait for a model; without those whose clients have left."""
        taken, model.waiting = model.waiting, []
        return [ticket for ticket in taken if not ticket.done()]


def _failed(model: PooledModel) -> ApiError:
    seconds = max(1, round(model.retry_at - time.monotonic()))
    return ApiError(
        f"the model {model.names[0]!r} cannot be started: {model.failure}; it may start again in {seconds} "
        "seconds, and at once by POST /models/load",
        status=500,
        code="model_failed",
        headers={"x-should-retry": "false"},
    )


def _draining() -> ApiError:
    return ApiError("the server is shutting down", status=503, headers=_LATER)
