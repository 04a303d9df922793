"""Several models behind one port: which are loaded, which wait, and which go."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from specinfer.config import EngineConfig
from specinfer.errors import UserError
from specinfer.hub.model_files import ModelFiles
from specinfer.scheduler_config import CacheConfig
from specinfer.serve.api.service import Service
from specinfer.serve.app import build_app
from specinfer.serve.config import ServeConfig, ServedModel
from specinfer.serve.http.access import Keys
from specinfer.serve.http.api_error import ApiError
from specinfer.serve.model_pool import MakeRoom, ModelPool
from specinfer.serve.observe.metrics import Metrics
from specinfer.serve.pooled_model import needed_bytes
from specinfer.tokenizer import Tokenizer
from tests.scripted_server import ScriptedBackend, says, scripted_service
from tests.served import Served
from tests.unit.serve.asked import HI, Asked
from tests.unit.serve.conftest import FLAGS

NAMES = ("a", "b", "c")


class Rig:
    """A pool of the models a, b and c, with memory for `fit` of them, and the log of their engines."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, fit: float = 2, **options: Any) -> None:
        self.log: list[str] = []
        self.broken = ""  # name of the model that cannot start
        self.given: list[EngineConfig] = []  # configs of the engines
        self.gate: asyncio.Event | None = None  # that starts wait for
        self.takes: dict[str, float] = {}  # memory of engines, relative to the expected size
        self._tokenizer = tokenizer
        engine = EngineConfig(model=str(folder), cache=CacheConfig(memory=1 << 20))
        engine = options.pop("engine", engine)
        config = ServeConfig(**{"keep_alive": 0.0, **options})
        models = [ServedModel((name, f"{name}-alias"), engine) for name in NAMES]
        self.pool = ModelPool.of_several(config, models, self._open)
        files: Any = SimpleNamespace(weights=[folder / "model.safetensors"])
        self.size = needed_bytes(engine, files)
        self.pool._memory = int(fit * self.size)  # the same on every machine

    @asynccontextmanager
    async def _open(
        self, model: ServedModel, _: ModelFiles, metrics: Metrics, make_room: MakeRoom
    ) -> AsyncIterator[Service]:
        [name, _alias] = model.names
        self.given.append(model.engine)
        await make_room()
        self.log.append(f"+{name}")
        if self.gate is not None:
            await self.gate.wait()
        if name == self.broken:
            raise UserError("its weights are damaged")
        backend = ScriptedBackend(says(f"I am {name}."))
        sampling = {"repetition_penalty": 1.1} if name == "c" else {}
        observers = [metrics.observe]
        service = scripted_service(self._tokenizer, backend, observers, model.names, sampling=sampling)
        service.facts = replace(service.facts, memory=int(self.takes.get(name, 1) * self.size))
        service.metrics = metrics
        try:
            yield service
        finally:
            self.log.append(f"-{name}")

    async def get(self, name: str) -> asyncio.Task[AsyncExitStack]:
        """Begin a request for a model; its task returns when the request has the service."""

        async def enter() -> AsyncExitStack:
            stack = AsyncExitStack()
            await stack.enter_async_context(self.pool.use(name))
            return stack

        task = asyncio.create_task(enter())
        await self.settle()
        return task

    async def use(self, *names: str) -> None:
        """Make requests for these models, one after another."""
        for name in names:
            async with self.pool.use(name):
                pass

    async def settle(self) -> None:
        """Wait until nothing changes; files are found in threads."""
        for _ in range(20):
            await asyncio.sleep(0.002)

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(build_app(self.pool, Keys([])))
        return httpx.AsyncClient(transport=transport, base_url="http://server")


@pytest.fixture
def rig(folder: Path, tokenizer: Tokenizer) -> Callable[..., Rig]:
    return lambda **options: Rig(folder, tokenizer, **options)


async def test_the_least_recently_used_model_goes(rig: Callable[..., Rig]) -> None:
    made = rig()
    for name in ("a", "b", "a-alias", "c", "a", "b"):
        async with made.pool.use(name) as service:
            assert service.models[0] == name[0]
    assert made.log == ["+a", "+b", "-b", "+c", "-c", "+b"]
    await made.pool.close()
    assert made.log[-2:] == ["-a", "-b"]


