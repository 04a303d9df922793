"""The text is the same with a head and without, whoever comes and goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specinfer import SamplingParams
from specinfer.config import EngineConfig
from specinfer.engine.models import Models
from specinfer.engine.steps import TreeEvent
from specinfer.errors import ConfigError
from specinfer.heads.checkpoint import AnyHeadModel
from specinfer.llm import LLM
from specinfer.plan import PlanEntry
from specinfer.runtime.cost_curve import CostCurve
from specinfer.speculate.drafts.draft import CachedText, CachedTexts
from tests.engines import ENGINE, Tiny, assert_idle, slow_generate
from tests.unit.engine.heads.head_engines import HEADS, PROMPTS, SAMPLED, AnyHead, engine, shaped


@pytest.mark.few(6)
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    ("sampling", "reuse"), [({"temperature": 0}, True), (SAMPLED, False), ({**SAMPLED, "top_p": 0.9}, True)]
)
def test_the_text_is_that_of_the_target_alone(
    tiny: Tiny, heads: dict[str, AnyHeadModel], name: str, sampling: dict[str, Any], reuse: bool
) -> None:
    params = SamplingParams(max_tokens=24, **sampling)
    alone = [slow_generate(tiny.target, prompt, params) for prompt in PROMPTS]
    with engine(tiny, heads[name], block_size=4, prefix_reuse=reuse, max_step_tokens=20) as llm:
        for _ in range(2):  # the second run uses the first one's cache
            outputs = llm.generate(PROMPTS, params)
            assert [list(output.token_ids) for output in outputs] == alone
            assert sum(output.figures.proposed_by.get("draft", 0) for output in outputs) > 0
        assert_idle(llm)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("options", [{}, {"lookup": True}], ids=str)
def test_requests_that_come_and_go_change_nothing(
    tiny: Tiny, heads: dict[str, AnyHeadModel], name: str, options: dict[str, Any]
) -> None:
    # 26 blocks of 4 for 6 requests of up to 40 tokens and their trees: they push each other out.
    prompts = [[(7 * i + j) % 64 for j in range(5 + 3 * i)] for i in range(6)]
    params = [
        SamplingParams(max_tokens=20, temperature=0.0 if i % 2 else 0.8, seed=i, stop_token_ids=(33,))
        for i in range(6)
    ]
    with engine(tiny, None, block_size=4) as llm:
        alone = [tuple(llm.generate([p], q)[0].token_ids) for p, q in zip(prompts, params, strict=True)]
    cached = [tiny.target.config, heads[name].config]
    slots = 4 * sum(2 * c.num_layers * c.num_kv_heads * c.head_dim for c in cached)
    with engine(
        tiny, heads[name], max_context=48, block_size=4, kv_cache_memory=26 * 4 * slots, **options
    ) as llm:
        outputs = llm.generate(prompts, params)
        assert [output.token_ids for output in outputs] == alone
        assert llm.statistics().preemptions > 0
        assert sum(output.figures.proposed_by.get("draft", 0) for output in outputs) > 0
        assert_idle(llm)


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


def test_a_pass_is_timed(tiny: Tiny, heads: dict[str, AnyHeadModel], monkeypatch: pytest.MonkeyPatch) -> None:
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


# Rows that an engine before had read.


PROMPT = [(7 * i) % 61 for i in range(50)]  # 12 blocks of 4, and 2 tokens


def test_drafts_begin_behind_stored_rows(
    tiny: Tiny, heads: dict[str, AnyHeadModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[tuple[int, int]] = []
    miss = CachedTexts._miss

    def start(texts: CachedTexts, entry: PlanEntry, limit: int) -> CachedText:
        text = found(texts, entry, limit)
        starts.append((text.origin, text.cached))
        return text

    def missed(texts: CachedTexts, text: CachedText, first: int) -> None:
        miss(texts, text, first)
        starts.append((text.origin, text.cached))

    found = CachedTexts._start
    monkeypatch.setattr(CachedTexts, "_start", start)
    monkeypatch.setattr(CachedTexts, "_miss", missed)

    def run(store: Path, name: str, times: int = 1) -> tuple[Sequence[int], list[object]]:
        """Answer in a new engine; returns the last text and its guesses."""
        draft = tiny.similar if name == "model" else heads[name]
        options = {**ENGINE, "block_size": 4, "prompt_store": store, "drafts": (name,)}
        config = EngineConfig.from_options("tiny", options)
        models = Models(tiny.target, tiny.tokenizer, {"draft": draft}, origin={"model": "tiny"})
        with LLM.from_models(config, models) as llm:
            for _ in range(times):
                starts.clear()
                events: list[TreeEvent] = []
                llm.on_tree = events.append
                (output,) = llm.generate([PROMPT], shaped(10))
        trees = [event.tree for event in events]
        return output.token_ids, [
            (tree.token_ids, tree.parents, [draw.confidence for draw in tree.draws]) for tree in trees
        ]

    for name in ("model", *heads):
        expected = run(tmp_path / name, name, times=2)
        kept = [*starts]
        assert kept == [(0, 48)], name
        assert run(tmp_path / name, name) == expected, name
        assert starts == kept, name
        for path in (tmp_path / name).glob("*/*.*"):
            path.write_bytes(path.read_bytes()[:-1])  # damaged
        assert run(tmp_path / name, name)[0] == expected[0], name
        assert starts[-1] == ((0, 0) if name == "model" else (48, 48)), name
