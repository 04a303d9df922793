"""Kills, damage, disks that hang and many conversations cost no text and no memory."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

import pytest

from specinfer.engine.prompt_files import PromptFiles
from specinfer.llm import LLM
from specinfer.sampling_params import SamplingParams
from tests.engines import ENGINE, engine_of
from tests.tiny_models import write_tiny_llama
from tests.unit.engine.test_prompt_store import PROMPT, answer, files, filled, losing, opened, wait_written

# Lives of an engine that answers prompts until it is killed.
LIVES = """
import json, os, random, signal, sys, time
from specinfer import LLM, SamplingParams
model, store, lives, prompt, options = sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:])
for life in range(lives):
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            with LLM(model, prompt_store=store, **options) as llm:
                os.write(writing, b"1")
                for number in range(256):
                    llm.generate([[life, number, *prompt]], SamplingParams(temperature=0, max_tokens=10))
        finally:
            os._exit(1)  # what follows is the parent's
    os.close(writing)
    assert os.read(reading, 1), "the engine did not start"
    os.close(reading)
    time.sleep(random.Random(life).uniform(0, 0.1))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("model") / "m", vocab_size=256, max_context=128, tokenizer=True
    )


@pytest.mark.parametrize("lives", [3, pytest.param(50, marks=pytest.mark.thorough)])
def test_texts_are_the_same_after_kills_of_engines_that_write(
    model: Path, tmp_path: Path, lives: int
) -> None:
    options = {**ENGINE, "block_size": 4}
    given = [str(model), str(tmp_path), str(lives), json.dumps(PROMPT), json.dumps(options)]
    subprocess.run([sys.executable, "-c", LIVES, *given], check=True)
    prompts = [[life, number, *PROMPT] for life in range(lives) for number in range(4)]
    with opened(model, None) as llm:
        expected = [answer(llm, prompt)[0] for prompt in prompts]
    with opened(model, tmp_path) as llm:
        assert [answer(llm, prompt)[0] for prompt in prompts] == expected
        counts = llm.statistics().prompt_store
    assert counts["read"] > lives
    assert counts.get("wrong", 0) == 0


def damages() -> list[Callable[[Path, random.Random], object]]:
    def flip(path: Path, chance: random.Random) -> None:
        data = bytearray(path.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)

    def tear(path: Path, chance: random.Random) -> None:
        os.truncate(path, chance.randrange(path.stat().st_size))

    def lengthen(path: Path, _: random.Random) -> None:
        path.write_bytes(path.read_bytes() + b"\0")

    def swap(path: Path, chance: random.Random) -> None:
        shutil.copyfile(chance.choice([one for one in files(path.parents[1]) if one != path]), path)

    def lock(path: Path, _: random.Random) -> None:
        path.unlink()
        path.mkdir()

    return [flip, tear, lengthen, swap, lock]


@pytest.mark.parametrize("rounds", [8, pytest.param(1000, marks=pytest.mark.thorough)])
def test_damaged_files_are_computed(model: Path, tmp_path: Path, rounds: int) -> None:
    text = filled(model, tmp_path / "whole")
    chance = random.Random(1)
    with opened(model, tmp_path / "store") as llm:
        engine = engine_of(llm)
        for number in range(rounds):
            wait_written(llm)
            shutil.rmtree(tmp_path / "store")
            shutil.copytree(tmp_path / "whole", tmp_path / "store")
            damage = damages()[number % len(damages())]
            damage(chance.choice(files(tmp_path / "store")), chance)
            pool = engine._scheduler._pool
            while pool._kept:  # nothing is left in memory
                pool._free.append(pool._evict())
            assert answer(llm)[0] == text, (number, damage)
        assert llm.statistics().prompt_store["wrong"] > rounds // 3


def test_a_folder_that_vanishes_or_is_full_costs_no_request(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "store"
    text = filled(model, store)
    with opened(model, store) as llm:
        shutil.rmtree(store)
        assert answer(llm) == (text, 0)
    assert not store.exists()
    with pytest.MonkeyPatch.context() as full:
        losing("full", full)
        with opened(model, store) as llm:
            assert answer(llm)[0] == text
    assert files(store) == []
    assert [one.message.split(":")[0] for one in caplog.records if "store" in one.message] == [
        "a file of the prompt store cannot be written, and prompts end with this process"
    ] * 2


def replace_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


@pytest.mark.parametrize("lose", [shutil.rmtree, replace_by_a_file])
def test_a_folder_that_is_lost_while_a_prompt_is_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lose: Callable[[Path], object]
) -> None:
    text = filled(model, tmp_path)
    with opened(model, tmp_path) as llm:
        store = engine_of(llm)._scheduler.store
        assert store is not None
        kept, names = store._files, list[str]()

        def read(name: str) -> bytearray | None:
            names.append(name)
            if len(names) == 4:
                lose(kept._folder)
            return PromptFiles._read(kept, name)

        monkeypatch.setattr(kept, "_read", read)
        assert answer(llm) == (text, 12)
        assert answer(llm, PROMPT[1:])[1] == 0
        wait_written(llm)
        counts = llm.statistics().prompt_store
    assert (counts["read"], counts["failed"] > 12, counts.get("wrong", 0)) == (3, True, 0)


