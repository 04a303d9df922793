"""A client for the weather service used by the dashboard."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any


class WeatherError(Exception):
    """The service answered with an error, or not at all."""


class WeatherClient:
    """Talks to the weather service over HTTP.

    One client can be shared by all pages; it keeps no state between calls.
    """

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url = base_url.rstrip("/")
        self.api_key = api_key

    def current(self, city: str, units: str = "metric") -> dict[str, Any]:
        """The weather in a city right now."""
        return self._get("/current", city=city, units=units)

    def forecast(self, city: str, days: int = 5, units: str = "metric") -> list[dict[str, Any]]:
        """One entry per day, today first."""
        if not 1 <= days <= 14:
            raise ValueError(f"days is {days}, expected 1 to 14")
        answer = self._get("/forecast", city=city, days=str(days), units=units)
        return list(answer["days"])

    def alerts(self, region: str) -> list[str]:
        """Titles of the warnings in force in a region."""
        answer = self._get("/alerts", region=region)
        return [alert["title"] for alert in answer.get("alerts", [])]

    def _get(self, path: str, **query: str) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.base_url}{path}?{urllib.parse.urlencode(query)}",
            headers={"Accept": "application/json", "X-Api-Key": self.api_key},
        )
        try:
            with urllib.request.urlopen(request) as response:
                body = response.read()
        except urllib.error.HTTPError as error:
            raise WeatherError(f"{path} answered {error.code}") from error
        except urllib.error.URLError as error:
            raise WeatherError(f"cannot reach {self.base_url}: {error.reason}") from error
        try:
            return dict(json.loads(body))
        except ValueError as error:
            raise WeatherError(f"{path} did not answer with JSON") from error


def describe(weather: dict[str, Any]) -> str:
    """One line for the header of the dashboard."""
    temperature = round(weather["temperature"])
    wind = weather.get("wind", {}).get("speed", 0)
    line = f"{weather['city']}: {temperature} degrees, {weather['summary'].lower()}"
    return f"{line}, windy" if wind > 40 else line
