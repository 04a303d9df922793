"""Outlines: structured output, in the requests of OpenAI's client and of vLLM's."""

from __future__ import annotations

import json
import re
from typing import Literal

import openai
import outlines
from outlines.types import CFG, Regex
from zoo import LISBON, MODEL, RIVERS, URL, check, refused, says
from zoo_forms import Weather

client = openai.OpenAI(base_url=URL, api_key="unused")
as_openai = outlines.from_openai(client, MODEL)
as_vllm = outlines.from_vllm(client, MODEL)
ASKED = {"temperature": 0, "max_tokens": 100}


@check
def a_stream_has_the_text_of_the_whole_answer() -> None:
    for model in (as_openai, as_vllm):
        whole = model(RIVERS, **ASKED)
        assert whole == says(RIVERS, **ASKED)
        assert "".join(model.stream(RIVERS, **ASKED)) == whole


@check
def a_class_is_a_form_for_both() -> None:
    for model in (as_openai, as_vllm):
        whole = model(LISBON, Weather, **ASKED)
        assert Weather.model_validate_json(whole)
        assert json.loads("".join(model.stream(LISBON, Weather, **ASKED))) == json.loads(whole)


@check
def a_choice_is_made() -> None:
    assert as_vllm("Is Lisbon warm?", Literal["yes", "no"], **ASKED) in ("yes", "no")


@check
def a_pattern_is_kept() -> None:
    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}", as_vllm("When is it?", Regex(r"[0-9]{4}-[0-9]{2}"), **ASKED))


@check
def a_grammar_is_kept() -> None:
    grammar = CFG('start: sum\nsum: DIGIT "+" DIGIT\nDIGIT: /[0-9]/\n')
    assert re.fullmatch(r"[0-9]\+[0-9]", as_vllm("Write a sum.", grammar, **ASKED))


@check
def errors_are_raised() -> None:
    with refused(Exception, "grammar"):
        as_vllm("Write a sum.", CFG("start: ("), **ASKED)
