"""Messages of an engine process about its works, its fingerprint and its death."""

import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, LoRARequest, SamplingParams
from specinfer.config import EngineConfig
from specinfer.grammar.grammar import Grammar, GrammarCompiler
from specinfer.request import Delta, FinishReason
from specinfer.serve.backend import engine_process
from specinfer.serve.backend.engine_process import EngineProcess
from specinfer.serve.backend.work import Work, fingerprint
from specinfer.structured_output import StructuredOutput
from tests.adapters import write_adapter
from tests.kernels import kernels
from tests.tiny_models import write_tiny_llama

LONG = SamplingParams(seed=1, max_tokens=200, ignore_eos=True)
ENGINE: dict[str, Any] = {"lookup": False, "dtype": "float32", "kv_cache_memory": 1 << 24}
ENGINE["tree_size"] = "fixed"


@contextmanager
def serving(llm: LLM) -> Iterator[Connection]:
    """The server's end of an engine process that runs in a thread."""
    server, engine = Pipe()
    thread = threading.Thread(target=EngineProcess(llm, engine).serve)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(60)


def hear(server: Connection, until: Any) -> list[tuple[Any, ...]]:
    """Messages up to the one that `until` holds for."""
    messages: list[tuple[Any, ...]] = []
    while not messages or not until(messages[-1]):
        assert server.poll(60), messages
        messages.append(server.recv())
    return messages


def deltas_of(messages: Iterable[tuple[Any, ...]]) -> list[Delta]:
    return [delta for message in messages if message[0] == "deltas" for delta in message[1]]


def deltas_until_end(server: Connection, *names: str) -> list[Delta]:
    """The deltas that come until all these works have ended."""
    deltas: list[Delta] = []
    while not {delta.id for delta in deltas if delta.finish_reason is not None} >= set(names):
        assert server.poll(60), deltas
        deltas += deltas_of([server.recv()])
    return deltas


def ends(name: str) -> Any:
    return lambda message: any(one.id == name and one.finish_reason for one in deltas_of([message]))


def test_busy_works_are_reported_before_anything_is_computed(folder: Path) -> None:
    with LLM(folder, **ENGINE, max_batch_size=1) as llm, serving(llm) as server:
        assert server.recv()[0] == "ready"
        server.send(("add", [Work("a", (65, 66), LONG)]))
        hear(server, lambda message: message[0] == "deltas" and any(one.token_ids for one in message[1]))
        server.send(("add", [Work("b", (67, 68), LONG)]))  # for which there is no room
        checked = hear(server, lambda message: message[0] == "busy" and "b" in message[1])
        assert checked[-1] == ("busy", ["b", "a"])
        of_a = hear(server, ends("a"))
        of_b = hear(server, ends("b"))
        done = llm.statistics().steps
    busy = [set(message[1]) for message in (*of_a, *of_b) if message[0] == "busy"]
    assert busy[:2] == [{"a"}, {"b"}]  # it was checked, it waited, and ran when there was room
    steps = [message[2].steps for message in (*of_a, *of_b) if message[0] == "deltas" and message[2]]
    assert steps == sorted(steps)
    assert steps[-1] == done


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **ENGINE, max_batch_size=1) as made:
        yield made


