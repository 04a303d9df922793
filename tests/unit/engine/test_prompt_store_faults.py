"""Kills, missing rights and many conversations cost no text and no memory."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

from specinfer.engine.prompt_files import PromptFiles
from specinfer.llm import LLM
from specinfer.sampling_params import SamplingParams
from tests.engines import ENGINE
from tests.tiny_models import write_tiny_llama
from tests.unit.engine.test_prompt_store import PROMPT, answer, files, opened, wait_written

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
# Reads and writes files in these folders as a user without rights of an administrator.
USER = """
import os, sys
from pathlib import Path
from specinfer.engine.prompt_files import PromptFiles
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for folder in sys.argv[1:]:
    files = PromptFiles(Path(folder), 1 << 20, "f" * 64)
    there, reading = files.has("a"), files.read(["a"])
    bodies = [*reading.take(60)]
    files.write("b", bytearray(9))
    files.close()
    print(there, *map(bytes, bodies), files.counts["read"], files.counts["failed"])
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


def test_a_folder_without_rights_is_not_read_or_not_written(tmp_path: Path) -> None:
    cases = (
        # rights of the folder and of its file; what a user sees of the file, reads, and failures
        (0o755, 0o644, "True b'text' 1 1"),
        (0o755, 0o000, "True 0 2"),
        (0o000, 0o644, "False 0 2"),
    )
    folders = [tmp_path / f"{rights:o}-{of_file:o}" for rights, of_file, _ in cases]
    tmp_path.chmod(0o755)
    for folder, (rights, of_file, _) in zip(folders, cases, strict=True):
        kept = PromptFiles(folder, 1 << 20, "f" * 64)
        kept.write("a", bytearray(b"text"))
        kept.close()
        [path] = files(folder)
        path.chmod(of_file)
        folder.chmod(0o755)
        path.parent.chmod(rights & 0o555)
    # A user may search the folder that it is in, wherever that is.
    names = [folder.name for folder in folders]
    seen = subprocess.run(
        [sys.executable, "-c", USER, *names], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    for folder in tmp_path.glob("*/*"):
        folder.chmod(0o755)
    assert seen.stdout.splitlines() == [expected for _, _, expected in cases]


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
