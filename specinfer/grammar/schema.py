"""Prepares JSON schemas for the grammar library where it reads them otherwise than JSON Schema does.

The library enforces what it supports, and refuses the rest or ignores it with a warning. A few values it
takes and misreads: integers beyond the floats, patterns of JavaScript, days of February, counts of names
that may repeat. These are written so that it reads them exactly, or count as unsupported.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeGuard

from specinfer.errors import RequestError, shown
from specinfer.grammar.library_vocabulary import fault_and_warnings

Schema = Mapping[str, Any] | bool

_BY_NAME: Final = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_VALUES: Final = frozenset(("const", "enum", "default", "examples", "required", "dependentRequired"))
_MAX_NUMBER: Final = 2.0**63 - 1024  # the library counts in 64 bits
_MIN_POSITIVE: Final = 1e-12  # in place of an excluded 0
_MAX_STEPS: Final = 10_000  # the library follows the remainders of multipleOf one by one, for seconds
_POWERS: Final = (100_000, 1_000_000)  # few remainders
_COUNTS: Final = ("minProperties", "maxProperties")
# The order in which keywords are left out until the library takes the rest.
_DROP_ORDER: Final = ("pattern", "multipleOf", "$ref", "patternProperties")
# Formats that restrict no text, and those that a pattern describes.
_HINTS: Final = frozenset(
    ("password", "binary", "text", "string", "textarea", "multiline", "html", "markdown", "unknown")
)
_LEAP: Final = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAYS: Final = f"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-(?:[01][0-9]|2[0-8]))|{_LEAP}-02-29)"
_BESIDE: Final = {"date": _DAYS, "date-time": _DAYS}
_INSTEAD: Final = {
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": "^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
    "byte": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
}
_SPACE: Final = r"\t\n\x0B\x0C\r\x20\xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_RUST: Final = {  # parts of JavaScript's expressions that Rust reads otherwise
    ".": r"[^\n\r\u2028\u2029]",
    r"\s": f"[{_SPACE}]",
    r"\S": f"[^{_SPACE}]",
    "[^]": r"[\x00-\u{10FFFF}]",
    "[]": r"[^\x00-\u{10FFFF}]",
}
_PART: Final = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|\.", re.DOTALL)
_CLASS_PART: Final = re.compile(r"\\.|[\[&~]|(?<=-)-", re.DOTALL)


def prepared_schema(schema: Mapping[str, Any], strict: bool) -> tuple[Mapping[str, Any], list[str]]:
    """The schema for the library, and the keywords that are left out of it.

    Unless `strict`, all patterns are left out if the library refuses one, and so are steps, references to
    other documents, and patterns of names. Raises RequestError for a strict schema that the library would
    misread.
    """
    drops: tuple[str, ...] = ()
    order = list(_DROP_ORDER)
    while True:
        preparation = _Preparation(strict, drops)
        written = preparation.node(schema)
        if strict:
            return written, []
        lark = f"start: %json {json.dumps({**written, 'x-guidance': {'lenient': True}})}"
        fault, warnings = fault_and_warnings(lark)
        # It does not ignore counts beside optional properties, but withholds objects.
        counts = any(warning.startswith("min/maxProperties") for warning in warnings)
        if counts and not set(_COUNTS) <= set(drops):
            drops += _COUNTS
        elif fault and order:
            drops += (order.pop(0),)
        else:
            return written, list(preparation.left_out)


class _Preparation:
    """One pass over a schema, which leaves out the keywords in `drops`."""

    def __init__(self, strict: bool, drops: Sequence[str]) -> None:
        self._strict = strict
        self._drops = drops
        self.left_out: dict[str, None] = {}

    def node(self, schema: Any) -> Any:
        """The prepared schema; a value that is not one is returned unchanged."""
        if isinstance(schema, list):
            return [self.node(one) for one in schema]
        if not isinstance(schema, Mapping):
            return schema
        out: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _BY_NAME and isinstance(value, Mapping):
                in_rust = rust_pattern if key == "patternProperties" else str
                out[key] = {in_rust(name): self.node(one) for name, one in value.items()}
            elif key not in _VALUES:
                out[key] = self.node(value)
            else:
                out[key] = value
        self._texts(out)
        self._numbers(out)
        closed = out.get("additionalProperties") is False and not out.get("patternProperties")
        least, required = out.get("minProperties"), out.get("required", [])
        if not closed and isinstance(least, int) and isinstance(required, list) and least > len(required) + 1:
            self._drop(
                "minProperties", out, "would count a repeated name twice; allowed: one beyond required"
            )
        if out.get("uniqueItems") is False:
            del out["uniqueItems"]
        for key in self._drops:
            if key in out and not (key == "$ref" and str(out[key]).startswith("#")):
                self._drop(key, out)
                if key == "patternProperties":
                    out.pop("additionalProperties", None)
        return out

    def _texts(self, out: dict[str, Any]) -> None:
        if isinstance(out.get("pattern"), str):
            out["pattern"] = rust_pattern(out["pattern"])
        kind = out.get("format")
        if not isinstance(kind, str):
            return
        pattern = _BESIDE.get(kind) or _INSTEAD.get(kind)
        if kind in _HINTS or kind in _INSTEAD:
            del out["format"]
        parts = out.get("allOf", [])
        if pattern is not None and isinstance(parts, list):
            out["allOf"] = [*parts, {"pattern": pattern}]

    def _numbers(self, out: dict[str, Any]) -> None:
        for key in ("const", "enum"):
            if key in out and not all(map(_is_exact, _numbers_in(out[key]))):
                self._drop(
                    key, out, "has a number that the library cannot read; allowed: integers up to 2^53"
                )
        for side in ("inimum", "aximum"):
            if out.get(f"exclusiveM{side}") is True and f"m{side}" in out:  # draft 4
                out[f"exclusiveM{side}"] = out.pop(f"m{side}")
            for key in (f"m{side}", f"exclusiveM{side}"):
                if _is_number(out.get(key)):
                    self._bound(key, out, 1 if side == "inimum" else -1)
        step: Any = out.get("multipleOf")
        if _is_number(step):
            digits = f"{min(abs(step), 1e18):.10f}".rstrip("0").rstrip(".").replace(".", "")
            if int(digits) > _MAX_STEPS and step not in _POWERS:
                self._drop("multipleOf", out, f"is {shown(step)}; allowed: at most {_MAX_STEPS}")

    def _bound(self, key: str, out: dict[str, Any], inward: int) -> None:
        """Write a bound as a float, at most 2^63; `inward` is 1 for a minimum and -1 for a maximum.

        The library takes 1 for `exclusiveMinimum: 1, maximum: 1.5`, so whole bounds that are excluded become
        the next float.
        """
        given = out[key]
        if inward * given == -math.inf:  # 1.8e308 in JSON
            del out[key]
            return
        limit = float(inward * max(-_MAX_NUMBER, min(_MAX_NUMBER, inward * given)))
        if inward * given > _MAX_NUMBER or (limit != given and not self._strict):
            self._drop(key, out, f"is {shown(given)}; allowed: up to 2^63")
            return
        excluded = key.startswith("exclusive") and limit.is_integer()
        if excluded or inward * limit < inward * given:
            out[key] = math.nextafter(limit, inward * math.inf) if limit else inward * _MIN_POSITIVE
        elif limit != given:
            out[key] = int(limit)  # the library reads long decimals inexactly

    def _drop(self, key: str, out: dict[str, Any], why: str = "") -> None:
        if self._strict:
            raise RequestError(f"{key} {why}; leave out strict, or change that part of the schema")
        self.left_out[key] = None
        del out[key]


def rust_pattern(pattern: str) -> str:
    """A JavaScript expression as Rust reads it; parts that Rust lacks are left for the library to refuse."""
    return _PART.sub(lambda part: _RUST.get(part[0]) or _class(part[0]), pattern)


def _class(part: str) -> str:
    """A class as Rust reads it, without its operators `&&`, `--` and `~~` and its inner classes."""
    if part[0] != "[":
        return part
    start = 1 + part.startswith("[^")
    return f"{part[:start]}{_CLASS_PART.sub(_in_class, part[start:-1])}]"


def _in_class(found: re.Match[str]) -> str:
    part = found[0]
    return _SPACE if part == r"\s" else _RUST.get(part, part) if part[0] == "\\" else f"\\{part}"


def _numbers_in(value: object) -> Iterable[float]:
    if isinstance(value, Mapping | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers_in(one)
    elif _is_number(value):
        yield value


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_exact(value: float) -> bool:
    return abs(value) < _MAX_NUMBER and float(value) == value