async def test_no_model_goes_in_the_middle_of_an_answer(rig: Callable[..., Rig]) -> None:
    made = rig(fit=1)
    first = await (await made.get("a"))
    second = await made.get("b")  # waits for the answer of a
    third = await made.get("a")  # waits for b, which came before it
    assert (second.done(), third.done(), made.log) == (False, False, ["+a"])
    await first.aclose()
    await made.settle()
    assert (second.done(), third.done(), made.log) == (True, False, ["+a", "-a", "+b"])
    await (await second).aclose()
    await (await third).aclose()
    assert made.log == ["+a", "-a", "+b", "-b", "+a"]


async def test_a_request_waits_for_a_bounded_time(rig: Callable[..., Rig]) -> None:
    made = rig(fit=1, max_wait=0.5)
    first = await (await made.get("a"))
    with pytest.raises(ApiError, match=r"'b' was not loaded within 0.5 seconds; .*answers: a; try") as error:
        await (await made.get("b"))
    assert error.value.status == 503
    await first.aclose()
    async with made.pool.use("a"):
        assert made.log == ["+a"], "a stays, as no request waits for b"
    async with made.pool.use("b"):
        assert made.log == ["+a", "-a", "+b"]


async def test_a_model_stays_if_the_client_of_another_leaves(rig: Callable[..., Rig]) -> None:
    made = rig(fit=1)
    first = await (await made.get("a"))
    other, same = await made.get("b"), await made.get("a")  # waits for b, which came before it
    assert (other.done(), same.done()) == (False, False)
    other.cancel()
    await made.settle()
    assert same.done(), "a answers on at once"
    again = await made.get("b")
    for one in (first, await same):
        await one.aclose()
    await (await again).aclose()
    assert made.log == ["+a", "-a", "+b"]


async def test_clients_that_leave_give_up_their_places(rig: Callable[..., Rig]) -> None:
    made = rig(fit=1)
    held = await (await made.get("a"))
    app = build_app(made.pool, Keys([]))
    for path, body in (
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [97]}),
        ("/v1/messages/count_tokens", {"messages": HI}),
        ("/models/load", {}),
    ):
        gone, sent = asyncio.Event(), [json.dumps({**body, "model": "b"}).encode()]

        async def receive(gone: asyncio.Event = gone, sent: list[bytes] = sent) -> dict[str, Any]:
            if sent:
                return {"type": "http.request", "body": sent.pop()}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        asking = asyncio.create_task(app(scope, receive, send))
        await made.settle()
        assert len(made.pool.models[1].waiting) == 1, path
        gone.set()
        await asking
        assert made.pool.models[1].waiting == [], path
    await held.aclose()
    await made.settle()
    assert made.log == ["+a"]


async def test_engines_are_configured_as_a_single_servers(rig: Callable[..., Rig], folder: Path) -> None:
    cases: list[tuple[float, Any, float | None, int | None]] = [
        # room for `fit` models: bytes that the second may take, None: any, and those of its caches
        (3.0, "never", None, 512 << 20),
        (2.0, "never", None, 512 << 20),
        (0.5, "never", 0.5, None),
        (3.0, "auto", 2.0, None),
    ]
    for fit, offload, memory, caches in cases:
        made = rig(fit=fit, engine=EngineConfig(model=str(folder), offload=offload))
        await made.use("a", "b")
        given = made.given[-1]
        assert (given.device, given.cache.memory) == ("cpu", caches)
        assert given.memory == (None if memory is None else int(memory * made.size))


