"""Mixtures of experts in the engine: the same text with and without speculation, whoever guesses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specinfer.llm import LLM
from specinfer.sampling_params import SamplingParams
from tests.engines import ENGINE
from tests.tiny_models import write_similar_llama, write_tiny_mixture

pytestmark = pytest.mark.usefixtures("own_cache")

PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [9], list(range(5, 45)), [7, 7, 7, 7]]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PARAMS = [GREEDY, SamplingParams(temperature=1, seed=5, max_tokens=12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_mixture(folder / "target", shared_size=24, tokenizer=True)
    write_similar_llama(folder / "target", folder / "draft", noise=0.1)
    return folder


def texts(folder: Path, **options: object) -> list[tuple[int, ...]]:
    with LLM(folder / "target", **{**ENGINE, **options}) as llm:
        return [tuple(out.token_ids) for params in PARAMS for out in llm.generate(PROMPTS, params)]


def test_text_is_the_same_with_a_draft_and_without(folder: Path) -> None:
    plain = texts(folder, quantization="int8")
    assert texts(folder, quantization="int8", drafts=(str(folder / "draft"),), expansion=(2, 2, 1)) == plain


def test_a_token_whose_routers_have_no_numbers_ends_its_own_request(folder: Path, tmp_path: Path) -> None:
    sick = write_tiny_mixture(tmp_path / "target", tokenizer=True, tie_embeddings=False)
    tensors = load_file(sick / "model.safetensors")
    tensors["model.embed_tokens.weight"][9] = torch.nan
    save_file(tensors, sick / "model.safetensors")
    with LLM(sick, **ENGINE) as llm:
        [want] = llm.generate([[1, 2, 3]], GREEDY)
        [ended, other] = llm.generate([[5, 9], [1, 2, 3]], GREEDY)
        assert ended.finish_reason == "error"
        assert (other.finish_reason, other.token_ids) == (want.finish_reason, want.token_ids)
