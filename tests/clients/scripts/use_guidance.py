"""Guidance: programs that write text and let the model fill in gaps, through a server like vLLM's."""

from __future__ import annotations

import re

from guidance import assistant, gen, json, select, user
from guidance.models import OpenAI
from guidance.models.experimental import VLLMModel
from pydantic import BaseModel
from zoo import LISBON, MODEL, RIVERS, URL, City, check, says

AT = {"base_url": URL, "api_key": "unused", "echo": False}
likeliest = VLLMModel(MODEL, sampling_params={"top_k": 1}, **AT)  # greedy


class Weather(BaseModel, extra="forbid"):
    """The weather of a city."""

    city: City
    warm: bool


def asked(model: object, question: str, gap: object) -> object:
    with user():
        model += question
    with assistant():
        model += gap
    return model


@check
def a_gap_is_filled() -> None:
    model = asked(likeliest, RIVERS, gen("rivers"))
    assert model["rivers"] == says(RIVERS, temperature=0)


@check
def a_choice_is_made() -> None:
    model = asked(likeliest, "Is Lisbon warm?", select(["yes", "no"], name="warm"))
    assert model["warm"] in ("yes", "no")


@check
def a_pattern_is_kept() -> None:
    model = asked(likeliest, "When is it?", gen("day", regex="[0-9]{4}-[0-9]{2}"))
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", model["day"])


@check
def a_schema_is_kept() -> None:
    model = asked(likeliest, LISBON, json("weather", schema=Weather))
    assert Weather.model_validate_json(model["weather"])


@check
def its_model_for_openai_works_too() -> None:
    model = asked(OpenAI(MODEL, **AT), LISBON, json("weather", schema=Weather))
    assert Weather.model_validate_json(model["weather"])
