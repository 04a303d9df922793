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
from dataclasses import dataclass
from typing import Final

_SPACE = r"\t\n\x0B\x0C\r\x20\xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_LINE_ENDS = r"\n\r\u2028\u2029"
_ANY = r"[\x00-\u{10FFFF}]"
_NEVER = r"[^\x00-\u{10FFFF}]"
_COUNT = re.compile(r"\{\d+(?:,\d*)?\}")
_ESCAPE = re.compile(
    r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|u\{[0-9A-Fa-f]+\}|[pP](?:\{[^}]*\}|[A-Z])|c[A-Za-z]"
    r"|k<[^>]*>|[1-9]\d*|[\s\S])"
)
_LOOK = re.compile(r"\((\?=|\?!|\?<=|\?<!)")
_OPENING = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>|\?[a-z]+(?:-[a-z]+)?[:)])?")
_NOTHING = "(?:)"

_LONGEST: Final = 16 * 1024  # characters: each lookahead reads the rest of the expression
_MOST_PARTS: Final = 16  # leading lookaheads that are held
MAX_REPEAT = 100_000  # of a part, counted repeats in one another multiplied
_COUNTED = re.compile(r"\{(\d+)(?:,(\d*))?\}")


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
    parts: list[str] = []
    left_out: list[str] = []
    rest = pattern
    while len(parts) < _MOST_PARTS and (inner := _leading_lookahead(rest)) is not None:
        reader = _PatternReader(f"^(?:{inner})")
        parts.append(reader.read())
        left_out += reader.left_out
        rest = f"^{rest[1 + len('(?=') + len(inner) + 1 :]}"
    reader = _PatternReader(rest)
    parts.append(reader.read())
    return RustRegex(tuple(parts), tuple(dict.fromkeys([*left_out, *reader.left_out])))


def _leading_lookahead(pattern: str) -> str | None:
    """What a lookahead right behind a leading ^ says, where nothing beside it is an alternative to it."""
    if not pattern.startswith("^(?=") or "|" in _outermost(pattern):
        return None
    end = _end_of_group(pattern, 1)
    behind = pattern[end : end + 1]
    return None if behind and behind in "*+?{" else pattern[len("^(?=") : end - 1]


def _outermost(pattern: str) -> str:
    """The characters of an expression that are in no group, class or escape."""
    found, at = [], 0
    while at < len(pattern):
        if pattern[at] == "(":
            at = _end_of_group(pattern, at)
        elif pattern[at] == "[":
            at = _end_of_class(pattern, at)
        elif pattern[at] == "\\":
            at += 2
        else:
            found.append(pattern[at])
            at += 1
    return "".join(found)


def _end_of_group(pattern: str, at: int) -> int:
    """Where the group is over that opens at `at`."""
    depth = 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            at = _end_of_class(pattern, at) - 1
        elif pattern[at] == "(":
            depth += 1
        elif pattern[at] == ")":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    raise UnreadableError("a group is not closed")


def _end_of_class(pattern: str, at: int) -> int:
    """Where the class is over that opens at `at`; [] and [^] are whole."""
    at += 1
    while at < len(pattern):
        if pattern[at] == "]":
            return at + 1
        at += 2 if pattern[at] == "\\" else 1
    raise UnreadableError("a character class is not closed")


