"""Quantized models and mixtures: the same text with and without speculation, whatever computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from specinfer.config import EngineConfig
from specinfer.engine.models import load_models
from specinfer.llm import LLM
from specinfer.sampling_params import SamplingParams
from tests.engines import ENGINE
from tests.kernels import NAMES, kernels
from tests.tiny_models import write_similar_llama, write_tiny_mixture

pytestmark = pytest.mark.usefixtures("own_cache")  # of quantized weights

PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [9], list(range(5, 45)), [7, 7, 7, 7]]
PARAMS = [SamplingParams(temperature=0, max_tokens=12), SamplingParams(temperature=1, seed=5, max_tokens=12)]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures")
    write_tiny_mixture(folder / "target", shared_size=24, tokenizer=True)
    write_similar_llama(folder / "target", folder / "draft", noise=0.1)
    return folder


def texts(folder: Path, **options: object) -> list[tuple[int, ...]]:
    llm = LLM(folder / "target", **{**ENGINE, "kernels": "torch", **options})
    return [tuple(out.token_ids) for params in PARAMS for out in llm.generate(PROMPTS, params)]


@pytest.mark.thorough
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_speculation_does_not_change_the_text(
    folder: Path, mixture: Path, name: Literal["torch", "native"], quantization: str, dtype: str
) -> None:
    kernels(name)
    options = {"quantization": quantization, "dtype": dtype, "kernels": name}
    for models in (folder, mixture):
        plain = texts(models, **options)
        assert quantization == "none" or plain != texts(models, dtype=dtype, kernels=name), models
        draft = {"drafts": (str(models / "draft"),), "expansion": (2, 2, 1)}
        for more in (
            {"lookup": True},
            draft,
            {**draft, "draft_quantization": "int4"},
            {**draft, "max_batch_size": 1, "tree_size": "cost"},
        ):
            assert texts(models, **more, **options) == plain, (models, more)


def test_a_draft_is_quantized_on_its_own(folder: Path, own_cache: Path) -> None:
    options = {**ENGINE, "drafts": (str(folder / "draft"),), "draft_quantization": "int8"}
    load_models(EngineConfig.from_options(str(folder / "target"), {**options, "kernels": "torch"}))
    [kept] = (own_cache / "prepared").glob("*.safetensors")
    assert kept.name.startswith("draft-int8-")


def test_only_the_rows_of_a_draft_may_depend_on_how_many_there_are(folder: Path) -> None:
    kernels("native")
    options = {**ENGINE, "kernels": "native", "drafts": (str(folder / "draft"),)}
    models = load_models(EngineConfig.from_options(str(folder / "target"), options))
    loose = [model.kernels.products.use.loose for model in (models.target, *models.drafts.values())]
    assert loose == [False, True]
