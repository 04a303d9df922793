"""Options: fields of frozen config classes with their description and their allowed values.

Validation, command line flags, keys of YAML files and the tables of docs/reference.md are derived from them.
"""

import re
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

from specinfer.errors import ConfigError

_KEY: Final = "option"
_MAX_SECONDS: Final = 1e6


@dataclass(frozen=True, slots=True)
class About:
    """Metadata of an option, beside its field's name, type and default."""

    purpose: str  # one sentence, shown by --help
    more: str = ""  # further sentences for the options page, in Markdown
    name: str = ""  # public name, if it is not the field's
    flag: str = ""  # command line flag, if it is not the name's
    shown: str = ""  # description of a default that is None or long
    allowed: str = ""  # allowed values for errors, if the type does not give them
    minimum: float | None = None  # of a number
    zero: bool = True  # True if a number of seconds may be 0
    size: bool = False  # True for a number of bytes, given on the command line like 2GB
    switch: bool = False  # True if a pair of flags switches it on and off, whatever its type
    rare: bool = False  # True if it has no flag, and is set in a YAML file or in Python
    of_batches: bool = True  # for the server's options: True if batch files use it, too


_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a config class."""

    name: str  # in LLM(...), YAML files and errors
    attribute: str  # the field's name
    kind: Any  # its type without None; `object` for a union
    words: tuple[str, ...]  # words allowed in place of a number
    optional: bool  # True if it may be None
    default: Any
    about: About

    @property
    def flag(self) -> str:
        """Command line flag."""
        return "--" + (self.about.flag or self.name.replace("_", "-"))

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed words of a Literal type, else empty."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def is_list(self) -> bool:
        """True if it has several values."""
        return get_origin(self.kind) is tuple

    def shown_default(self) -> str:
        """Return the default as text, empty if there is none to show."""
        if self.about.shown or self.default in (None, (), ""):
            return self.about.shown
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if self.about.size:
            return f"{self.default >> 20}MB"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def check(self, value: object) -> None:
        """Raise ConfigError if the value has the wrong type or is out of bounds."""
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
            minimum = 0 if about.minimum is None else int(about.minimum)
            wrong, allowed = not _is_number(value, int) or value < minimum, f"an integer >= {minimum}"
            if self.words:
                wrong, allowed = wrong and value not in self.words, ", or ".join((allowed, *self.words))
        elif kind is float:
            fits = _is_number(value, int, float) and 0 <= value < _MAX_SECONDS
            wrong = not fits or (value == 0 and not about.zero)
            allowed = "seconds from 0 on" if about.zero else "seconds above 0"
        elif kind is str:
            wrong, allowed = not isinstance(value, str), "a text"
        elif self.is_list:
            # The error leaves out the values: they may include a secret key.
            texts = isinstance(value, tuple) and all(isinstance(one, str) and one for one in value)
            return (
                None if texts else "has a value that is no text; allowed: a list of texts, numbers in quotes"
            )
        else:
            return None
        return f"is {value!r}; allowed: {about.allowed or allowed}" if wrong else None


def parse_size(name: str, text: str) -> int:
    """Return the bytes of '512MB', '2GiB', '1.5G' (powers of 1024) or a plain number; raises ConfigError.

    A plain number from 1 to 1023 is an error, as 8 is meant to be 8GB.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{name} is {text!r}; allowed: a number of bytes, or like 512MB or 2GB")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if 0 < size < _UNITS["K"] and text.strip().isdigit():
        raise ConfigError(
            f"{name} is {text!r}, which means bytes; write {text.strip()}GB or {text.strip()}MB"
        )
    return size


def parse_address(name: str, text: str) -> tuple[str, int]:
    """Return the host and port of `HOST:PORT` or `[IPv6]:PORT`; raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"{name} is {text!r}; allowed: HOST:PORT, like 10.0.0.1:29500, or [IPv6]:PORT")
    return host, int(port)


def name_of_address(address: tuple[str, int | str]) -> str:
    """Return the text that `parse_address` reads as this host and port."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def option(default: Any, purpose: str, **more: Any) -> Any:
    """Return a dataclass field that is an option; `more` are further fields of About."""
    return field(default=default, metadata={_KEY: About(purpose, **more)})


@cache
def options_of(kind: type) -> tuple[Option, ...]:
    """Return the options of a config class, in the order of its fields."""
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
    """Raise ConfigError if an option of a config has the wrong type or is out of bounds."""
    for one in options_of(type(config)):  # type: ignore[arg-type]  # a class can be hashed
        one.check(getattr(config, one.attribute))


def _is_number(value: object, *kinds: type) -> TypeGuard[float]:
    return isinstance(value, kinds) and not isinstance(value, bool)
