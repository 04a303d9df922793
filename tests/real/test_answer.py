"""The shortest run of a real model: trees save steps, and the text is that of the model alone."""

from __future__ import annotations

from specinfer import LLM, SamplingParams

from .models import smollm2

LINE = "the quick brown fox jumps over the lazy dog. "


def test_trees_save_steps_and_leave_the_text() -> None:
    with LLM(smollm2(), lookup=True, tree_size="fixed", max_context=256, kv_cache_memory=1 << 26) as llm:
        plain = llm.variant(lookup=False)
        for temperature in (0, 0.8):
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=24, ignore_eos=True)
            [expected], [output] = plain.generate([LINE * 3], params), llm.generate([LINE * 3], params)
            assert output.token_ids == expected.token_ids, temperature
            assert output.figures.steps < expected.figures.steps, temperature
