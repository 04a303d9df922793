"""Numbers, texts and named values in JSON schemas, rewritten exactly in supported keywords."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from specinfer.grammar.ecma_regex import UnreadableError, read_ecma

if TYPE_CHECKING:
    from specinfer.grammar.schemas.rewriter import SchemaRewriter

NUMBER_KEYWORDS: Final = frozenset(
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
)
TEXT_KEYWORDS: Final = frozenset(("minLength", "maxLength", "pattern", "format"))
VALUE_KEYWORDS: Final = frozenset(("const", "enum"))
FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
# bound in place of an excluded 0 in strict schemas; smaller numbers are excluded as well
_MIN_POSITIVE: Final = 1e-12
_MAX_NUMBER: Final = 2.0**63 - 1024  # the library counts in 64 bits, and reads bounds as floats
_MAX_MULTIPLE: Final = 10_000  # the library follows remainders one by one: 1,000,003 of them take 23 s
_POWERS: Final = (100_000, 1_000_000)  # they have few remainders to follow
_SHORT_FORMATS: Final = {
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": "^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
    "byte": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
}
_LEAP: Final = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
# The library accepts February 29 in every year.
_DAYS: Final = f"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-(?:[01][0-9]|2[0-8]))|{_LEAP}-02-29)"
_HINTS: Final = frozenset(  # formats that do not restrict the text
    ("password", "binary", "text", "string", "textarea", "multiline", "html", "markdown", "unknown")
)


def rewrite_numbers(node: Mapping[str, Any], out: dict[str, Any], at: str, rewriter: SchemaRewriter) -> None:
    """Write the constraints on numbers into `out`, with float bounds, and drop the rest."""
    for key in NUMBER_KEYWORDS & node.keys():
        value = node[key]
        if key == "multipleOf":
            steps = _steps(value)
            if len(steps) > 1:
                rewriter.also(out, {"anyOf": [{"multipleOf": step} for step in steps]})
            elif steps:
                out[key] = steps[0]
            else:
                rewriter.leave_out(key, at)
            continue
        upper = key in ("maximum", "exclusiveMaximum")
        if value == (math.inf if upper else -math.inf):  # 1.8e308, as parsed
            continue
        limit = max(-_MAX_NUMBER, min(_MAX_NUMBER, float(_clipped(value))))
        if limit != value:
            inward = limit < value if upper else limit > value
            if not rewriter.strict or (not inward and abs(value) > _MAX_NUMBER):
                rewriter.leave_out(key, at)
                continue
            if not inward:
                limit = math.nextafter(limit, -math.inf if upper else math.inf)
        out[key] = int(limit) if limit.is_integer() else limit
    if rewriter.strict:
        _without_whole_bounds(out)


def _without_whole_bounds(out: dict[str, Any]) -> None:
    """Replace an excluded integer bound by the next float, where all allowed numbers share its digits.

    For `exclusiveMinimum: 1, maximum: 1.5` the library accepts the text 1, though not 1.0.
    """
    for excluded, bound, others, away in (
        ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        value = out.get(excluded)
        if not isinstance(value, int) or away * value < 0 or bound in out:
            continue
        if any(0 < away * (out[key] - value) < 1 for key in others if key in out):
            del out[excluded]
            out[bound] = math.nextafter(value, away * math.inf) if value else away * _MIN_POSITIVE


def _clipped(value: float) -> float:
    """A number within the range of floats."""
    return max(-(1 << 70), min(1 << 70, value)) if isinstance(value, int) else value


def _steps(step: float) -> list[float]:
    """Steps whose multiples, as the library writes them, are those of `step`; none if impossible.

    The library reads a step as an integer and a power of ten: for .25 it accepts the multiple .50 and not .5.
    """
    if not math.isfinite(step):
        return []
    exact, scaled, digits = Fraction(str(step)), abs(float(step)), 0
    while scaled != int(scaled) and digits < 20:
        scaled, digits = scaled * 10, digits + 1
    numerator = int(scaled)
    while digits and numerator % 10 == 0:
        numerator, digits = numerator // 10, digits - 1
    if Fraction(numerator, 10**digits) != exact:
        return []
    if numerator > _MAX_MULTIPLE and (digits or numerator not in _POWERS):
        return []
    found = [step]
    for fewer in range(1, digits):
        rest = numerator // math.gcd(numerator, 10 ** (digits - fewer))
        if rest != numerator:
            found.append(float(Fraction(rest, 10**fewer)))
    return found


def rewrite_texts(node: Mapping[str, Any], out: dict[str, Any], at: str, rewriter: SchemaRewriter) -> None:
    """Write the constraints on texts into `out`, and drop the rest."""
    out |= {key: node[key] for key in ("minLength", "maxLength") if key in node}
    if "pattern" in node:
        _rewrite_pattern(node["pattern"], "pattern", out, at, rewriter)
    kind = node.get("format")
    if kind in FORMATS:
        out["format"] = kind
        if kind in ("date", "date-time"):
            _rewrite_pattern(_DAYS, "format", out, at, rewriter)
    elif kind in _SHORT_FORMATS:
        _rewrite_pattern(_SHORT_FORMATS[kind], "format", out, at, rewriter)
    elif kind is not None and kind not in _HINTS:
        rewriter.leave_out("format", at)


def _rewrite_pattern(
    pattern: str, keyword: str, out: dict[str, Any], at: str, rewriter: SchemaRewriter
) -> None:
    try:
        read = read_ecma(pattern)
    except UnreadableError:
        rewriter.leave_out(keyword, at)
        return
    if read.left_out:
        rewriter.leave_out(keyword, at)
    for part in read.parts:
        if rewriter.refuses({"type": "string", "pattern": part}):
            rewriter.leave_out(keyword, at)
        elif "pattern" in out:
            rewriter.also(out, {"pattern": part})
        else:
            out["pattern"] = part


def rewrite_values(node: Mapping[str, Any], out: dict[str, Any], at: str, rewriter: SchemaRewriter) -> None:
    """Write the values of const and enum into `out`, if the library reads all of them exactly."""
    for key in VALUE_KEYWORDS & node.keys():
        values = [node[key]] if key == "const" else node[key]
        if all(map(_is_readable, values)):
            out[key] = node[key]
        else:
            rewriter.leave_out(key, at)


def _is_readable(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        inner: Iterable[object] = ()
        if isinstance(value, Mapping):
            inner = value.values()
        elif isinstance(value, list):
            inner = value
        return all(map(_is_readable, inner))
    if not math.isfinite(value) or (isinstance(value, int) and abs(value) >= _MAX_NUMBER):
        return False
    return float(value) == value