def test_grammars_that_compile_slowly_delay_no_plain_work(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles, compile_form = threading.Event(), GrammarCompiler.compile

    def slow(self: GrammarCompiler, form: StructuredOutput) -> Grammar:
        assert compiles.wait(60)
        return compile_form(self, form)

    monkeypatch.setattr(GrammarCompiler, "compile", slow)
    short = SamplingParams(seed=1, max_tokens=2, ignore_eos=True)
    with serving(llm) as server:
        forms = [SamplingParams(max_tokens=2, regex=f"a{i}b+") for i in range(4)]
        server.send(("add", [Work(f"form {i}", (65,), form) for i, form in enumerate(forms)]))
        server.send(("add", [Work("plain", (65,), short)]))
        hear(server, ends("plain"))
        compiles.set()
        deltas_until_end(server, *(f"form {i}" for i in range(4)))


def test_a_step_does_not_wait_for_a_server_that_reads_nothing(folder: Path) -> None:
    with LLM(folder, **ENGINE) as llm, serving(llm) as server:
        assert server.recv()[0] == "ready"
        works = [Work(f"{n}", (65, n % 99), replace(LONG, max_tokens=n)) for n in range(150, 450, 50)]
        server.send(("add", [replace(work, traced=True) for work in works]))
        end = time.monotonic() + 60
        while not (found := llm.statistics()).steps or found.running + found.waiting:
            assert time.monotonic() < end, found  # the socket is full, and each end changes the batch
            time.sleep(0.05)
        hear(server, ends("400"))


class Panic(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("error", [Panic("it panics"), ValueError("a bug")])
def test_any_exception_is_answered(llm: LLM, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr(llm.intake, "completion", fail)
    server, engine = Pipe()
    process = EngineProcess(llm, engine)
    answer = engine_process._WorkInHand(Work("a", (65,), LONG))
    process._answers["a"] = answer
    process._admit(answer)
    delta = process._outbox.get_nowait()
    assert isinstance(delta, Delta)
    assert (delta.finish_reason, delta.error, delta.internal_error) == (FinishReason.ERROR, str(error), True)
    assert server.recv() == ("busy", ["a"])
    assert server.recv() == ("busy", [])


def test_commands_are_read_while_works_are_checked(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = threading.Event()
    completion = llm.intake.completion

    def wait(*args: Any, **more: Any) -> Any:
        checked.wait(60)
        return completion(*args, **more)

    monkeypatch.setattr(llm.intake, "completion", wait)
    names = "abcdef"
    with serving(llm) as server:
        for name in names:
            server.send(("add", [Work(name, (65,), SamplingParams(max_tokens=1))]))
        server.send(("ask", 7))
        asked = hear(server, lambda message: message[0] == "answer")
        checked.set()
        deltas_until_end(server, *names)
    assert not deltas_of(asked)


def test_a_process_that_cannot_tell_its_answers_ends(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would seem alive, but never answer again."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    _, engine = Pipe()
    process = EngineProcess(llm, engine)
    process._outbox.put(("answer", 1, threading.Lock()))  # which cannot be sent
    process._send()
    assert ended == [70]


def test_a_step_is_reported_while_one_of_its_requests_ends(llm: LLM) -> None:
    """The loop takes requests away without the lock: one that was there a moment ago may be gone."""
    server, engine = Pipe()
    process = EngineProcess(llm, engine)
    process._answers = {"b": engine_process._WorkInHand(Work("b", (66,), LONG))}
    process._stepped = ["a", "b"]
    with process._checking(Work("c", (67,), LONG)):
        assert server.recv() == ("busy", ["c", "b"])
    assert server.recv() == ("busy", ["b"])


def test_engines_have_one_fingerprint_where_their_texts_are_the_same(tmp_path: Path) -> None:
    kernels("native")  # texts do not depend on the number of threads
    folder = write_tiny_llama(tmp_path / "m", vocab_size=256, max_context=64, tokenizer=True)

    def mark_of(model: Path = folder, **options: Any) -> str:
        given = {"dtype": "float32", "kv_cache_memory": 1 << 20, "lookup": False, **options}
        with LLM(model, **given) as llm:
            return fingerprint(llm)

    def copy_of(path: Path) -> Path:  # another machine's
        return Path(shutil.copytree(path, tmp_path / f"copy of {path.name}"))

    usual = mark_of()
    assert mark_of(lookup=True, kv_cache_memory=1 << 21, max_batch_size=2, threads=1) == usual
    assert mark_of(copy_of(folder)) == usual
    adapter, stranger = (write_adapter(tmp_path / f"{seed}", folder, seed=seed) for seed in (4, 5))
    adapted = mark_of(lora={"sql": adapter})
    assert mark_of(lora={"sql": copy_of(adapter)}, max_loras=2) == adapted
    others = [mark_of(dtype="bfloat16"), mark_of(quantization="int8"), mark_of(kernels="torch")]
    others += [adapted, mark_of(lora={"sql": stranger}), mark_of(lora={"poems": adapter})]
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")  # another file of that name and size
    assert len({usual, *others, mark_of()}) == 8


def test_an_answer_says_first_that_it_is_admitted_and_when_its_first_step_begins(folder: Path) -> None:
    with LLM(folder, **ENGINE, max_batch_size=1) as llm, serving(llm) as server:
        server.send(("add", [Work("a", (65, 66), LONG), Work("b", (67, 68), LONG)]))
        deltas = deltas_until_end(server, "a", "b")
    told = [delta for delta in deltas if delta.is_empty or delta.finish_reason]
    order = [(one.id, "begins" if one.started else "ends" if one.finish_reason else "taken") for one in told]
    one, other = (name for name, what in order if what == "begins")  # threads take them in any order
    assert sorted(order[:3]) == sorted([(one, "begins"), ("a", "taken"), ("b", "taken")])
    assert order[3:] == [(one, "ends"), (other, "begins"), (other, "ends")]
    assert [delta.started for delta in deltas].count(True) == 2


def test_a_work_has_the_adapter_that_it_names(folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "sql", folder)
    params = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
    with LLM(folder, lora={"sql": adapter}, **ENGINE) as llm:
        given = [None, LoRARequest("sql", 1)]
        want = [out.token_ids for out in llm.generate([[65, 66]] * 2, params, lora_request=given)]
        names = {"a": None, "b": "sql", "c": "poems"}
        with serving(llm) as server:
            server.send(("add", [Work(n, (65, 66), params, adapter=name) for n, name in names.items()]))
            deltas = deltas_until_end(server, *names)
    outputs = {n: tuple(token for one in deltas if one.id == n for token in one.token_ids) for n in names}
    assert [outputs["a"], outputs["b"]] == want
    assert want[0] != want[1]
    [refused] = [one for one in deltas if one.id == "c" and one.finish_reason is not None]
    assert (refused.parameter, refused.internal_error) == ("model", False)


def test_followers_start_with_the_config_and_end_if_the_model_cannot_load(tmp_path: Path) -> None:
    server, engine = Pipe()
    config = EngineConfig(model=str(tmp_path / "none"), tensor_parallel=2)
    server.send(config)
    received, processes = engine_process._receive_config(engine)
    assert received == config
    [(_, follower)] = processes.started()
    assert follower.poll() is None
    assert engine_process.run(engine, config, processes) == 2
    assert server.recv()[0] == "failed"
    assert follower.poll() is not None


def test_a_step_that_fails_ends_the_process(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server continues the works of the step in another process, and finds the one at fault."""

    class Ended(BaseException):
        pass

    def end(status: int) -> None:
        assert status == 70
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    server, engine = Pipe()
    with pytest.raises(Ended):
        EngineProcess(llm, engine)._on_failed(MemoryError("no room"), ["a", "b"])
    [record] = caplog.records
    assert record.getMessage() == "the engine process ends, as a step failed"
    assert record.exc_info is not None
    assert server.recv() == ("busy", [])  # of works that it has
