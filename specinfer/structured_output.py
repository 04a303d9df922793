"""StructuredOutput: the form a request's text must have, whichever parameter asked for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal, get_args

from specinfer.errors import RequestError, naming, shown

MAX_SOURCE = 256 * 1024  # characters; a longer schema, regex, list or grammar is refused
_FORMATS = (
    '{"type": "text"}, {"type": "json_object"} or '
    '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
)


# Between the parts of a JSON text: what a pretty printer writes, anything, or nothing.
JsonWhitespace = Literal["bounded", "any", "none"]


class OutputKind(StrEnum):
    """What `StructuredOutput.source` holds."""

    JSON_OBJECT = "json_object"  # nothing: any JSON object
    JSON_SCHEMA = "json_schema"  # a JSON schema, as JSON
    REGEX = "regex"  # a regular expression the whole text matches
    CHOICE = "choice"  # a JSON list of strings, of which the text is one
    GRAMMAR = "grammar"  # a Lark grammar, or a GBNF one (rules written with ::=)


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What a text has to look like; equal forms are equal and hash alike, so compiled ones can be kept."""

    kind: OutputKind
    source: str = ""
    preamble: str = ""  # Lark rules; their rule `preamble` is what stands before the form
    strict: bool = False  # what of a schema cannot be held is refused, not left out
    whitespace: JsonWhitespace = "bounded"  # between the parts of JSON

    @property
    def parameter(self) -> str:
        """The sampling parameter that asked for it, for error messages."""
        is_json = self.kind in (OutputKind.JSON_OBJECT, OutputKind.JSON_SCHEMA)
        return "response_format" if is_json else self.kind.value


def structured_output(
    response_format: Mapping[str, Any] | None = None,
    regex: str | None = None,
    choice: Iterable[str] | None = None,
    grammar: str | None = None,
    preamble: str | None = None,
    json_whitespace: str = "bounded",
) -> StructuredOutput | None:
    """The one form these parameters ask for, or None when the text is free.

    `response_format` has OpenAI's shapes; `{"type": "text"}` asks for nothing. A schema that is `strict` is
    followed to the letter or refused; of others what cannot be held is left out. Whether the form can be
    compiled and begun shows when the model's tokenizer is known (grammar/grammar.py). A form that has no
    finite text, `root ::= "a" root` say, is not refused: its text goes on until max_tokens, with
    finish_reason "length". `preamble` are Lark rules, of which the rule `preamble` says what stands before
    the form.
    `json_whitespace` says what may stand between the parts of JSON, in a grammar's `%json` as well.

    Raises RequestError on a value of the wrong type or shape, when more than one of the other four is given,
    and for a preamble without any of them.
    """
    given = {"response_format": response_format, "regex": regex, "choice": choice, "grammar": grammar}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise RequestError(
            f"{' and '.join(names)} are given together; allowed: one of them, drop the rest", names[0]
        )
    form = None
    if response_format is not None:
        form = _from_response_format(response_format)
    elif regex is not None:
        form = _from_text(OutputKind.REGEX, regex, "a regular expression")
    elif choice is not None:
        form = _from_choice(choice)
    elif grammar is not None:
        form = _from_text(OutputKind.GRAMMAR, grammar, "a Lark grammar, or EBNF rules with ::=")
    whitespace = _whitespace(json_whitespace)
    if form is not None and form.kind not in (OutputKind.REGEX, OutputKind.CHOICE):
        form = replace(form, whitespace=whitespace)
    return form if preamble is None else _behind(preamble, form)


@naming("json_whitespace")
def _whitespace(value: object) -> JsonWhitespace:
    for known in get_args(JsonWhitespace):
        if value == known:
            found: JsonWhitespace = known
            return found
    raise RequestError(f"json_whitespace is {shown(value)}; allowed: {', '.join(get_args(JsonWhitespace))}")


@naming("preamble")
def _behind(preamble: object, form: StructuredOutput | None) -> StructuredOutput:
    if form is None:
        raise RequestError(
            "preamble says what stands before a form, and there is none; allowed: with response_format, "
            "regex, choice or grammar; add one of them, or drop it"
        )
    return replace(form, preamble=_source("preamble", preamble, "Lark rules with a rule preamble"))