async def test_the_room_is_measured_anew(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that hands over its port frees its memory after the pool was made."""
    made, free = rig(), [0]
    made.pool._memory = None
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free[0]))
    monkeypatch.setattr("specinfer.serve.model_pool.cgroup_free_memory", lambda: None)
    for name, left in (("a", 0), ("b", 0), ("c", 2 * made.size)):
        free[0] = left
        await made.use(name)
    assert made.log == ["+a", "-a", "+b", "+c"]


async def test_a_model_that_takes_more_than_expected_ends_others(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.takes["b"] = 1.5
    held = await (await made.get("a"))
    async with made.pool.use("b"):
        pass
    await made.settle()
    assert made.log == ["+a", "+b"], "a has an open answer"
    await held.aclose()
    await made.settle()
    for name in "ab":  # the second time it is known
        async with made.pool.use(name):
            pass
    assert made.log == ["+a", "+b", "-a", "-b", "+a", "-a", "+b"]


async def test_caches_that_fill_the_room_are_no_need_of_models(rig: Callable[..., Rig], folder: Path) -> None:
    made = rig(fit=3, engine=EngineConfig(model=str(folder), offload="auto"))
    for taken, names in ((3, "ab"), (2, "ab")):  # all of the memory, then the rest beside b
        made.takes["a"] = taken
        await made.use(*names)
    assert made.log == ["+a", "-a", "+b", "+a"]


async def test_requests_that_leave_hold_nothing(rig: Callable[..., Rig]) -> None:
    made = rig(fit=1)
    made.gate = asyncio.Event()
    waiting = [await made.get("a") for _ in range(3)]
    waiting[0].cancel()  # while it waits
    await made.settle()
    made.gate.set()
    while not waiting[1].done():
        await asyncio.sleep(0)
        waiting[2].cancel()  # at some time around its turn
    await asyncio.gather(waiting[0], waiting[2], return_exceptions=True)
    await (await waiting[1]).aclose()
    if not waiting[2].cancelled():
        await waiting[2].result().aclose()
    async with made.pool.use("b"):
        assert made.log == ["+a", "-a", "+b"]


async def test_requests_beyond_the_queue_are_refused(rig: Callable[..., Rig]) -> None:
    made = rig(max_waiting=4)
    limit = made.pool.models[0].served.engine.scheduler.max_batch_size + 4
    made.gate, body = asyncio.Event(), {"model": "a", "prompt": "x"}
    async with made.client() as client:
        first = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(limit)]
        await made.settle()
        for stream in (False, True):
            answer = await client.post("/v1/completions", json={**body, "stream": stream})
            assert answer.status_code == 429, stream
        made.gate.set()
        assert {(await one).json()["choices"][0]["text"] for one in first} == {"I am a."}


async def test_an_idle_model_is_unloaded(rig: Callable[..., Rig]) -> None:
    made = rig(keep_alive=0.05)
    held = await (await made.get("a"))
    await made.use("b")
    await asyncio.sleep(0.2)
    assert made.log == ["+a", "+b", "-b"], "a has an open answer"
    await held.aclose()
    await asyncio.sleep(0.2)
    assert made.log[-1] == "-a"


async def test_a_model_that_is_used_as_it_expires_stays(rig: Callable[..., Rig]) -> None:
    made = rig(keep_alive=0.5)
    await made.use("a")
    async with made.pool._turn:  # another model is being loaded
        await asyncio.sleep(0.6)  # the expiry waits for its turn
        await made.use("a")
    await made.settle()
    assert made.log == ["+a"]
    await asyncio.sleep(0.6)
    assert made.log == ["+a", "-a"]


async def test_a_model_that_cannot_start(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.broken = "b"
    message = "the model 'b' cannot be started: its weights are damaged; it may start again in 10 seconds, "
    message += "and at once by POST /models/load"
    async with made.client() as client:
        for stream in (False, False, True):
            asked = {"model": "b", "prompt": "x", "stream": stream}
            answer = await client.post("/v1/completions", json=asked)
            assert (answer.status_code, answer.json()["error"]["message"]) == (500, message)
            assert made.log == ["+b"], "it is not started again at once"
        fine = await client.post("/v1/completions", json={"model": "a", "prompt": "x"})
        assert fine.json()["choices"][0]["text"] == "I am a."
        cards = (await client.get("/v1/models")).json()["data"]
        assert cards[2]["status"] == {"value": "unloaded", "failure": "its weights are damaged"}
        assert (await client.post("/models/load", json={"model": "b"})).status_code == 500
        made.broken = ""
        assert (await client.post("/models/load", json={"model": "b"})).status_code == 200
        assert made.log == ["+b", "+a", "+b", "+b"]


async def test_a_model_that_cannot_start_is_tried_less_and_less(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.broken, [_, model, _] = "b", made.pool.models
    delays = []
    for number in range(9):
        made.broken = "" if number == 7 else "b"
        model.retry_at, began = 0.0, time.monotonic()
        with suppress(ApiError):
            await made.use("b")
            await made.pool.unload("b")
        delays.append(round(model.retry_at - began, -1) if model.failure else 0)
    assert delays == [10, 20, 40, 80, 160, 320, 600, 0, 10]


async def test_the_paths_of_several_models(rig: Callable[..., Rig]) -> None:
    made = rig()
    async with made.client() as client:

        async def states() -> list[str]:
            cards = (await client.get("/v1/models")).json()["data"]
            return [f"{card['id']}={card['status']['value']}" for card in cards if "-" not in card["id"]]

        assert (await client.get("/ready")).json()["status"] == "ready"
        assert await states() == ["a=unloaded", "b=unloaded", "c=unloaded"]
        for path, body, status in (
            ("/models/load", {"model": "b-alias"}, 200),
            ("/models/load", {"model": "d"}, 404),
            ("/models/load", {}, 400),
            ("/v1/chat/completions", {"model": "d", "messages": HI}, 404),
            ("/v1/completions", {"model": "c", "prompt": "x", "stream": True}, 200),
            # the model's own penalty, which one of several models may have
            ("/v1/completions", {"model": "c", "prompt": "x", "repeat_last_n": -1}, 200),
            ("/v1/completions", {"model": "c", "prompt": "x", "repeat_last_n": 64}, 400),
            ("/v1/completions", {"model": "b", "prompt": "x", "repeat_last_n": 64}, 200),
            ("/models/unload", {"model": "b"}, 200),
        ):
            answer = await client.post(path, json=body)
            assert answer.status_code == status, (path, body, answer.text)
            if status == 404:
                assert "'d' is not served here; allowed: a, a-alias, b, b-alias, c, c-alias" in answer.text
        assert await states() == ["a=unloaded", "b=unloaded", "c=loaded"]
        assert (await client.get("/v1/models/c-alias")).json()["max_model_len"] == 100_000
        answer = await client.post("/infill", json={"input_prefix": "x", "input_suffix": ""})
        assert answer.status_code == 400, "its tokenizer has no tokens for infilling"
        assert made.log[-1] == "+a", "a request without a name is for the first model"
        text = (await client.get("/metrics")).text
        for name, count in (("a", 0.0), ("c", 2.0)):
            found = f'specinfer:request_success_total{{finished_reason="stop",model_name="{name}"}} {count}'
            assert (found in text) == bool(count), name
        assert text.count("# HELP specinfer:generation_tokens_total") == 1


async def test_a_server_that_ends_refuses_requests_that_wait(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.gate = asyncio.Event()
    waiting = await made.get("a")
    made.pool.drain()
    for request in (waiting, await made.get("b")):
        with pytest.raises(ApiError, match="the server is shutting down"):
            await request
    await made.pool.close()
    assert made.log == ["+a"]


async def test_requests_that_wait_are_cut_with_the_reason(rig: Callable[..., Rig]) -> None:
    """A server that is replaced does not drain first."""
    made = rig()
    made.gate = asyncio.Event()
    waiting = await made.get("a")
    assert made.pool.cut("the server shut down") == 1
    with pytest.raises(ApiError, match="the server shut down") as error:
        await waiting
    assert error.value.status == 503
    await made.pool.close()


def test_the_only_model_of_a_server_stays(folder: Path, tokenizer: Tokenizer) -> None:
    answer = Asked(tokenizer).http.post("http://server/models/unload", json={"model": "any"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


@pytest.fixture(scope="module")
def both(folder: Path, forked: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("several") / "models.yaml"
    models = "".join(f"- {{model: {folder}, alias: {name}}}\n" for name in NAMES[:2])
    file.write_text(f"models:\n{models}- {{model: {folder}/none, alias: none}}\nping_interval: 0.05\n")
    with Served(f"--config={file}", *FLAGS[: FLAGS.index("--config")], "--memory", "1900MB") as server:
        yield server


@pytest.mark.few(2)
def test_engines_of_several_models(both: Served, served: Served) -> None:
    """A stream of one goes on while another starts; the texts are those of a server with one model."""
    body = {"prompt": "x" * 9, "max_tokens": 400, "seed": 5, "ignore_eos": True}
    alone = served.post("/v1/completions", body).json()["choices"][0]["text"]
    assert both.engine_pid is None
    streamed = {**body, "model": "a", "stream": True}
    with httpx.stream("POST", f"{both.url}/v1/completions", json=streamed, timeout=120) as stream:
        lines = stream.iter_lines()
        assert next(lines) == ": ping", "the stream is open while its model starts"
        second = both.post("/v1/completions", {**body, "model": "b"})
        rest = [line for line in lines if line.startswith("data: {")]
    assert second.json()["choices"][0]["text"] == alone
    texts = [httpx.Response(200, text=line[6:]).json()["choices"][0]["text"] for line in rest]
    assert "".join(texts) == alone
    missing = both.post("/v1/completions", {**body, "model": "none"})
    assert missing.status_code == 500
    assert "there is no file or folder" in missing.json()["error"]["message"]
