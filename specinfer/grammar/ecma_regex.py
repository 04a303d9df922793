"""Regular expressions of JSON schemas, which are JavaScript's (ECMA-262), written as Rust's.

The library reads Rust's. Written anew is what the two read differently (`.`, `\\s`, `[^]`, a literal brace),
and a lookahead right behind `^`, which becomes an expression of its own that a text has to match as well. The
library has no other assertions about neighbours: they are left out, and what is left matches every text that
the whole would match.

The library follows nested repeats by writing them out as it goes, `(x{20}){30}` as 600 of x, so what is too
large shows late, in the middle of a text. Counting them tells beforehand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_SPACE = r"\t\n\x0B\x0C\r\x20\xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_LINE_ENDS = r"\n\r\u2028\u2029"
_ANY = r"[\x00-\u{10FFFF}]"
_NEVER = r"[^\x00-\u{10FFFF}]"
_NOTHING = "(?:)"
_ESCAPE = (
    r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|u\{[0-9A-Fa-f]+\}|[pP](?:\{[^}]*\}|[A-Z])|c[A-Za-z]"
    r"|k<[^>]*>|[1-9]\d*|[\s\S])"
)
# The parts of a JavaScript expression; [] and [^] are whole classes.
_PART = re.compile(
    rf"(?P<escape>{_ESCAPE})|(?P<class>\[(?:\\[\s\S]|[^\]\\])*\])|(?P<look>\((?:\?=|\?!|\?<=|\?<!))"
    r"|(?P<open>\((?:\?:|\?P?<[A-Za-z_]\w*>|\?[a-z]+(?:-[a-z]+)?[:)])?)|(?P<count>\{\d+(?:,\d*)?\})|[\s\S]"
)
_CLASS_PART = re.compile(rf"(?P<escape>{_ESCAPE})|[\s\S]")
_SET = re.compile(r"\\[sSdDwWpP]")
# The same of a Rust expression: escapes (`\d`, `\x{41}`, `\p{Greek}`), classes (`[a-z]`), counts.
_RUST_PART = re.compile(
    r"\{(?P<low>\d+)(?:,(?P<high>\d*))?\}|\\(?:[xuUpP]\{[^}]{0,64}\}|.)"
    r"|\[\^?\]?(?:\\.|[^\]\\])*\]|\[.*|.",
    re.DOTALL,
)

_LONGEST: Final = 16 * 1024  # characters: each lookahead reads the rest of the expression
_MOST_PARTS: Final = 16  # leading lookaheads that are held
MAX_REPEAT = 100_000  # of a part, counted repeats in one another multiplied


class UnreadableError(ValueError):
    """An expression that is none, or needs what no automaton has: references back to a group."""


@dataclass(frozen=True, slots=True)
class RustRegex:
    """What a text has to match: each of `parts`, somewhere in it.

    `left_out` are the assertions that are in none of them, such as `(?!` and `\\b`, as they are written.
    """

    parts: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def read_ecma(pattern: str) -> RustRegex:
    """A JavaScript expression as Rust's; raises UnreadableError, which says why there is none.

    What is malformed otherwise is passed on, for the library to complain about.
    """
    if len(pattern) > _LONGEST:
        raise UnreadableError(f"it has {len(pattern)} characters, more than {_LONGEST}")
    left_out: dict[str, None] = {}
    parts: list[str] = []
    rest = pattern
    while len(parts) < _MOST_PARTS and (inner := _leading_lookahead(rest)) is not None:
        parts.append(_as_rust(f"^(?:{inner})", left_out))
        rest = f"^{rest[len('^(?=') + len(inner) + 1 :]}"
    parts.append(_as_rust(rest, left_out))
    return RustRegex(tuple(parts), tuple(left_out))


def _parts(pattern: str) -> Iterator[tuple[re.Match[str], int]]:
    """The parts of an expression, each with how many groups it opens; one that it closes is -1."""
    for part in _PART.finditer(pattern):
        if part[0] == "\\":
            raise UnreadableError("a backslash is the last character")
        if part[0] == "[":
            raise UnreadableError("a character class is not closed")
        is_atom = part.lastgroup in ("escape", "class")
        yield part, 0 if is_atom else part[0].count("(") - part[0].count(")")


def _leading_lookahead(pattern: str) -> str | None:
    """What a lookahead right behind a leading ^ says, where nothing beside it is an alternative to it."""
    if not pattern.startswith("^(?="):
        return None
    depth = end = 0
    has_alternatives = False
    for part, opened in _parts(pattern):
        depth = max(0, depth + opened)
        has_alternatives |= not depth and part[0] == "|"
        if not depth and not end and part[0] == ")":
            end = part.end()
    if depth:
        raise UnreadableError("a group is not closed")
    is_repeated = pattern[end : end + 1] in ("*", "+", "?", "{")
    return None if has_alternatives or is_repeated else pattern[len("^(?=") : end - 1]


def _as_rust(pattern: str, left_out: dict[str, None]) -> str:
    """An expression as Rust's, without the assertions that `left_out` gains."""
    written: list[str] = []
    within = 0  # groups that are open, the outermost a look-around that is left out
    for part, opened in _parts(pattern):
        if within:
            within += opened
            continue
        match part.lastgroup:
            case "look":
                left_out[part[0]] = None
                within = 1
                written.append(_NOTHING)
            case "escape":
                rust = _escape(part[0])
                if rust is None:
                    left_out[part[0]] = None
                written.append(_NOTHING if rust is None else rust)
            case "class":
                written.append(_class(part[0]))
            case "count" if not written:
                written.append(f"\\{part[0][:-1]}\\}}")
            case "open" | "count":
                written.append(part[0])
            case _:
                written.append(
                    f"[^{_LINE_ENDS}]" if part[0] == "." else f"\\{part[0]}" if part[0] in "{}]" else part[0]
                )
    if within:
        raise UnreadableError("a group is not closed")
    return "".join(written)


