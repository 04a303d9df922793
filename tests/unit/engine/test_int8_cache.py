"""KV cache in int8: with = without speculation, alone = in a batch, half the bytes, and refused by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from specinfer.attention.cached_rows import CachedRows
from specinfer.errors import ConfigError
from specinfer.llm import LLM
from specinfer.runtime.kv_cache import KvCache, bytes_per_block
from specinfer.sampling_params import SamplingParams
from specinfer.serve.backend.work import fingerprint
from specinfer.support import Feature, check_support
from tests.engines import ENGINE, Tiny, assert_idle, runner_of, slow_generate, write_tiny
from tests.foreign import write_foreign_llama
from tests.hosted import save_tiny
from tests.kernels import NAMES, kernels
from tests.switched import PLAIN, SWITCHED, build
from tests.tiny_models import write_byte_tokenizer, write_tiny_llama
from tests.unit.engine.offloading import resident, streamed

PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [9], [40, 41, 42, 40, 41, 42, 40, 41], list(range(5, 45)), [7, 7, 7, 7]]
GREEDY, RANDOM = (SamplingParams(temperature=t, seed=11, max_tokens=16) for t in (0, 1))
# Windows, caps, sinks, ALiBi, shared keys, and layers with recurrences.
KINDS = ("gemma2", "gpt-oss", "gemma4", "falcon-rw", "lfm2", "qwen3.5", "falcon-h1")


def texts(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [list(output.token_ids) for output in llm.generate(prompts, params)]


def differing(tiny: Tiny, prompts: list[list[int]], params: SamplingParams) -> list[int]:
    """The prompts whose text depends on guesses, on the batch or on chunks."""
    options = {"max_step_tokens": 7, "max_batch_size": 3, "block_size": 3}
    guessed = texts(tiny.llm(drafts=["similar"], lookup=True, **options), prompts, params)
    alone = tiny.llm(max_batch_size=1)
    return [n for n, prompt in enumerate(prompts) if texts(alone, [prompt], params) != [guessed[n]]]


@pytest.mark.parametrize("name", NAMES)
def test_a_text_with_guesses_is_the_targets(tmp_path: Path, name: Literal["torch", "native"]) -> None:
    tiny = write_tiny(tmp_path, replace(kernels(name), int8_cache=True))
    for params in (GREEDY, RANDOM):
        assert differing(tiny, PROMPTS, params) == []
        wanted = [slow_generate(tiny.target, prompt, params) for prompt in PROMPTS[:2]]
        assert texts(tiny.llm(), PROMPTS[:2], params) == wanted
    llm = tiny.llm(drafts=["similar"])
    assert {rows.dtype for rows in runner_of(llm).cache.keys} == {torch.int8}
    assert not tiny.similar.kernels.int8_cache


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_all_kinds(tmp_path: Path, kind: str) -> None:
    plain = write_tiny(tmp_path, kernels("native"))
    rounded = replace(kernels("native"), int8_cache=True)
    models = [build(SWITCHED[kind], rounded), build(SWITCHED[kind], kernels("native"), noise=0.02)]
    tiny = Tiny(*models, stranger=models[1], tokenizer=plain.tokenizer)
    assert differing(tiny, PROMPTS[:3], RANDOM) == []


@pytest.mark.slow
def test_two_hundred_texts_are_the_same(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path, replace(kernels("native"), int8_cache=True), num_layers=3, max_context=128)
    prompts = [[(7 * n + 3 * i * i) % 60 for i in range(1 + n % 60)] for n in range(200)]
    assert differing(tiny, prompts, replace(RANDOM, max_tokens=40)) == []


def check_guesses(llm: LLM, alone: LLM) -> None:
    """Require that an int8 cache gives the texts of one without guesses."""
    assert {rows.dtype for rows in runner_of(llm).cache.keys} == {torch.int8}
    prompts = PROMPTS[:3]
    for params in (GREEDY, RANDOM):
        wanted = [texts(alone, [prompt], params)[0] for prompt in prompts]
        assert texts(llm, prompts, params) == wanted
    assert sum(llm.statistics().guessed_tokens.values()) > 0
    assert_idle(llm)


def test_a_draft_with_another_tokenizer(tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target", tokenizer=True)
    draft = write_foreign_llama(target, tmp_path / "draft", words=["12"], lacks=[30])
    options = {**ENGINE, "kv_cache_dtype": "int8", "drafts": (str(draft),)}
    with LLM(target, **options) as llm, llm.variant(drafts=(), max_batch_size=1) as alone:
        assert [*llm.models.foreign] == ["draft"]
        check_guesses(llm, alone)


@pytest.mark.thorough
def test_a_model_through_transformers(tmp_path: Path) -> None:
    save_tiny("gpt2", tmp_path)
    write_byte_tokenizer(tmp_path, 160)
    options = {**ENGINE, "kv_cache_dtype": "int8", "model_impl": "transformers", "lookup": True}
    with LLM(tmp_path, **options) as llm, llm.variant(lookup=False, max_batch_size=1) as alone:
        check_guesses(llm, alone)


@pytest.mark.usefixtures("no_thread_is_left")
def test_streamed_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels("native")
    target = write_tiny_llama(tmp_path / "target", tokenizer=True, num_layers=3)
    options: dict[str, Any] = {"kv_cache_dtype": "int8", "offload_folder": tmp_path / "disk"}
    with (
        streamed(target, monkeypatch, **options, lookup=True) as llm,
        resident(target, **options, max_batch_size=1) as alone,
    ):
        check_guesses(llm, alone)


def test_a_head_that_is_tiny_huge_or_not_a_number() -> None:
    rows = CachedRows(torch.ones(3, 2, 4, dtype=torch.int8), torch.ones(3, 2, dtype=torch.bfloat16))
    given = torch.tensor(
        [[[1e-31, 0, 0, -1e-32], [1e30, -3e38, 0, 1e36]], [[0.0] * 4, [1.0, float("nan"), 2, 3]]]
    )
    rows.write(torch.tensor([2, 0]), given)
    found = rows.read(torch.tensor([2, 0]), torch.float32)
    assert found[0, 0].tolist() == found[1, 0].tolist() == [0.0] * 4
    torch.testing.assert_close(found[0, 1], given[0, 1], atol=3e38 / 250, rtol=0)
    assert found[1, 1].isnan().all()


def test_the_cache_takes_about_half_of_the_bytes_and_moves_scales() -> None:
    config = replace(PLAIN, num_heads=8, num_kv_heads=8, head_dim=64)
    sizes = [bytes_per_block([(config, dtype)], 16) for dtype in (torch.int8, torch.bfloat16)]
    assert sizes[0] / sizes[1] <= 0.53
    cache = KvCache(config, 8, torch.int8, torch.device("cpu"))
    for layer in range(config.num_layers):
        cache.values[layer][5], cache.scales[layer][1][5] = layer + 1, layer + 2
    cache.move([5], [2])
    found = [
        (int(v[2].max()), float(of_v[2].max()))
        for v, (_, of_v) in zip(cache.values, cache.scales, strict=True)
    ]
    assert found == [(layer + 1, layer + 2) for layer in range(config.num_layers)]


def test_the_option_reaches_the_cache_and_the_fingerprint(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    made = set[str]()
    for dtype, found in (("auto", torch.float32), ("int8", torch.int8)):
        with LLM(tmp_path / "target", **{**ENGINE, "kv_cache_dtype": dtype}) as llm:
            assert runner_of(llm).cache.keys[0].dtype is found
            made.add(fingerprint(llm))
            with pytest.raises(ConfigError, match="kv_cache_dtype"):
                llm.variant(kv_cache_dtype="int8" if dtype == "auto" else "auto")
    assert len(made) == 2


def test_a_gpu_is_refused() -> None:
    sentence = "kv_cache_dtype is 'int8' on device cuda; allowed there: auto"
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        check_support({Feature.INT8_CACHE: "int8", Feature.GPU: "cuda"})
