"""Instructor: answers as classes, by tool calls and by JSON schemas, complete and streamed."""

from __future__ import annotations

from collections.abc import Iterable

import instructor
import openai
from pydantic import BaseModel, Field
from zoo import JSON, LISBON, MODEL, URL, check
from zoo_forms import Weather

MODES = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)
ASKED = {"model": MODEL, "temperature": 0, "max_tokens": 200, "max_retries": 1}


class Strict(Weather, extra="forbid"):
    """The weather of a city, without further fields."""


class Week(BaseModel):
    """The weather of a few days."""

    days: list[Weather] = Field(min_length=2, max_length=3)


def client(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=URL, api_key="unused"), mode=mode)


def question(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}]}


@check
def a_class_comes_back_in_each_mode() -> None:
    for mode in MODES:
        made = client(mode).chat.completions.create(response_model=Weather, **question(JSON), **ASKED)
        assert isinstance(made, Weather), mode


@check
def parts_of_a_class_grow_in_a_stream() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        asking = client(mode)
        *_, last = asking.create_partial(response_model=Week, **question(LISBON), **ASKED)
        whole = asking.chat.completions.create(response_model=Week, **question(LISBON), **ASKED)
        assert 2 <= len(last.days) <= 3
        assert last.model_dump() == whole.model_dump()


@check
def lists_of_classes_are_read() -> None:
    asking = client(instructor.Mode.JSON_SCHEMA).chat.completions
    made = asking.create(response_model=Iterable[Strict], **question(LISBON), **ASKED)
    assert all(isinstance(day, Weather) for day in made)
