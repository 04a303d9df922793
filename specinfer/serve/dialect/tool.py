"""Tools that a request allows, and its choice among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specinfer.errors import RequestError

_MAY_NAME_OTHERS = frozenset(  # keywords besides `properties` that may allow other names
    [
        *("anyOf", "oneOf", "allOf", "$ref", "$dynamicRef", "$recursiveRef", "if", "patternProperties"),
        *("dependentSchemas", "dependencies", "unevaluatedProperties"),
    ]
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call, with a JSON schema of its arguments.

    Generated arguments follow the schema. Unsupported parts of it are ignored, or refused if `strict`.
    """

    name: str
    parameters: Mapping[str, Any]  # always the schema of an object
    description: str | None = None
    strict: bool = False

    @property
    def takes_others(self) -> bool:
        """True if arguments may have names other than those of `properties`.

        JSON Schema allows any name unless `additionalProperties` forbids it. Here a schema must mention other
        names, because functions take only declared parameters; vLLM, SGLang and llama.cpp do the same.
        """
        given = self.parameters
        properties = given.get("properties") or {}
        others = given.get("additionalProperties", not properties)
        unnamed = not set(given.get("required", ())) <= set(properties)
        return others is not False or unnamed or not _MAY_NAME_OTHERS.isdisjoint(given)

    @property
    def constrained_parameters(self) -> Mapping[str, Any]:
        """The schema that generated arguments follow, with `additionalProperties` set."""
        return self.parameters if self.takes_others else {**self.parameters, "additionalProperties": False}

    def described(self) -> dict[str, Any]:
        """Return the tool in OpenAI's format, which chat templates read."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": dict(self.parameters)}}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether a model may call tools, must call one, or must call a given one."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None  # the only tool it may call

    def among(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Return the tools that may be called; raises RequestError if the given one is missing."""
        if self.mode == "none":
            return ()
        found = tuple(tool for tool in tools if self.name in (None, tool.name))
        if self.name is not None and not found:
            names = ", ".join(tool.name for tool in tools)
            raise RequestError(
                f"tool_choice is {self.name!r}; allowed: a name in tools: {names}", "tool_choice"
            )
        return found
