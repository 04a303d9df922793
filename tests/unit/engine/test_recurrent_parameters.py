"""Sampling parameters through engines of models with recurrent layers: the tokens are the slow oracle's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specinfer import LLM
from specinfer.models.config import ModelConfig
from specinfer.tokenizer import Tokenizer
from tests.engines import Tiny
from tests.switched import RECURRENT, SWITCHED, switched_tiny
from tests.tiny_models import write_tiny_llama
from tests.unit.engine.byte_oracle import EOS, PARAMS, PROMPTS, VOCAB, Oracle, params_of, tokens
from tests.unit.engine.test_parameters import llms, oracle, test_scores_of_a_prompt

__all__ = ["llms", "oracle", "test_scores_of_a_prompt"]  # with the models of this file


def lettered(name: str) -> ModelConfig:
    """That model with bytes as tokens, and laws that are not too sharp for several tokens to be likely."""
    own = {"vocab_size": VOCAB, "max_context": 96, "eos_ids": (EOS,), "logit_scale": 2.0}
    return replace(SWITCHED[name], **own)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=RECURRENT)
def letters(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder: Path = tmp_path_factory.mktemp("letters")
    write_tiny_llama(folder, vocab_size=VOCAB, eos_token_id=EOS, tokenizer=True)
    return switched_tiny(lettered(request.param), Tokenizer.load(folder))


@pytest.mark.few(1)
def test_tokens_are_the_oracles(llms: dict[str, LLM], oracle: Oracle) -> None:
    for name in PARAMS:
        expected = [oracle.text(prompt, params_of(name)) for prompt in PROMPTS]
        for speculation, llm in llms.items():
            assert tokens(llm.generate(PROMPTS, params_of(name))) == expected, (name, speculation)
            llm.check_integrity()
    for llm in llms.values():
        assert llm.statistics().failures == {}
    guessed = llms["both"].statistics().guessed_tokens
    assert all(guessed[name] > 500 for name in ("lookup", "0-similar", "1-stranger"))