def _escape(escape: str, *, in_class: bool = False) -> str | None:
    """An escape as Rust's; None for an assertion."""
    kind = escape[1]
    match kind:
        case "s" | "S":
            negated = "^" if kind == "S" else ""
            return f"[{negated}{_SPACE}]"
        case "b" if in_class:
            return r"\x08"
        case "b" | "B":
            return None
        case "0":
            return r"\x00"
        case "c" if len(escape) == 3:
            return f"\\x{ord(escape[2]) % 32:02X}"
        case _ if kind == "k" or kind.isdigit():
            raise UnreadableError(f"{escape} refers back to a group")
        case _ if kind.isalnum() and kind.isascii():
            return escape  # the same in both, or a complaint of the library's
    return f"\\u{{{ord(kind):X}}}"


def _class(text: str) -> str:
    negated = text.startswith("[^")
    inner = text[1 + negated : -1]
    written: list[str] = []
    for part in _CLASS_PART.finditer(inner):
        if part.lastgroup == "escape":
            rust = _escape(part[0], in_class=True)
            if rust is None:
                raise UnreadableError(f"{part[0]} stands in a character class")
            written.append(rust)
            continue
        beside_set = part[0] == "-" and (_is_set(written[-1:]) or _SET.match(inner, part.end()) is not None)
        # Rust knows operators in classes, && and -- and ~~, and classes in one another.
        written.append(f"\\{part[0]}" if beside_set or part[0] in "[&~^" else part[0])
    if not written:
        return _ANY if negated else _NEVER
    return f"[{'^' if negated else ''}{''.join(written)}]"


def _is_set(last: list[str]) -> bool:
    return bool(last) and (last[0][:1] == "[" or last[0][:2] in (r"\d", r"\D", r"\w", r"\W", r"\p", r"\P"))


def largest_repeat(regex: str) -> int:
    """The largest product of counted repeats (`{3}`, `{2,5}`, `{4,}`) inside one another; 1 without any.

    The expression need not be well formed.
    """
    open_groups = [1]  # the largest product so far in each group that is open, outermost first
    last = 1  # that of the part just read, to which a repeat applies
    for part in _RUST_PART.finditer(regex):
        if part["low"] is not None:
            last *= max(1, int(part["low"]), int(part["high"] or 0))
        elif part[0] == "(":
            open_groups.append(1)
            last = 1
        elif part[0] == ")":
            last = open_groups.pop() if len(open_groups) > 1 else last
        elif part[0] not in ("*", "+", "?"):
            last = 1
        open_groups[-1] = max(open_groups[-1], last)
    return max(open_groups)
