"""Settings of the mail relay, read from a TOML file."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

DEFAULT_PATHS = (Path("relay.toml"), Path("~/.config/relay.toml"))


class SettingsError(Exception):
    """A file that cannot be used, and why."""


@dataclass(frozen=True)
class Settings:
    host: str = "127.0.0.1"
    port: int = 2525
    queue_dir: str = "queue"
    max_message_bytes: int = 10_000_000
    require_tls: bool = True
    log_level: str = "INFO"

    def validate(self) -> None:
        if not 1 <= self.port <= 65535:
            raise SettingsError(f"port is {self.port}, expected 1 to 65535")
        if self.max_message_bytes < 1024:
            raise SettingsError("max_message_bytes is below 1024, no message would fit")
        if self.log_level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise SettingsError(f"log_level is {self.log_level!r}")


def find_file() -> Path | None:
    """The first settings file that exists."""
    chosen = os.environ.get("RELAY_CONFIG")
    if chosen:
        return Path(chosen)
    for path in DEFAULT_PATHS:
        expanded = path.expanduser()
        if expanded.is_file():
            return expanded
    return None


def read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        raise SettingsError(f"{path} does not exist") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: {error}") from error
    known = {field.name: type(field.default) for field in fields(Settings)}
    for name, value in values.items():
        if name not in known:
            raise SettingsError(f"{path}: unknown setting {name!r}, known: {', '.join(known)}")
        if type(value) is not known[name]:
            raise SettingsError(f"{path}: {name} has to be of type {known[name].__name__}")
    return values


def load() -> Settings:
    """Settings from the file, defaults where it says nothing."""
    path = find_file()
    values = read_file(path) if path is not None else {}
    settings = Settings(**values)
    settings.validate()
    return settings