def _from_text(kind: OutputKind, text: object, allowed: str) -> StructuredOutput:
    with naming(kind.value):
        return StructuredOutput(kind, _source(kind.value, text, allowed))


@naming("response_format")
def _from_response_format(value: object) -> StructuredOutput | None:
    name = "response_format"
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} is {shown(value)}; allowed: {_FORMATS}")
    match value.get("type"):
        case "text":
            _only_keys(name, value, {"type"})
            return None
        case "json_object":
            _only_keys(name, value, {"type"})
            return StructuredOutput(OutputKind.JSON_OBJECT)
        case "json_schema":
            _only_keys(name, value, {"type", "json_schema"})
            return _from_json_schema(value.get("json_schema"))
    raise RequestError(f"{name} has the type {shown(value.get('type'))}; allowed: {_FORMATS}")


def _from_json_schema(value: object) -> StructuredOutput:
    name = "response_format.json_schema"
    if not isinstance(value, Mapping):
        raise RequestError(f'{name} is {shown(value)}; allowed: {{"name": ..., "schema": {{...}}}}')
    _only_keys(name, value, {"name", "description", "schema", "strict"})
    title, description, strict = value.get("name"), value.get("description"), value.get("strict")
    if not isinstance(title, str) or not title:
        raise RequestError(f"{name}.name is {shown(title)}; allowed: a non-empty string")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{name}.description is {shown(description)}; allowed: a string, or leave it out")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{name}.strict is {shown(strict)}; allowed: true or false, or leave it out")
    source = schema_source(f"{name}.schema", value.get("schema"))
    return StructuredOutput(OutputKind.JSON_SCHEMA, source, strict=strict is True)


def schema_source(name: str, schema: object) -> str:
    """A JSON schema as JSON text; raises RequestError, which calls it `name`, when it is none.

    The keywords are not looked at: whether the schema can be followed shows when it is compiled.
    """
    if not isinstance(schema, Mapping):
        raise RequestError(f"{name} is {shown(schema)}; allowed: a JSON schema, as an object")
    if "x-guidance" in schema:
        raise RequestError(f'{name} has the key "x-guidance", which is no JSON schema; take it out')
    try:
        # Neither sorted nor spaced: the order of the properties is the order in which they are written.
        # Infinity is what Python reads of a bound like 1.8e308.
        source = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        if "NaN" in source:
            json.loads(source, parse_constant=_infinite)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} cannot be written as JSON ({error}); give plain values") from None
    return _source(name, source, "a JSON schema")


def _infinite(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is no number")
    return float(name)


@naming("choice")
def _from_choice(value: object) -> StructuredOutput:
    allowed = "a list of one or more non-empty strings"
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"choice is {shown(value)}; allowed: {allowed}")
    options = list(value)
    for option in options:
        if not isinstance(option, str) or not option:
            raise RequestError(f"choice holds {shown(option)}; allowed: {allowed}")
    if not options:
        raise RequestError(f"choice is empty; allowed: {allowed}")
    for option in options:
        _source("choice", option, allowed)
    return StructuredOutput(
        OutputKind.CHOICE, _source("choice", json.dumps(options, ensure_ascii=False), allowed)
    )


def _source(name: str, text: object, allowed: str) -> str:
    if not isinstance(text, str) or not text:
        raise RequestError(f"{name} is {shown(text)}; allowed: {allowed}")
    if len(text) > MAX_SOURCE:
        raise RequestError(f"{name} has {len(text)} characters; allowed: at most {MAX_SOURCE}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} has half of a surrogate pair at character {error.start}; give valid Unicode text"
        ) from None
    if "\0" in text:
        raise RequestError(f"{name} holds a NUL character; write it as an escape")
    return text


def _only_keys(name: str, value: Mapping[str, Any], allowed: set[str]) -> None:
    for key in value:
        if key not in allowed:
            raise RequestError(f"{name} has the key {shown(key)}; allowed: {', '.join(sorted(allowed))}")
