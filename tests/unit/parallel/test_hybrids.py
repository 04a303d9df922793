"""Hybrids on ranks and in stages, which are threads here, say what one process says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer import SamplingParams
from specinfer.kernels.choice import draft_kernels
from specinfer.models.language_model import LanguageModel
from specinfer.models.weights import load_model
from specinfer.runtime.stages import StageTimes
from tests.kernels import kernels
from tests.ranks import CPU, llm_of, ranks_of, whole_model
from tests.tiny_models import write_byte_tokenizer, write_similar_llama
from tests.unit.parallel.conftest import Saved
from tests.unit.parallel.test_texts import FAMILIES

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.thorough]
PROMPTS = [[*range(1, 30)], [9], [*range(1, 20), 50], [*range(1, 20), 60, 61]]
PARAMS = [SamplingParams(temperature=t, seed=5, max_tokens=12, ignore_eos=True) for t in (0, 0.9)]


@pytest.mark.parametrize("family", ["lfm2-biases", "qwen3.5", "nemotron-h"])
def test_texts_are_those_of_one_process(
    family: str, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = saved(family, **FAMILIES[family])
    write_byte_tokenizer(target, 100)
    similar = write_similar_llama(target, tmp_path / "similar", noise=0.1)
    native = kernels("native")
    draft = load_model(similar, dtype=torch.float32, device=CPU, kernels=draft_kernels(native))

    def texts(model: LanguageModel, **options: Any) -> list[tuple[tuple[int, ...], int]]:
        llm = llm_of(model, target, {"draft": draft}, block_size=4, max_step_tokens=24, **options)
        found = [
            (out.token_ids, out.cached_tokens)
            for params in (*PARAMS, *PARAMS)
            for out in llm.generate(PROMPTS, params)
        ]
        llm.check_integrity()
        assert llm.statistics().failures == {}
        llm.close()
        return found

    for quantization, size, stages in (("int8", 2, 1), ("int4", 2, 2), ("none", 4, 2)):
        how: dict[str, Any] = {"quantization": quantization}
        want = texts(whole_model(target, native, tmp_path, width=size // stages, **how))
        assert want[-1][1] > 16, "a checkpoint is found"
        with ranks_of(target, size, native, tmp_path, stages=stages, whole_table=True, **how) as model:
            assert texts(model) == want, (quantization, size, stages)
            with monkeypatch.context() as patch:  # passes of several parts
                patch.setattr(StageTimes, "parts", lambda self, rows, stages: min(rows, 3, 2 * stages - 1))
                assert texts(model) == want, (quantization, size, stages)
