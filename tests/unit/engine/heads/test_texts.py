"""The text is the same with a head and without, whoever comes and goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specinfer import SamplingParams
from specinfer.heads.checkpoint import AnyHeadModel
from specinfer.tokenizer import Tokenizer
from tests.engines import Tiny, assert_idle, slow_generate
from tests.unit.engine.heads.head_engines import HEADS, PROMPTS, SAMPLED, engine


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


@pytest.mark.parametrize("name", HEADS)
def test_a_form_is_kept(tiny: Tiny, heads: dict[str, AnyHeadModel], folder: Path, name: str) -> None:
    """Heads know nothing of forms."""
    tokenizer = Tokenizer.load(folder / "target")
    tokenizer.eos_token_ids = frozenset({63})  # grammars need an end of text
    tiny = replace(tiny, tokenizer=tokenizer)
    for form in ({"allowed_token_ids": (4, 5, 6, 7, 40)}, {"regex": "[0-9 ,]{18}"}):
        params = SamplingParams(max_tokens=24, temperature=0.7, seed=3, **form)  # type: ignore[arg-type]
        with engine(tiny, None) as llm:
            alone = llm.generate(PROMPTS, params)
        with engine(tiny, heads[name]) as llm:
            outputs = llm.generate(PROMPTS, params)
        assert [one.token_ids for one in outputs] == [one.token_ids for one in alone], form
        assert sum(one.figures.accepted_by.get("draft", 0) for one in outputs) > 0, form
