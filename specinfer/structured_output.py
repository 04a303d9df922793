"""StructuredOutput: the form that a request's text must have."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal, cast, get_args

from specinfer.errors import RequestError, naming, shown

MAX_SOURCE = 256 * 1024  # characters; a longer schema, regex, list or grammar is refused
_FORMATS = (
    '{"type": "text"}, {"type": "json_object"} or '
    '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
)


# Whitespace between the parts of JSON: as pretty printers write it, any, or none.
JsonWhitespace = Literal["bounded", "any", "none"]


class OutputKind(StrEnum):
    """Kind of `StructuredOutput.source`."""

    JSON_OBJECT = "json_object"  # empty source: any JSON object
    JSON_SCHEMA = "json_schema"  # a JSON schema, as JSON
    REGEX = "regex"  # a regular expression that matches the whole text
    CHOICE = "choice"  # a JSON list of the allowed texts
    GRAMMAR = "grammar"  # a Lark grammar, or a GBNF one (rules written with ::=)


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """Form of a text; hashable, as the key of compiled grammars."""

    kind: OutputKind
    source: str = ""
    preamble: str = ""  # Lark rules; the rule `preamble` matches the text before the form
    strict: bool = False  # True: refuse a schema with unsupported keywords; False: ignore these keywords
    whitespace: JsonWhitespace = "bounded"  # between the parts of JSON

    @property
    def parameter(self) -> str:
        """The sampling parameter that gave the form, for error messages."""
        return "response_format" if self.is_json else self.kind.value

    @property
    def is_json(self) -> bool:
        """True if the text is JSON."""
        return self.kind in (OutputKind.JSON_OBJECT, OutputKind.JSON_SCHEMA)


def structured_output(
    response_format: Mapping[str, Any] | None = None,
    regex: str | None = None,
    choice: Iterable[str] | None = None,
    grammar: str | None = None,
    preamble: str | None = None,
    json_whitespace: str = "bounded",
) -> StructuredOutput | None:
    """Return the form that the parameters give, or None if the text is unconstrained.

    The form is compiled later, with the model's tokenizer (grammar/grammar.py), which may refuse it. A form
    without a finite text, such as `root ::= "a" root`, is allowed: its text runs until max_tokens and has the
    finish_reason "length".

    Args:
        response_format: in OpenAI's format; `{"type": "text"}` gives no form. A `strict` schema is followed
            exactly or refused; unsupported keywords of other schemas are ignored.
        regex: a regular expression that matches the whole text.
        choice: the allowed texts.
        grammar: a Lark or EBNF grammar.
        preamble: Lark rules; the rule `preamble` matches the text before the form.
        json_whitespace: whitespace between the parts of JSON.

    Raises:
        RequestError: a value has the wrong type or shape, several of the first four parameters are given, or
            a preamble without any of them.
    """
    given = {"response_format": response_format, "regex": regex, "choice": choice, "grammar": grammar}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise RequestError(
            f"{' and '.join(names)} are given together; allowed: one of them; remove the others", names[0]
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
    if json_whitespace not in get_args(JsonWhitespace):
        found, allowed = shown(json_whitespace), ", ".join(get_args(JsonWhitespace))
        raise RequestError(f"json_whitespace is {found}; allowed: {allowed}", "json_whitespace")
    if form is not None and form.is_json:
        form = replace(form, whitespace=cast(JsonWhitespace, json_whitespace))
    return form if preamble is None else _behind(preamble, form)


@naming("preamble")
def _behind(preamble: object, form: StructuredOutput | None) -> StructuredOutput:
    if form is None:
        raise RequestError(
            "preamble is given without a form; allowed: with response_format, regex, choice or grammar; add "
            "one of them, or remove preamble"
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
    """Return a JSON schema as JSON text; raises a RequestError that names it `name`.

    Keywords are checked when the schema is compiled, not here.
    """
    if not isinstance(schema, Mapping):
        raise RequestError(f"{name} is {shown(schema)}; allowed: a JSON schema, as an object")
    if "x-guidance" in schema:
        raise RequestError(f'{name} has the key "x-guidance", which JSON schemas do not have; remove it')
    try:
        # Keys are not sorted: the order of the properties is their order in the output.
        # Python reads a bound like 1.8e308 as Infinity.
        source = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        if "NaN" in source:
            json.loads(source, parse_constant=_infinite)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} cannot be written as JSON ({error}); give plain values") from None
    return _source(name, source, "a JSON schema")


def _infinite(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is not a number")
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
