"""300 JSON schemas: common features of schemas within families of whole schemas.

features.json has schema features with valid and invalid values; objects have their properties in the order
in which they are generated. FAMILIES are whole schemas with one variable part, as in real functions,
configurations, resources, events and articles.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FEATURES = json.loads((Path(__file__).parent / "features.json").read_text())


def as_function(part, defs):
    """Arguments of a function, as in the tools of a request."""
    return {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to look for"}, "value": part},
        "required": ["query", "value"],
        **defs,
    }


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
    spec = {
        "type": "object",
        "properties": {"replicas": {"type": ["integer", "null"], "format": "int32"}, "value": part},
    }
    return {
        "type": "object",
        "properties": {
            "apiVersion": {"const": "v1"},
            "kind": {"const": "Job"},
            "metadata": meta,
            "spec": spec,
        },
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
        **defs,
    }


def as_event(part, defs):
    """Analytics event."""
    return {
        "description": "Sent when it happens",
        "self": {"vendor": "org.example", "name": "event", "version": "1-0-0"},
        "type": "object",
        "properties": {"at": {"type": "integer", "minimum": 0, "maximum": 2147483647}, "value": part},
        "required": ["at", "value"],
        "additionalProperties": False,
        **defs,
    }


def as_article(part, defs):
    """Article: a list of elements of several kinds."""
    image = {
        "type": "object",
        "properties": {"type": {"const": "image"}, "url": {"type": "string"}},
        "required": ["type", "url"],
    }
    other = {
        "type": "object",
        "properties": {"type": {"const": "other"}, "value": part},
        "required": ["type", "value"],
    }
    return {"type": "array", "items": {"oneOf": [image, other]}, "maxItems": 4, **defs}


FAMILIES = {
    "function": (as_function, lambda value: {"query": "x", "value": value}),
    "configuration": (as_configuration, lambda value: {"version": 1, "value": value, "x-a": "b"}),
    "resource": (
        as_resource,
        lambda value: {
            "apiVersion": "v1",
            "kind": "Job",
            "metadata": {"name": "n"},
            "spec": {"replicas": None, "value": value},
        },
    ),
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
