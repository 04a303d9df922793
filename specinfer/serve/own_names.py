"""OwnNames: complaints about a request, in the names that its endpoint gives to fields."""

from __future__ import annotations

import re
from collections.abc import Mapping

from specinfer.serve.api_error import ApiError


class OwnNames:
    """What one endpoint calls fields that SamplingParams and chat completions call otherwise.

    `names` maps their names to its own. A name that begins with a dot is part of a place, like ".function" in
    "tools[0].function.name". `conversation` is the field that has the messages.
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
        """The same complaint in these names."""
        told = error.body["error"]
        param = (
            self._conversation if told["param"] == "messages" else told["param"] and self._own(told["param"])
        )
        # A complaint about the conversation may say what the conversation says.
        about_it = param in (None, self._conversation)
        message = told["message"] if about_it else self._own(told["message"])
        return ApiError(message, param=param, status=error.status, code=told["code"], headers=error.headers)

    def _own(self, text: str) -> str:
        return self._pattern.sub(lambda found: self._names[found[0]], text)
