"""Decides when the heating runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, time
from enum import Enum
from typing import Protocol


class Mode(Enum):
    OFF = "off"
    ECO = "eco"
    COMFORT = "comfort"


class Sensor(Protocol):
    def read(self) -> float: ...


class Relay(Protocol):
    def switch(self, on: bool) -> None: ...


@dataclass(frozen=True)
class Period:
    """A part of the day with its own temperature in degrees Celsius."""

    start: time
    end: time
    temperature: float

    def covers(self, moment: time) -> bool:
        if self.start <= self.end:
            return self.start <= moment < self.end
        return moment >= self.start or moment < self.end


@dataclass
class Thermostat:
    sensor: Sensor
    relay: Relay
    periods: list[Period] = field(default_factory=list)
    mode: Mode = Mode.COMFORT
    eco_temperature: float = 16.0
    default_temperature: float = 20.0
    heating: bool = False

    def target(self, now: datetime) -> float | None:
        """The temperature wanted at a moment, None when the heating is off."""
        if self.mode is Mode.OFF:
            return None
        if self.mode is Mode.ECO:
            return self.eco_temperature
        for period in self.periods:
            if period.covers(now.time()):
                return period.temperature
        return self.default_temperature

    def update(self, now: datetime) -> bool:
        """Read the sensor and switch the relay; returns whether the heating runs."""
        wanted = self.target(now)
        if wanted is None:
            self._switch(False)
            return False
        measured = self.sensor.read()
        self._switch(measured < wanted)
        return self.heating

    def boost(self, period: Period) -> None:
        """Put a period before all others."""
        self.periods.insert(0, period)

    def _switch(self, on: bool) -> None:
        if on != self.heating:
            self.heating = on
            self.relay.switch(on)