def test_a_disk_that_hangs_holds_no_prompt_for_long(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text, others = filled(model, tmp_path), [[first, *PROMPT] for first in (8, 9)]
    with opened(model, tmp_path) as llm:
        expected = [answer(llm, other)[0] for other in others]
    monkeypatch.setattr("specinfer.engine.prompt_store._PATIENCE", 0.05)
    with opened(model, tmp_path) as llm:
        store, names, answers = engine_of(llm)._scheduler.store, list[str](), threading.Event()
        assert store is not None
        kept = store._files

        def read(name: str) -> bytearray | None:
            names.append(name)
            if len(names) == 4:
                answers.wait(60)
            return PromptFiles._read(kept, name)

        monkeypatch.setattr(kept, "_read", read)
        assert answer(llm) == (text, 12)
        assert answer(llm, others[0]) == (expected[0], 0)
        assert len(names) == 4
        answers.set()
        assert store._late is not None
        while not store._late.left:
            time.sleep(0.001)
        assert answer(llm, others[1]) == (expected[1], 48)
        assert llm.statistics().prompt_store["late"] == 1
    assert sum("is not read" in one.message for one in caplog.records) == 1


def test_a_dead_folder_stops_no_step(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = filled(model, tmp_path)
    monkeypatch.setattr("specinfer.engine.prompt_store._PATIENCE", 0.05)
    with opened(model, tmp_path) as llm:
        store, threads, answers = engine_of(llm)._scheduler.store, list[str](), threading.Event()
        assert store is not None
        kept = store._files

        def has(name: str) -> bool:
            threads.append(threading.current_thread().name)
            answers.wait(60)
            return PromptFiles.has(kept, name)

        monkeypatch.setattr(kept, "has", has)
        waiting = [SimpleNamespace(request=SimpleNamespace(adapter=None), lookup=None) for _ in range(3)]
        begun = time.monotonic()
        loaded = [store.load(one, [b"a"][:n], 60.0 * (n == 2)) for n, one in enumerate(waiting)]
        assert (loaded, time.monotonic() < begun + 30) == ([True, False, False], True)
        assert answer(llm) == (text, 0)
        assert answer(llm, [8, *PROMPT])[1] == 0
        assert threads == ["specinfer-prompts-_run_finder"]
        answers.set()
        assert store._late is not None
        while not store._late.left:
            time.sleep(0.001)
        assert answer(llm, [9, *PROMPT])[1] == 0
        assert (len(threads), llm.statistics().prompt_store["late"]) == (4, 1)


def count_objects(root: object) -> int:
    """Count what an object refers to, without code."""
    seen, left = set[int](), [root]
    while left:
        one = left.pop()
        if id(one) not in seen and not isinstance(one, FunctionType | ModuleType | type):
            seen.add(id(one))
            left += gc.get_referents(one)
    return len(seen)


@pytest.mark.parametrize("rounds", [20, pytest.param(625, marks=pytest.mark.thorough)])
def test_conversations_take_bounded_memory(model: Path, tmp_path: Path, rounds: int) -> None:
    size = 1 << 16
    greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    counts = []

    def talk(llm: LLM, number: int) -> list[tuple[int, ...]]:
        """Have 16 conversations of two turns; returns their last tokens."""
        prompts = [[7, 7, 7, 7, number % 251, number // 251, one, *PROMPT[:9]] for one in range(16)]
        answers = [output.token_ids for output in llm.generate(prompts, greedy)]
        later = [[*prompt, *tokens, 8, 9] for prompt, tokens in zip(prompts, answers, strict=True)]
        outputs = llm.generate(later, greedy)
        assert {output.cached_tokens for output in outputs} == {16}
        return [output.token_ids for output in outputs]

    with opened(model, tmp_path, kv_cache_memory=1 << 18, prompt_store_size=size) as llm:
        llm.tokenizer.decode(range(256))  # it keeps the bytes of every token
        begin = talk(llm, 0)
        for number in range(1, rounds):
            if number in (rounds // 2, rounds - 1):
                wait_written(llm)
                counts.append(count_objects(llm))
            talk(llm, number)
        assert talk(llm, 0) == begin
    assert counts[1] - counts[0] < 4 * rounds, "less than an object for two conversations"
    assert sum(path.stat().st_size for path in files(tmp_path)) <= size
