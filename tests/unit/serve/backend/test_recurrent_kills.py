"""A server of a hybrid whose engine is killed twenty times: states begin again each time."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from specinfer import LLM, SamplingParams
from tests.parity.families import save_random
from tests.served import Served
from tests.tiny_models import write_byte_tokenizer, write_similar_llama
from tests.unit.serve.backend.listeners import SEEDS, TOKENS, Listeners, engines, ready
from tests.unit.serve.conftest import FLAGS

pytestmark = pytest.mark.slow  # each engine starts again

KILLS, OF_A_ROUND = 20, 7  # a request is not tried more than ten times


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "nemotron-h"])
def test_texts_are_those_of_their_seeds(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_random(name, model, tied=False, vocab_size=256, max_position_embeddings=2048)
    write_byte_tokenizer(model, 256)
    draft = write_similar_llama(model, tmp_path / "draft")
    params = [SamplingParams(temperature=1, seed=s, max_tokens=TOKENS, ignore_eos=True) for s in SEEDS]
    with LLM(model, lookup=False, dtype="float32", kv_cache_memory=1 << 26) as llm:
        expected = [output.text for output in llm.generate([f"{s}abc" for s in SEEDS], params)]
    flags = ("--served-model-name", "tiny", "--draft", str(draft), "--kv-cache-memory", "64MB")
    with Served(model, *FLAGS, *flags) as served:
        kills = 0
        while kills < KILLS:
            listeners, end = Listeners(served), min(KILLS, kills + OF_A_ROUND)
            while kills < end and listeners.listen():
                if ready(served) and listeners.grew():  # a request may see three deaths without progress
                    time.sleep(0.07 * kills % 0.6)
                    with suppress(ProcessLookupError, IndexError):
                        os.kill(engines(served.process.pid)[0], signal.SIGKILL)
                        kills += 1
                time.sleep(0.3)
            assert listeners.end() == expected
        assert served.metric("engine_restarts") == KILLS
