"""Tool and ToolChoice: what a request lets its model call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specinfer.errors import RequestError

_MAY_NAME_OTHERS = frozenset(  # keywords beside `properties` that may speak of other names
    [
        *("anyOf", "oneOf", "allOf", "$ref", "$dynamicRef", "$recursiveRef", "if", "patternProperties"),
        *("dependentSchemas", "dependencies", "unevaluatedProperties"),
    ]
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call, with a JSON schema of its arguments.

    Arguments follow the schema. What of it cannot be followed is passed over, or refused when `strict`.
    """

    name: str
    parameters: Mapping[str, Any]  # always of an object
    description: str | None = None
    strict: bool = False

    @property
    def takes_others(self) -> bool:
        """Whether arguments may have names beside those of `properties`: where the schema speaks of others.

        A schema without `additionalProperties` would allow any name, but a function is called with the
        parameters it declares, and vLLM, SGLang and llama.cpp write no others either.
        """
        given = self.parameters
        properties = given.get("properties") or {}
        others = given.get("additionalProperties", not properties)
        unnamed = not set(given.get("required", ())) <= set(properties)
        return others is not False or unnamed or not _MAY_NAME_OTHERS.isdisjoint(given)

    @property
    def held_parameters(self) -> Mapping[str, Any]:
        """The schema that arguments are held to, which says whether they may have other names."""
        return self.parameters if self.takes_others else {**self.parameters, "additionalProperties": False}

    def described(self) -> dict[str, Any]:
        """The tool in OpenAI's shape, as chat templates show it to models."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": dict(self.parameters)}}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether a model may call, must, or must call one tool."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None  # the only tool it may call

    def among(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """The tools that may be called; raises RequestError where the only one is not there."""
        if self.mode == "none":
            return ()
        found = tuple(tool for tool in tools if self.name in (None, tool.name))
        if self.name is not None and not found:
            names = ", ".join(tool.name for tool in tools)
            raise RequestError(
                f"tool_choice names {self.name!r}, which is none of the tools: {names}", "tool_choice"
            )
        return found