class _PatternReader:
    """Reads an expression from left to right; `at` is the next character."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.at = pattern, 0
        self.left_out: list[str] = []

    def read(self) -> str:
        """All of it, as Rust's."""
        written: list[str] = []
        while self.at < len(self.pattern):
            written.append(self._next(written))
        return "".join(written)

    def _next(self, before: list[str]) -> str:
        pattern, at = self.pattern, self.at
        match pattern[at]:
            case "\\":
                return self._escape(in_class=False)
            case "[":
                return self._class()
            case "(":
                look = _LOOK.match(pattern, at)
                if look is not None:
                    self.left_out.append(look[0])
                    self.at = _end_of_group(pattern, at)
                    return _NOTHING
                opening = _OPENING.match(pattern, at)
                assert opening is not None
                self.at = opening.end()
                return opening[0]
            case ".":
                self.at += 1
                return f"[^{_LINE_ENDS}]"
            case "{":
                count = _COUNT.match(pattern, at)
                if count is not None and before:
                    self.at = count.end()
                    return count[0]
                self.at += 1
                return r"\{"
            case "}" | "]" as bracket:
                self.at += 1
                return f"\\{bracket}"
            case character:
                self.at += 1
                return character

    def _escape(self, *, in_class: bool) -> str:
        escape = _ESCAPE.match(self.pattern, self.at)
        if escape is None:
            raise UnreadableError("a backslash is the last character")
        self.at = escape.end()
        kind = escape[0][1]
        match kind:
            case "s" | "S":
                negated = "^" if kind == "S" else ""
                return f"[{negated}{_SPACE}]"
            case "b" if in_class:
                return r"\x08"
            case "b" | "B":
                self.left_out.append(escape[0])
                return _NOTHING
            case "0":
                return r"\x00"
            case "c" if len(escape[0]) == 3:
                return f"\\x{ord(escape[0][2]) % 32:02X}"
            case "k":
                raise UnreadableError(f"{escape[0]} refers back to a group")
            case _ if kind.isdigit():
                raise UnreadableError(f"{escape[0]} refers back to a group")
            case _ if kind.isalnum() and kind.isascii():
                return escape[0]  # the same in both, or a complaint of the library's
        return f"\\u{{{ord(kind):X}}}"

    def _class(self) -> str:
        end = _end_of_class(self.pattern, self.at)
        self.at += 1
        negated = self.pattern.startswith("^", self.at)
        self.at += negated
        written: list[str] = []
        while self.at < end - 1:
            character = self.pattern[self.at]
            if character == "\\":
                written.append(self._escape(in_class=True))
                continue
            self.at += 1
            beside_set = character == "-" and (_is_set(written[-1:]) or self._set_follows())
            # Rust knows operators in classes, && and -- and ~~, and classes in one another.
            written.append(f"\\{character}" if beside_set or character in "[&~^" else character)
        self.at = end
        if not written:
            return _ANY if negated else _NEVER
        return f"[{'^' if negated else ''}{''.join(written)}]"

    def _set_follows(self) -> bool:
        return re.compile(r"\\[sSdDwWpP]").match(self.pattern, self.at) is not None


def _is_set(last: list[str]) -> bool:
    return bool(last) and (last[0][:1] == "[" or last[0][:2] in (r"\d", r"\D", r"\w", r"\W", r"\p", r"\P"))


def largest_repeat(regex: str) -> int:
    """The largest product of counted repeats (`{3}`, `{2,5}`, `{4,}`) inside one another; 1 without any.

    The expression need not be well formed.
    """
    open_groups = [1]  # the largest product so far in each group that is open, outermost first
    last = 1  # that of the part just read, to which a repeat applies
    at = 0
    while at < len(regex):
        counted = _COUNTED.match(regex, at)
        character = regex[at]
        at += 1
        if counted is not None:
            at = counted.end()
            last *= max(1, int(counted[1]), int(counted[2] or 0))
        elif character == "(":
            open_groups.append(1)
            last = 1
        elif character == ")":
            last = open_groups.pop() if len(open_groups) > 1 else last
        elif character not in "*+?":
            last = 1
            at = _end_of_part(regex, at - 1)
        open_groups[-1] = max(open_groups[-1], last)
    return max(open_groups)


def _end_of_part(regex: str, at: int) -> int:
    """Where a character, an escape (`\\d`, `\\x{41}`, `\\p{Greek}`) or a class (`[a-z]`) is over."""
    escape = re.compile(r"\\(?:[xuUpP]\{[^}]{0,64}\}|.)", re.DOTALL).match(regex, at)
    if escape is not None:
        return escape.end()
    if regex[at] == "[":
        end = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL).match(regex, at)
        return end.end() if end is not None else len(regex)
    return at + 1
