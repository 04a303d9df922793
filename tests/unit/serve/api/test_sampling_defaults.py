"""Requests without sampling parameters get the model's recommendation; others keep theirs."""

import json
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from specinfer.errors import ConfigError
from specinfer.sampling_params import DEFAULT_SAMPLING, usual_sampling
from specinfer.serve.api.infill import InfillFields
from specinfer.tokenizer import Tokenizer
from tests.tiny_models import write_tiny_llama
from tests.unit.serve.asked import BODIES, HI, Asked

SAMPLING = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}


def asked(tokenizer: Tokenizer, sampling: dict[str, float], path: str, **more: Any) -> SamplingParams:
    server = Asked(tokenizer, sampling=sampling)
    server.ok(path, **BODIES[path] | more)
    return server.backend.works[0].params


def test_missing_parameters_are_the_models_recommendation(tokenizer: Tokenizer) -> None:
    def law(params: SamplingParams) -> dict[str, float]:
        return {name: getattr(params, name) for name in SAMPLING}

    given = {"temperature": 0, "top_p": 1.0}
    for path in BODIES:
        assert law(asked(tokenizer, SAMPLING, path)) == SAMPLING
        assert law(asked(tokenizer, SAMPLING, path, **given)) == SAMPLING | given
        assert law(asked(tokenizer, {}, path)) == law(SamplingParams())


def test_a_range_of_penalties_is_refused_with_penalties(tokenizer: Tokenizer) -> None:
    for sampling, body, refused in (
        ({}, {"repeat_last_n": 64}, False),
        ({}, {"repeat_last_n": -1, "repeat_penalty": 1.1}, False),
        ({}, {"repeat_last_n": 64, "repeat_penalty": 1.1}, True),
        ({}, {"repeat_last_n": 0, "frequency_penalty": 1}, True),
        (SAMPLING, {"repeat_last_n": 64}, True),
        (SAMPLING, {"repeat_last_n": 64, "repetition_penalty": 1.0}, False),
    ):
        answer = Asked(tokenizer, sampling=sampling).http.post("/completions", json={"prompt": "a"} | body)
        assert answer.status_code == (400 if refused else 200), body
        assert not refused or "allowed: -1" in answer.json()["error"]["message"]


def test_editors_have_llama_cpps_defaults() -> None:
    assert InfillFields(input_prefix="", input_suffix="").takes_defaults is False
    fields = InfillFields(input_prefix="a", input_suffix="b").with_defaults(SAMPLING)
    params = fields.sampling_params(8)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    assert params.repetition_penalty == 1


def test_models_are_listed_with_their_recommendation(tokenizer: Tokenizer) -> None:
    [card] = Asked(tokenizer, sampling=SAMPLING).http.get("/models").json()["data"]
    assert card["sampling_defaults"] == SAMPLING


def test_a_recommendation_of_temperature_or_cuts_is_taken_as_a_whole() -> None:
    for recommended, usual in (
        ({}, {"temperature": 0.8, "top_p": 0.95}),
        ({"repetition_penalty": 1.1}, {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1}),
        ({"temperature": 0.6}, {"temperature": 0.6}),
        ({"top_k": 20, "repetition_penalty": 1.1}, {"top_k": 20, "repetition_penalty": 1.1}),
    ):
        assert usual_sampling(recommended) == usual


def test_the_library_takes_them_where_no_parameters_are_given(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny", vocab_size=256, tokenizer=True)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "other.jinja").write_text("<{{ messages[0].content }}>")
    options: dict[str, Any] = {"lookup": False, "dtype": "float32", "kv_cache_memory": 1 << 20}
    with LLM(folder, **options) as llm:
        assert llm.default_params == SamplingParams(temperature=0)
        once, again = (llm.generate("ab")[0].token_ids for _ in range(2))
        assert once == again
        [answer] = llm.chat(HI, SamplingParams(max_tokens=1))
        assert bytes(answer.prompt_token_ids) == b"Hi"
        with llm.variant(generation_config="none") as other:
            assert other.default_params == SamplingParams(**DEFAULT_SAMPLING)
        with pytest.raises(ConfigError, match="chat_template is 'x'"):
            llm.variant(chat_template="x")
    with LLM(folder, chat_template=tmp_path / "other.jinja", generation_config="none", **options) as llm:
        assert llm.default_params == SamplingParams(**DEFAULT_SAMPLING)
        [answer] = llm.chat(HI, SamplingParams(max_tokens=1))
        assert bytes(answer.prompt_token_ids) == b"<Hi>"
        with pytest.raises(ConfigError, match="generation_config is 'auto'"):
            llm.variant(generation_config="auto")
    with pytest.raises(ConfigError, match=r"cannot read chat_template .*none\.jinja: No such file"):
        LLM(folder, chat_template=tmp_path / "none.jinja", **options)
