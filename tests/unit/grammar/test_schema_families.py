"""300 schemas: valid values are accepted, and strict answers are valid.

No model is used. Texts are random walks through the grammar's masks, or known values of a schema.
features.json has schema features with valid and invalid values; objects have their properties in the order
of generation. FAMILIES are whole schemas with one variable part, as in real functions, configurations,
resources, events and articles.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import regex

from specinfer.errors import RequestError
from tests.schemas import closed
from tests.unit.grammar.vocabulary import END, TOKENIZER, accepts, grammar_of, ids, schema_format

FEATURES = json.loads((Path(__file__).parent / "features.json").read_text())


def as_function(part, defs):
    """Arguments of a function, as in the tools of a request."""
    query = {"type": "string", "description": "What to look for"}
    properties = {"query": query, "value": part}
    return {"type": "object", "properties": properties, "required": ["query", "value"], **defs}


def as_configuration(part, defs):
    """Configuration file of a tool: draft 7, with definitions and named plugins."""
    return {
        "$id": "https://schemas.example.org/tool.json",
        "title": "Configuration",
        "type": "object",
        "definitions": {"setting": part},
        "properties": {"version": {"enum": [1, 2]}, "value": {"$ref": "#/definitions/setting"}},
        "patternProperties": {"^x-": {"type": "string"}},
        "additionalProperties": False,
        "required": ["value"],
        **defs,
    }


def as_resource(part, defs):
    """Resource of a cluster: fixed kind, metadata, and a spec."""
    meta = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    replicas = {"type": ["integer", "null"], "format": "int32"}
    spec = {"type": "object", "properties": {"replicas": replicas, "value": part}}
    kind = {"apiVersion": {"const": "v1"}, "kind": {"const": "Job"}}
    return closed({**kind, "metadata": meta, "spec": spec}) | defs


def as_event(part, defs):
    """Analytics event."""
    known = {"vendor": "org.example", "name": "event", "version": "1-0-0"}
    when = {"type": "integer", "minimum": 0, "maximum": 2147483647}
    return {
        "description": "Sent when it happens",
        "self": known,
        **closed({"at": when, "value": part}),
        **defs,
    }


def as_article(part, defs):
    """Article: a list of elements of several kinds."""
    kinds = [
        {"type": "object", "properties": {"type": {"const": kind}, name: value}, "required": ["type", name]}
        for kind, name, value in (("image", "url", {"type": "string"}), ("other", "value", part))
    ]
    return {"type": "array", "items": {"oneOf": kinds}, "maxItems": 4, **defs}


JOB = {"apiVersion": "v1", "kind": "Job", "metadata": {"name": "n"}}
FAMILIES = {
    "function": (as_function, lambda value: {"query": "x", "value": value}),
    "configuration": (as_configuration, lambda value: {"version": 1, "value": value, "x-a": "b"}),
    "resource": (as_resource, lambda value: JOB | {"spec": {"replicas": None, "value": value}}),
    "event": (as_event, lambda value: {"at": 5, "value": value}),
    "article": (as_article, lambda value: [{"type": "image", "url": "u"}, {"type": "other", "value": value}]),
}


@dataclass(frozen=True)
class Case:
    """One schema, with valid and invalid whole values."""

    schema: Any
    valid: list[Any]
    invalid: list[Any]


def cases():
    """Return all cases by name."""
    found = {}
    for family, (build, whole) in FAMILIES.items():
        for feature in FEATURES:
            defs = {"$defs": feature["defs"]} if "defs" in feature else {}
            valid, invalid = ([whole(one) for one in feature[which]] for which in ("valid", "invalid"))
            found[f"{family}: {feature['name']}"] = Case(build(feature["schema"], defs), valid, invalid)
    return found


CASES = cases()
IN_PART = {
    *("password lookahead", "negative lookahead", "word boundary", "unknown format", "uri-reference"),
    *("odd steps", "bounds of floats", "int64 bounds", "not a word", "not null", "distinct few"),
    *("distinct many", "distinct texts", "contains", "contains in few", "overlapping patterns"),
    *("pattern with lookahead", "names in a list", "names by pattern", "names of a length"),
    *("one property at least", "many properties", "dependent names", "dependencies of draft 7"),
    *("dependent schema", "one of required", "one of numbers", "one of numbers with bounds"),
    *("if then else", "many conditions", "condition on a pattern", "not required together"),
    "closed over all of",
}
MAX_TOKENS = 400
ENDS = [token for text in ('"', "}", "]", ",", "0", "a", "1", "A", "true", "null") for token in ids(text)]
FORMATS = jsonschema.FormatChecker(("email", "ipv4", "ipv6", "uuid"))
TIME = r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)"


@FORMATS.checks("date-time")
def _is_time(value):
    return not isinstance(value, str) or regex.fullmatch(TIME, value) is not None


@FORMATS.checks("json-pointer")
def _is_pointer(value):
    return not isinstance(value, str) or regex.fullmatch("(/([^~/]|~[01])*)*", value) is not None


def _pattern(validator, pattern, instance, schema):
    """Check `pattern` with classes such as \\p{L}, which Python's `re` lacks."""
    if isinstance(instance, str) and not regex.search(pattern, instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def validator_of(name, schema):
    """Return a validator of the JSON Schema draft that a case's name gives."""
    draft = jsonschema.Draft202012Validator
    if "draft" in name:
        draft = jsonschema.Draft4Validator if "draft 4" in name else jsonschema.Draft7Validator
    return jsonschema.validators.extend(draft, {"pattern": _pattern})(schema, format_checker=FORMATS)


def walk(grammar, seed):
    """Return a random text, biased to its end; None if it does not end within MAX_TOKENS."""
    state, rng, text = grammar.state(), np.random.default_rng(seed), []
    while len(text) < MAX_TOKENS:
        mask = state.allowed()
        assert mask.any(), TOKENIZER.decode(text)
        if mask[END] and rng.random() < 0.7:
            return TOKENIZER.decode(text)
        mask[END] = False
        ends = [token for token in ENDS if mask[token]] if len(text) > 8 and rng.random() < 0.7 else []
        quotes = [token for token in ends if token == ENDS[0] and rng.random() < 0.8]
        chosen = quotes or ends or np.flatnonzero(mask)
        if not len(chosen):
            return TOKENIZER.decode(text)
        text.append(int(rng.choice(chosen)))
        state.commit(text[-1:])
    return None


def test_the_300_schemas_agree_with_their_values():
    assert len(CASES) >= 300
    for name, case in CASES.items():
        validator = validator_of(name, case.schema)
        assert all(map(validator.is_valid, case.valid)), name
        assert not any(map(validator.is_valid, case.invalid)), name


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_no_value_of_a_schema_is_withheld_and_no_strict_answer_is_against_it(name):
    case = CASES[name]
    loose = grammar_of(response_format=schema_format(case.schema))
    texts = [json.dumps(value, ensure_ascii=False) for value in case.valid]
    assert [text for text in texts if not accepts(loose, text)] == []
    try:
        strict = grammar_of(response_format=schema_format(case.schema, strict=True))
    except RequestError:
        strict = None
    in_part = strict is None or loose.unenforced != ()
    assert in_part == (name.partition(": ")[2] in IN_PART)
    if strict is None:
        return
    written = [text for seed in range(2) if (text := walk(strict, seed)) is not None]
    validator = validator_of(name, case.schema)
    assert [text for text in written if not validator.is_valid(json.loads(text))] == []
    assert [text for text in map(json.dumps, case.invalid) if accepts(strict, text)] == []
