"""Folders of heads as drafts: loading, timing, cost-based sizes, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specinfer import SamplingParams
from specinfer.config import EngineConfig
from specinfer.engine.models import Models
from specinfer.errors import ConfigError, ModelError
from specinfer.heads.checkpoint import AnyHeadModel
from specinfer.llm import LLM
from specinfer.runtime.cost_curve import CostCurve
from tests.engines import ENGINE, Tiny
from tests.unit.engine.heads.head_engines import PROMPTS, AnyHead


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("quantization", "dtype", "kernels"),
    [
        ("none", "bfloat16", "auto"),
        ("none", "float32", "torch"),
        ("int8", "float32", "auto"),
        ("int4", "bfloat16", "auto"),
    ],
)
@pytest.mark.usefixtures("own_cache")  # of quantized matrices
def test_a_folder_is_a_draft(
    folder: Path, modules: dict[str, AnyHead], quantization: str, dtype: str, kernels: str
) -> None:
    heads = [str(folder / f"head{number}") for number in range(len(modules))]
    options: dict[str, Any] = {**ENGINE, "dtype": dtype, "kernels": kernels}
    params = SamplingParams(max_tokens=6, temperature=0)
    with LLM(str(folder / "target"), **options) as llm:
        (alone,) = llm.generate([PROMPTS[0]], params)
    for _ in range(2):  # made, then read where they were kept
        with LLM(str(folder / "target"), **options, drafts=heads, draft_quantization=quantization) as llm:
            (output,) = llm.generate([PROMPTS[0]], params)
        assert output.token_ids == alone.token_ids
        assert set(output.figures.proposed_by) == {f"draft{i}" for i in range(1, 1 + len(heads))}


def test_a_heads_pass_is_timed_behind_its_targets(
    tiny: Tiny, heads: dict[str, AnyHeadModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: dict[object, object] = {}

    def curve(runner: Any, *, behind: Any, **_: object) -> CostCurve:
        timed[runner.model] = behind and behind.model
        return CostCurve((1, 8), (1.0, 2.0))

    monkeypatch.setattr("specinfer.engine.costs.cost_curve", curve)
    named = {"a model": tiny.similar, "eagle": heads["eagle"], "block": heads["block"]}
    config = EngineConfig.from_options("tiny", {**ENGINE, "drafts": tuple(named), "tree_size": "cost"})
    LLM.from_models(config, Models(tiny.target, tiny.tokenizer, named)).close()
    assert timed == {
        tiny.target: None,
        tiny.similar: None,
        heads["eagle"]: tiny.target,
        heads["block"]: tiny.target,
    }


@pytest.mark.usefixtures("heads")
def test_what_heads_do_not_heed_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"draft_lora gives .*head0 an adapter, and it is a head; "):
        LLM(str(folder / "target"), **ENGINE, drafts=[str(folder / "head0")], draft_lora="one")
    with pytest.raises(ModelError, match="name it in drafts"):
        LLM(str(folder / "head0"), **ENGINE)
