"""OwnNames: renames fields in error messages to the names that one endpoint uses."""

from __future__ import annotations

import re
from collections.abc import Mapping

from specinfer.serve.api_error import ApiError


class OwnNames:
    """Maps the names of SamplingParams and chat completions to the names of one endpoint.

    A name that begins with a dot is part of a path, like ".function" in "tools[0].function.name".
    `conversation` is the field that holds the messages.
    """

    def __init__(self, names: Mapping[str, str], conversation: str) -> None:
        self._names = names
        self._conversation = conversation
        longest_first = sorted(names, key=len, reverse=True)
        places = (
            rf"(?<=\]){re.escape(name)}" if name[0] == "." else rf"\b{re.escape(name)}"
            for name in longest_first
        )
        self._pattern = re.compile(rf"(?:{'|'.join(places)})\b")

    def of(self, error: ApiError) -> ApiError:
        """The same error with the endpoint's names."""
        told = error.body["error"]
        param = (
            self._conversation if told["param"] == "messages" else told["param"] and self._own(told["param"])
        )
        # An error about the conversation may quote it, and quoted text must not change.
        about_it = param in (None, self._conversation)
        message = told["message"] if about_it else self._own(told["message"])
        return ApiError(message, param=param, status=error.status, code=told["code"], headers=error.headers)

    def _own(self, text: str) -> str:
        return self._pattern.sub(lambda found: self._names[found[0]], text)
