"""Reader and grammar of arguments as Python and Gemma 4 write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from specinfer.errors import RequestError
from specinfer.grammar.lark import escaped, json_rule
from specinfer.serve.dialect.call_form import Notation, lark_text
from specinfer.serve.dialect.call_format import Tool
from specinfer.serve.dialect.call_parser import ArgumentsReader
from specinfer.serve.dialect.tagged_calls import TYPES, given_values, json_of, resolved, types_of
from specinfer.structured_output import JsonWhitespace

_MAX_DEPTH: Final = 6  # levels of objects and lists with enforced schemas
_PYTHON_QUOTES: Final = ('"', "'")
_HEX: Final = "[0-9a-fA-F]"
_WRONG: Final = "[^0-9a-fA-F]"
# A backslash before x or u without their digits is text.
_ESCAPE: Final = rf"\\(?:x({_HEX}{{2}})|u({_HEX}{{4}})|([^xu])|(?=x{_HEX}?{_WRONG}|u{_HEX}{{0,3}}{_WRONG}))"
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "\n": ""} | {sign: sign for sign in "\\\"'"}
_SCALARS: Final = frozenset({"number", "integer", "boolean", "null"})  # their keywords are all enforced
_ENFORCED: Final = {  # keywords of the other types
    *("type", "anyOf", "enum", "const", "properties", "required", "items", "additionalProperties"),
    *("title", "description", "default", "examples", "$defs", "definitions", "$ref"),
}
_COMMA, _COLON = '"," " "?', ' ":" " "?'


class ValueArguments(ArgumentsReader):
    """Reads arguments in a notation, strings piece by piece, up to the bracket that closes them."""

    def __init__(self, notation: Notation) -> None:
        super().__init__()
        self._words = {theirs: ours for ours, theirs in notation.words.items()}
        quotes = [notation.quote] if notation.quote else _PYTHON_QUOTES
        self._part = re.compile(
            rf"\s*(?:({'|'.join(map(re.escape, quotes))})|([\[\]{{}}(),:=])|"
            r"([^\s\[\]{}(),:=\"'<]+)(?=[\s\[\]{}(),:=]))"
        )
        self._in_string = {quote: _string_part(quote, bool(notation.quote)) for quote in quotes}
        self._quote = ""  # of the string that has started
        self._begins = True
        self._in_list = [False]  # for each open bracket, the outermost one first
        self._is_key = True  # the next text is a name

    def _read(self) -> str:
        written, self._begins = "{" * self._begins, False
        while not self.done:
            pattern = self._in_string[self._quote] if self._quote else self._part
            part = pattern.match(self.held)
            if part is None:
                break
            self._take(part.end())
            written += self._of_string(part) if self._quote else self._outside(*part.groups())
        return written

    def _of_string(self, part: re.Match[str]) -> str:
        end, text, *digits, sign = part.groups()
        if end:
            self._quote = ""
            return '"'
        code = next(filter(None, digits), None)
        text = text or (chr(int(code, 16)) if code else _ESCAPED.get(sign, part[0]))
        # Half of a surrogate pair stays an escape: UTF-8 has none, and JSON joins two halves.
        return json.dumps(text, ensure_ascii=code is not None)[1:-1]

    def _outside(self, quote: str | None, sign: str | None, word: str | None) -> str:
        if quote:
            self._quote = quote
            return '"'
        if word:
            known = None if self._is_key else self._words.get(word) or json_of(word, TYPES)
            return known or json.dumps(word, ensure_ascii=False)
        assert sign is not None
        if sign in "[{(":
            self._in_list.append(sign == "[")
        elif sign in "]})":
            self._in_list.pop()
            self.done = not self._in_list
        self._is_key = sign == "{" or (sign == "," and not self._in_list[-1])
        return {",": ", ", ":": ": ", "=": ": "}.get(sign, "}" if self.done else sign)


def _string_part(quote: str, is_plain: bool) -> re.Pattern[str]:
    """An expression for the end of a string, text in it, or an escape unless it `is_plain`."""
    cut = [re.escape(quote[:size]) + r"\Z" for size in range(1, len(quote))]  # a quote that is not complete
    stops = "|".join([re.escape(quote), *cut, *([] if is_plain else [r"\\"])])
    return re.compile(rf"({re.escape(quote)})|((?:(?!{stops}).)+)|{_ESCAPE}", re.DOTALL)


class ValueRules:
    """Adds Lark rules for arguments in a notation to `rules`; `special` has the ids of special tokens."""

    def __init__(
        self,
        notation: Notation,
        rules: dict[str, str],
        special: Mapping[str, int],
        whitespace: JsonWhitespace,
    ) -> None:
        self._notation = notation
        self._rules = rules
        self._whitespace = whitespace
        self._named: dict[tuple[int, int], str] = {}  # rules of values, by a schema's identity and its depth
        self._quote = lark_text(notation.quote, special)
        self._is_special = notation.quote in special
        self._is_python = not notation.quote

    def arguments(self, tool: Tool, name: str) -> str:
        """Return an expression for the arguments of a tool; new rules begin with `name`.

        Raises RequestError for a strict tool whose schema is not enforced as a whole.
        """
        self._check(tool.parameters, tool, 0)
        return self._members(tool.constrained_parameters, tool, name, 0)

    def _check(self, schema: Mapping[str, Any], tool: Tool, depth: int) -> None:
        others = schema.get("additionalProperties", False)
        held = set(schema) <= _ENFORCED and isinstance(others, bool)
        if tool.strict and (depth > _MAX_DEPTH or not (held or types_of(schema) <= _SCALARS)):
            raise RequestError(
                f"the function {tool.name} is strict, but this model does not write arguments as JSON; its "
                f"schema may have {_MAX_DEPTH} levels and the keywords {', '.join(sorted(_ENFORCED))}; "
                "change it, or leave strict out",
                "tools",
            )

    def _members(self, schema: Mapping[str, Any], tool: Tool, name: str, depth: int) -> str:
        """An expression for the names and values of an object, separated by commas."""
        properties: Mapping[str, Any] = schema.get("properties") or {}
        required = set(schema.get("required", ())) & set(properties)
        names = list(properties) if self._is_python else sorted(properties, key=str.lower)
        rest, firsts = "", [] if required else ['""']
        if schema.get("additionalProperties", not properties) is not False:
            other = self._other(depth)
            rest = f"({_COMMA} {other})*"
            firsts += [] if required else [f"{other} {rest}"]
        for number, key in reversed([*enumerate(names)]):
            value = self._value(properties[key], tool, f"{name}_{number}", depth + 1)
            pair = f"{self._key(key, depth)} {value}"
            if required.isdisjoint(names[:number]):
                firsts.append(f"{pair} {rest}")
            self._rules[f"{name}_r{number}"] = f"({_COMMA} {pair}){'' if key in required else '?'} {rest}"
            rest = f"{name}_r{number}"
        return f"({' | '.join(firsts)})"

    def _key(self, key: str, depth: int) -> str:
        if self._is_python and depth:
            return f"({' | '.join(self._literals(key))}){_COLON}"
        return json.dumps(key + self._notation.assign, ensure_ascii=False)

    def _other(self, depth: int) -> str:
        """A rule for a name and a value that have no schema."""
        name = "pair" if depth else "argument"
        key = r"/[^\s\[\]{}(),:=\"'<]+/ " + json.dumps(self._notation.assign)
        self._rules[name] = f"{self._string() + _COLON if self._is_python and depth else key} {self._any()}"
        return name

    def _value(self, schema: object, tool: Tool, name: str, depth: int) -> str:
        """The name of a rule for a value."""
        found = resolved(schema, tool.parameters)
        if known := self._named.get((id(found), depth)):
            return known
        self._check(found, tool, depth)
        types, given = types_of(found), given_values(found)
        parts: Sequence[Any] = found.get("anyOf", ())
        if depth > _MAX_DEPTH or (types == TYPES and not parts):
            return self._any()
        if given is not None:
            options = [text for one in given for text in self._literals(one)]
        elif parts:
            options = [self._value(part, tool, f"{name}_o{i}", depth + 1) for i, part in enumerate(parts)]
        else:
            kinds = types - {"integer"} if "number" in types else types
            options = [self._of_type(kind, found, tool, name, depth) for kind in sorted(kinds)]
        self._rules[name] = " | ".join(options)
        self._named[id(found), depth] = name
        return name

    def _of_type(self, kind: str, schema: Mapping[str, Any], tool: Tool, name: str, depth: int) -> str:
        words = self._notation.words
        match kind:
            case "string":
                return self._string()
            case "boolean":
                return f"{json.dumps(words['true'])} | {json.dumps(words['false'])}"
            case "null":
                return json.dumps(words["null"])
            case "array":
                item = self._value(schema.get("items", {}), tool, f"{name}_i", depth + 1)
                return f'"[" ({item} ({_COMMA} {item})*)? "]"'
            case "object":
                return f'"{{" {self._members(schema, tool, f"{name}_m", depth)} "}}"'
        self._rules[f"{name}_n"] = json_rule(
            {**schema, "type": kind}, strict=tool.strict, whitespace=self._whitespace
        )
        return f"{name}_n"

    def _literals(self, value: object) -> list[str]:
        """Expressions for the ways to write a value."""
        if self._is_python:
            return [json.dumps(one) for one in dict.fromkeys((repr(value), json.dumps(value)))]
        if isinstance(value, str):
            return [f"{self._quote} {json.dumps(value, ensure_ascii=False) if value else ''} {self._quote}"]
        return [json.dumps(json.dumps(value))]

    def _string(self) -> str:
        if self._is_python:
            escape = rf"\\(x{_HEX}{{2}}|u{_HEX}{{4}}|[^xu])"
            self._rules["string"] = " | ".join(rf"/{q}([^{q}\\]|{escape})*{q}/" for q in _PYTHON_QUOTES)
        elif self._is_special:
            self._rules |= {"string": f"{self._quote} TEXT {self._quote}", "TEXT": "/(?s:.*)/"}
        else:
            quote = escaped(self._notation.quote)
            self._rules["string[lazy]"] = f"/{quote}(?s:.*){quote}/"
        return "string"

    def _any(self) -> str:
        if "any" not in self._rules:
            self._rules["any"] = ""  # the rule refers to itself
            words = " | ".join(map(json.dumps, self._notation.words.values()))
            pair = self._other(1)
            self._rules["number"] = json_rule({"type": "number"})
            self._rules["any"] = (
                f'{self._string()} | number | {words} | "[" (any ({_COMMA} any)*)? "]" | '
                f'"{{" ({pair} ({_COMMA} {pair})*)? "}}"'
            )
        return "any"
