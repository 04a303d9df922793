"""Variants: loaded models with another config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specinfer import EngineConfig, SamplingParams
from specinfer.engine.build import _policy_key
from specinfer.engine.models import Models
from specinfer.errors import ConfigError
from specinfer.llm import LLM
from specinfer.plan import StepPlan
from specinfer.speculate.speculator import Speculator
from specinfer.speculation_config import NO_SPECULATION
from specinfer.tree import TokenTree
from specinfer.tree.token_tree import single_node
from tests.engines import ENGINE, Tiny, runner_of, slow_generate, write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SEEDED = SamplingParams(temperature=1, seed=11, max_tokens=16)
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [9], [40, 41, 42, 40, 41, 42, 40, 41]]


def test_a_variant_has_the_same_weights_and_a_cache_and_options_of_its_own(tiny: Tiny) -> None:
    llm = tiny.llm(drafts=["similar"], max_context=80)
    other = llm.variant(lookup=True, max_batch_size=2)
    assert other.models.target is llm.models.target
    assert other.models.drafts == llm.models.drafts
    assert runner_of(other).cache is not runner_of(llm).cache
    assert (other.config.speculation.lookup, other.config.scheduler.max_batch_size) == (True, 2)
    assert (other.config.speculation.drafts, other.max_context) == (("similar",), 80)
    assert not llm.config.speculation.lookup
    llm.close()
    outputs = other.generate(PROMPTS, SEEDED)
    assert [[*o.token_ids] for o in outputs] == [slow_generate(tiny.target, one, SEEDED) for one in PROMPTS]


def test_a_variant_may_have_fewer_drafts_by_the_names_they_have(tiny: Tiny) -> None:
    llm = tiny.llm(drafts=["similar", "stranger"])
    assert list(llm.variant(drafts=["stranger"]).models.drafts) == ["1-stranger"]
    assert list(llm.variant(drafts=["stranger", "similar"]).models.drafts) == ["1-stranger", "0-similar"]
    assert llm.variant(drafts=()).models.drafts == {}
    second = llm.variant(drafts=["stranger"])
    [key] = _policy_key(second.config, second.models)["drafts"]
    assert key.startswith("1-stranger: stranger"), "its learned rates are not those of an engine's only draft"
    output = llm.variant(drafts=["stranger"]).generate(PROMPTS[:1], GREEDY)[0]
    assert list(output.figures.proposed_by) == ["1-stranger"]


def test_a_variant_that_needs_other_weights_is_refused(tiny: Tiny) -> None:
    llm = tiny.llm(drafts=["similar"])
    for options, line in (
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16', and a variant shares weights that were loaded with"),
        ({"quantization": "int8"}, "quantization is 'int8', and a variant shares weights that were loaded"),
        ({"kernels": "native"}, "kernels is 'native', and"),
        ({"threads": 1}, "threads is 1, and"),
        ({"drafts": ["stranger"]}, "drafts names 'stranger'; allowed for a variant: loaded drafts (similar)"),
        ({"drafts": ["similar"] * 2}, "drafts names 'similar'; allowed for a variant: loaded drafts (sim"),
        ({"max_nodes": 0}, "max_nodes is 0; allowed: an integer >= 1"),
        ({"engine": 1}, "unknown option 'engine'"),
    ):
        with pytest.raises(ConfigError) as caught:
            pytest.fail(f"{options}: {llm.variant(**options)}")
        assert str(caught.value).startswith(line), options


class Nothing(Speculator):
    """A speculator that never guesses."""

    name = "nothing"

    def __init__(self) -> None:
        self.asked = 0

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        self.asked += 1
        return [single_node(entry.token_ids[entry.end - 1]) for entry in plan.tree_entries]


def test_a_variant_has_the_speculators_it_is_given(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    one, other = Nothing(), Nothing()
    config = EngineConfig.from_options("tiny", ENGINE)
    llm = LLM.from_models(config, Models(tiny.target, tiny.tokenizer, {}), [one])
    llm.variant(speculators=[other]).generate(PROMPTS[:1], GREEDY)
    llm.variant().generate(PROMPTS[:1], GREEDY)
    assert one.asked == 0
    assert other.asked > 1
    assert not caplog.records, "it was asked to the end"


def test_without_speculation_nobody_guesses_not_even_what_a_grammar_forces(tmp_path: Path) -> None:
    forced = SamplingParams(temperature=0, max_tokens=20, regex="the same text always", prediction="the s")
    with write_tiny(tmp_path, vocab_size=128, eos_token_id=5).llm(lookup=True) as llm:
        plain = llm.variant(replace(llm.config, speculation=NO_SPECULATION))
        texts = []
        for each, guessed in ((llm, True), (llm.variant(lookup=False), True), (plain, False)):
            output = each.generate("a", forced)[0]
            assert (output.figures.drafted_tokens > 0) == guessed
            texts.append(output.text)
        assert texts == ["the same text always"] * 3
