"""A form and a tool for scripts whose clients bring pydantic."""

from __future__ import annotations

from pydantic import BaseModel
from zoo import City, Unit


class Weather(BaseModel):
    """The weather of a city."""

    city: City
    warm: bool


def weather(city: City, unit: Unit) -> str:
    """Returns the weather of a city."""
    return f"21 degrees {unit} in {city}"
