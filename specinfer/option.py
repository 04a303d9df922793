"""Options: fields of frozen config classes, which say themselves what they are for and what they may be.

Validation, the flags of commands, the keys of YAML files and the tables of docs/options.md are made of them.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from specinfer.errors import ConfigError

_KEY: Final = "option"
_MOST_SECONDS: Final = 1e6


@dataclass(frozen=True, slots=True)
class About:
    """What a field says of itself beside its name, its type and its default."""

    purpose: str  # a sentence, or a part of one, as --help shows it
    more: str = ""  # what the options page says besides, in Markdown
    name: str = ""  # as users write it, where that is not the field's name
    flag: str = ""  # the same of the command line
    shown: str = ""  # the default in words, where it is None or long
    allowed: str = ""  # what an error says is allowed, where the type does not say it
    least: float | None = None  # of a number
    zero: bool = True  # whether a number of seconds may be 0
    size: bool = False  # a number of bytes, which the command line writes like 2GB
    switch: bool = False  # a flag switches it on and off, whatever else it may be
    old: tuple[str, ...] = ()  # names that it had, which are still understood
    of_batches: bool = True  # of the server: whether it concerns files of requests, too


_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class Option:
    """One option."""

    name: str  # as LLM(...), YAML files and errors have it
    attribute: str  # the field's own name
    kind: Any  # its type, without None; object where there are several
    words: tuple[str, ...]  # that stand for a number of this kind
    optional: bool  # whether it may be None
    default: Any
    about: About

    @property
    def flag(self) -> str:
        """Its flag on the command line."""
        return "--" + (self.about.flag or self.name.replace("_", "-"))

    @property
    def choices(self) -> tuple[str, ...]:
        """The values it may have, where they are few."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def is_list(self) -> bool:
        """Whether it has several values."""
        return get_origin(self.kind) is tuple

    def shown_default(self) -> str:
        """The default as one would write it, or nothing."""
        if self.about.shown or self.default in (None, (), ""):
            return self.about.shown
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if self.about.size:
            return f"{self.default >> 20}MB"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def check(self, value: object) -> None:
        """Raise ConfigError where its type or its bounds do not allow a value."""
        if value is None and self.optional:
            return
        if (fault := self._fault(value)) is not None:
            raise ConfigError(f"{self.name} {fault}")

    def _fault(self, value: object) -> str | None:
        about, kind = self.about, self.kind
        if self.choices:
            wrong, allowed = value not in self.choices, ", ".join(self.choices)
        elif kind is bool:
            wrong, allowed = not isinstance(value, bool), "True or False"
        elif kind is int:
            least = 0 if about.least is None else int(about.least)
            wrong, allowed = not _is_number(value, int) or value < least, f"an integer >= {least}"  # type: ignore[operator]
            if self.words:
                wrong, allowed = wrong and value not in self.words, ", or ".join((allowed, *self.words))
        elif kind is float:
            fits = _is_number(value, int, float) and 0 <= value < _MOST_SECONDS  # type: ignore[operator]
            wrong = not fits or (value == 0 and not about.zero)
            allowed = "seconds from 0 on" if about.zero else "seconds above 0"
        elif kind is str:
            wrong, allowed = not isinstance(value, str), "a text"
        elif self.is_list:
            # What they are is not told: a key may be among them.
            texts = isinstance(value, tuple) and all(isinstance(one, str) and one for one in value)
            return None if texts else "has what is no text; allowed: a list of texts, numbers in quotes"
        else:
            return None
        return f"is {value!r}; allowed: {about.allowed or allowed}" if wrong else None


def parse_size(name: str, text: str) -> int:
    """Bytes from '512MB', '2GiB', '1.5G' (powers of 1024) or a plain number; raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{name} is {text!r}; allowed: a number of bytes, or like 512MB or 2GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_address(name: str, text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[IPv6]:PORT`; raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"{name} is {text!r}; allowed: HOST:PORT, like 10.0.0.1:29500, or [IPv6]:PORT")
    return host, int(port)


def name_of_address(address: tuple[str, int | str]) -> str:
    """The text that `parse_address` reads as this host and port."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def option(default: Any, purpose: str, **more: Any) -> Any:
    """A field of a config class that is an option; `more` is what else About holds."""
    return field(default=default, metadata={_KEY: About(purpose, **more)})


@cache
def options_of(kind: type) -> tuple[Option, ...]:
    """The options among the fields of a config class, in their order."""
    hints = get_type_hints(kind)
    found = []
    for one in fields(kind):
        if _KEY not in one.metadata:
            continue
        about, hint = one.metadata[_KEY], hints[one.name]
        several = get_origin(hint) in (Union, UnionType)
        kinds = [part for part in get_args(hint) if part is not NoneType] if several else [hint]
        words = tuple(word for part in kinds if get_origin(part) is Literal for word in get_args(part))
        if len(kinds) == 2 and int in kinds and words:
            kinds = [int]
        else:
            words = ()
        found.append(
            Option(
                name=about.name or one.name,
                attribute=one.name,
                kind=kinds[0] if len(kinds) == 1 else object,
                words=words,
                optional=several and NoneType in get_args(hint),
                default=None if one.default is MISSING else one.default,
                about=about,
            )
        )
    return tuple(found)


def check_options(config: object) -> None:
    """Raise ConfigError unless each option of a config has a value that its type and bounds allow."""
    for one in options_of(type(config)):  # type: ignore[arg-type]  # a class can be hashed
        one.check(getattr(config, one.attribute))


def _is_number(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
