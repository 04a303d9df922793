"""A schema of an object, for functions and forms."""

from __future__ import annotations

from typing import Any


def closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """Return an object of these properties and no others; all are required, or those that are named."""
    names = list(required or properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
