"""Typed access to a foreign config (config.json, GGUF metadata); raises ModelError for invalid values."""

from collections.abc import Mapping, Sequence
from typing import Final

from specinfer.errors import ModelError, shown

Fields = Mapping[str, object]
_MAX_INTEGER: Final = 1 << 62  # maximum integer in a config
_MAX_NUMBER: Final = 1e300  # maximum number in a config
_MAX_TOKENS: Final = 1 << 31
MAX_LAYERS: Final = 1 << 14


def mapping(c: Fields, key: str) -> Fields:
    """A JSON object."""
    value = c.get(key)
    if not isinstance(value, dict):
        raise ModelError(f"{key} is {value!r}; expected a JSON object. The config is damaged.")
    return value


def boolean(c: Fields, key: str, default: bool) -> bool:
    """A boolean; `default` if the key is missing or null."""
    value = _given(c, key, default)
    if not isinstance(value, bool):
        raise ModelError(f"{key} is {_shown(value)}; expected true or false. The config is damaged.")
    return value


def integer(c: Fields, key: str, default: int | None = None, limit: int = _MAX_INTEGER) -> int:
    """An integer of at most `limit`; `default` if the key is missing or null."""
    value = _given(c, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _MAX_INTEGER:
        raise ModelError(
            f"{key} is {_shown(value)}; expected an integer. The config is damaged or incomplete."
        )
    if value > limit:
        raise ModelError(f"{key} is {value}; expected at most {limit}. The config is damaged.")
    return value


def number(c: Fields, key: str, default: float | None = None) -> float:
    """A number; `default` if the key is missing or null."""
    value = _given(c, key, default)
    # NaN fails every comparison.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _MAX_NUMBER:
        raise ModelError(f"{key} is {_shown(value)}; expected a number. The config is damaged or incomplete.")
    return float(value)


def count(c: Fields, key: str, default: int | None = None) -> int:
    """An integer of at least 1; `default` if the key is missing or null."""
    value = integer(c, key, default)
    if value < 1:
        raise ModelError(f"{key} is {value}; expected at least 1. The config is damaged.")
    return value


def check_size(name: str, value: int) -> None:
    """Raise ModelError for a size below 1."""
    if value <= 0:
        raise ModelError(f"{name} is {value}; expected at least 1. The config is damaged.")


def positive(c: Fields, key: str, default: float | None = None) -> float:
    """A number above 0; `default` if the key is missing or null."""
    value = number(c, key, default)
    if not value > 0:
        raise ModelError(f"{key} is {value}; expected more than 0. The config is damaged.")
    return value


def optional_number(c: Fields, key: str) -> float | None:
    """A number, or None if the key is missing or null."""
    return None if c.get(key) is None else number(c, key)


def optional_positive(c: Fields, key: str) -> float | None:
    """A number above 0, or None if the key is missing or null."""
    return None if c.get(key) is None else positive(c, key)


def all_ids(sources: Sequence[Fields], key: str) -> tuple[int, ...]:
    """Distinct token ids under `key`, an integer or a list of them, in order."""
    found: list[int] = []
    for source in sources:
        value = source.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and 0 <= token < _MAX_TOKENS for token in values):
            raise ModelError(
                f"{key} is {_shown(value)}; expected a token id, or a list. The config is damaged."
            )
        found.extend(token for token in values if isinstance(token, int))
    return tuple(dict.fromkeys(found))


def _given(c: Fields, key: str, default: object) -> object:
    value = c.get(key)
    return default if value is None else value


def _shown(value: object) -> str:
    """A value for a one-line message, truncated."""
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        return f"an integer of {value.bit_length()} bits"
    return shown(value, 80)
