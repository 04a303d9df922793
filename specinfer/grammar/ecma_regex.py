"""Translate JavaScript (ECMA-262) regular expressions of JSON schemas into Rust's.

The grammar library reads Rust's syntax. Parts that the two read differently are rewritten (`.`, `\\s`, `[^]`,
a literal brace). A lookahead right after `^` becomes a separate expression that a text must match as well.
The library supports no other assertions: they are dropped, and the result matches every text that the
original matches.

The library expands nested repeats as it goes, `(x{20}){30}` into 600 copies of x, so an expression that is
too large would fail in the middle of a text. Counting the repeats finds it in advance.
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
# The parts of a JavaScript expression; [] and [^] are complete classes.
_PART = re.compile(
    rf"(?P<escape>{_ESCAPE})|(?P<class>\[(?:\\[\s\S]|[^\]\\])*\])|(?P<look>\((?:\?=|\?!|\?<=|\?<!))"
    r"|(?P<open>\((?:\?:|\?P?<[A-Za-z_]\w*>|\?[a-z]+(?:-[a-z]+)?[:)])?)|(?P<count>\{\d+(?:,\d*)?\})|[\s\S]"
)
_CLASS_PART = re.compile(rf"(?P<escape>{_ESCAPE})|[\s\S]")
_SET = re.compile(r"\\[sSdDwWpP]")
# The parts of a Rust expression: escapes (`\d`, `\x{41}`, `\p{Greek}`), classes (`[a-z]`), counts.
_RUST_PART = re.compile(
    r"\{(?P<low>\d+)(?:,(?P<high>\d*))?\}|\\(?:[xuUpP]\{[^}]{0,64}\}|.)"
    r"|\[\^?\]?(?:\\.|[^\]\\])*\]|\[.*|.",
    re.DOTALL,
)

_MAX_LENGTH: Final = 16 * 1024  # characters: each lookahead scans the rest of the expression
_MAX_PARTS: Final = 16  # leading lookaheads that are enforced
MAX_REPEAT = 100_000  # per part; nested counts are multiplied


class UnreadableError(ValueError):
    """The expression is malformed, or needs backreferences, which no automaton supports."""


@dataclass(frozen=True, slots=True)
class RustRegex:
    """Expressions that a text must match: each of `parts`, somewhere in it.

    `left_out` holds the dropped assertions, such as `(?!` and `\\b`, as written.
    """

    parts: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def read_ecma(pattern: str) -> RustRegex:
    """Translate a JavaScript expression; raises UnreadableError with the reason if it cannot be translated.

    Other malformed parts are passed on, and the library reports them.
    """
    if len(pattern) > _MAX_LENGTH:
        raise UnreadableError(f"it has {len(pattern)} characters, more than {_MAX_LENGTH}")
    left_out: dict[str, None] = {}
    parts: list[str] = []
    rest = pattern
    while len(parts) < _MAX_PARTS and (inner := _leading_lookahead(rest)) is not None:
        parts.append(_as_rust(f"^(?:{inner})", left_out))
        rest = f"^{rest[len('^(?=') + len(inner) + 1 :]}"
    parts.append(_as_rust(rest, left_out))
    return RustRegex(tuple(parts), tuple(left_out))


def _parts(pattern: str) -> Iterator[tuple[re.Match[str], int]]:
    """The parts of an expression, each with the number of groups it opens; -1 if it closes one."""
    for part in _PART.finditer(pattern):
        if part[0] == "\\":
            raise UnreadableError("a backslash is the last character")
        if part[0] == "[":
            raise UnreadableError("a character class is not closed")
        is_atom = part.lastgroup in ("escape", "class")
        yield part, 0 if is_atom else part[0].count("(") - part[0].count(")")


def _leading_lookahead(pattern: str) -> str | None:
    """The content of a lookahead right after a leading ^, unless there are alternatives beside it."""
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
    """Translate an expression without assertions, which are added to `left_out`."""
    written: list[str] = []
    dropped_depth = 0  # open groups, the outermost of them a dropped look-around
    for part, opened in _parts(pattern):
        if dropped_depth:
            dropped_depth += opened
            continue
        match part.lastgroup:
            case "look":
                left_out[part[0]] = None
                dropped_depth = 1
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
    if dropped_depth:
        raise UnreadableError("a group is not closed")
    return "".join(written)


def _escape(escape: str, *, in_class: bool = False) -> str | None:
    """Translate an escape; None for an assertion."""
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
            return escape  # the same in both, or reported by the library
    return f"\\u{{{ord(kind):X}}}"


def _class(text: str) -> str:
    negated = text.startswith("[^")
    inner = text[1 + negated : -1]
    written: list[str] = []
    for part in _CLASS_PART.finditer(inner):
        if part.lastgroup == "escape":
            rust = _escape(part[0], in_class=True)
            if rust is None:
                raise UnreadableError(f"{part[0]} is not allowed in a character class")
            written.append(rust)
            continue
        beside_set = part[0] == "-" and (_is_set(written[-1:]) or _SET.match(inner, part.end()) is not None)
        # Rust has class operators, && and -- and ~~, and nested classes.
        written.append(f"\\{part[0]}" if beside_set or part[0] in "[&~^" else part[0])
    if not written:
        return _ANY if negated else _NEVER
    return f"[{'^' if negated else ''}{''.join(written)}]"


def _is_set(last: list[str]) -> bool:
    return bool(last) and (last[0][:1] == "[" or last[0][:2] in (r"\d", r"\D", r"\w", r"\W", r"\p", r"\P"))


def largest_repeat(regex: str) -> int:
    """The largest product of nested counted repeats (`{3}`, `{2,5}`, `{4,}`); 1 without any.

    The expression need not be well formed.
    """
    open_groups = [1]  # the largest product in each open group, outermost first
    last = 1  # the product of the last part, to which a repeat applies
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
