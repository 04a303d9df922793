"""Hybrids with every feature of engines: texts are those of the target alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from tests.engines import ENGINE, assert_idle
from tests.heads import tiny_head, write_tiny_head
from tests.kernels import kernels
from tests.parity.families import save_random
from tests.tiny_models import write_byte_tokenizer, write_similar_llama, write_tiny_llama
from tests.unit.engine.heads.head_engines import HEADS
from tests.unit.engine.offloading import Planned, streamed

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.thorough]

HYBRIDS = ("lfm2-biases", "qwen3.5", "nemotron-h", "falcon-h1")
VOCAB = 64
PROMPTS = [[9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [3] * 37, [50, 2, 61, 7], [1], [3] * 37 + [4]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True),
]


@pytest.fixture(scope="module", params=HYBRIDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid and one like it, a plain model and one like it, and heads."""
    kernels("native")
    folder = tmp_path_factory.mktemp("features")
    save_random(request.param, folder / "hybrid", tied=False, vocab_size=VOCAB)
    write_byte_tokenizer(folder / "hybrid", VOCAB)
    write_tiny_llama(folder / "plain", tokenizer=True, vocab_size=VOCAB)
    for name in ("hybrid", "plain"):
        write_similar_llama(folder / name, folder / f"{name}-draft", noise=0.05)
    for number, (name, config) in enumerate(HEADS.items()):
        if request.param != "falcon-h1":  # it scales embeddings, which heads would take from it
            write_tiny_head(tiny_head(config, seed=number), folder / name)
    return folder


def opened(folder: Path, target: str = "hybrid", *drafts: str, **options: Any) -> LLM:
    named = tuple(draft if draft == "self" else str(folder / draft) for draft in drafts)
    how = {**ENGINE, "block_size": 4, "max_batch_size": 3, "max_step_tokens": 24}
    return LLM(folder / target, **{**how, "drafts": named, **options})


def texts(llm: LLM) -> list[tuple[int, ...]]:
    """Return the texts of an engine that is then closed; each prompt is given twice."""
    with llm:
        found = [[out.token_ids for one in PARAMS for out in llm.generate(PROMPTS, one)] for _ in "12"]
        assert found[0] == found[1]
        assert_idle(llm)
        assert llm.statistics().failures == {}
        if llm.config.speculation.drafts:
            assert sum(llm.statistics().guessed_tokens.values()) > 100
        return found[0]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_drafts_of_every_kind(folder: Path, quantization: str) -> None:
    how: dict[str, Any] = {"quantization": quantization}
    for target, drafts in {
        "hybrid": [
            ("hybrid-draft",),
            ("plain",),
            ("hybrid-draft", "plain-draft"),
            *((name,) for name in HEADS if (folder / name).exists()),
        ],
        "plain": [("hybrid",), ("plain-draft", "hybrid-draft")],
    }.items():
        want = texts(opened(folder, target, prefix_reuse=False, **how))
        for number, named in enumerate(drafts):
            assert texts(opened(folder, target, *named, lookup=number % 2 == 0, **how)) == want, named


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hybrid_as_its_own_draft(folder: Path, dtype: str) -> None:
    for quantization in ("none", "int8"):
        how = {"dtype": dtype, "quantization": quantization}
        assert texts(opened(folder, "hybrid", "self", **how)) == texts(opened(folder, **how))


@pytest.mark.parametrize("plan", [Planned(), Planned((1,), 3), Planned(self_draft=True)], ids=str)
def test_streamed_layers(folder: Path, plan: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    for quantization in ("none", "int8"):
        how: dict[str, Any] = {"quantization": quantization, "max_batch_size": 3, "block_size": 4}
        want = texts(opened(folder, **how))
        assert texts(streamed(folder / "hybrid", monkeypatch, plan, **how, lookup=True)) == want
