"""The fields that conversations have at every endpoint: tools, forms, the chat template's variables.

Beside tools a form says what an answer without calls looks like: where tools may be called, an answer is
calls or the form; where one has to be called, calls; and with `tool_choice: none` the form.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field

from specinfer.errors import RequestError
from specinfer.sampling_params import SamplingParams
from specinfer.serve.api_error import ApiError
from specinfer.serve.fields import SamplingFields
from specinfer.structured_output import StructuredOutput, structured_output

_FORMS: Final = ("response_format", "regex", "choice", "grammar")


class ConversationFields(SamplingFields):
    """What a conversation may ask beside its messages."""

    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = Field(
        None, description="Whether the template opens the assistant's turn: true."
    )
    continue_final_message: bool | None = Field(
        None, description="Whether the last message is gone on with, where it ends, instead."
    )
    add_special_tokens: bool | None = Field(
        None, description="Whether the begin-of-text token stands before what the template writes: false."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the model's chat template."
    )

    @property
    @abstractmethod
    def described_tools(self) -> list[dict[str, Any]]:
        """The tools in the shape of chat completions, which chat templates know."""

    @property
    @abstractmethod
    def chosen_tool(self) -> str | dict[str, Any] | None:
        """What `tool_choice` says, in that shape."""

    @property
    def parallel(self) -> bool:
        """Whether an answer may call several tools."""
        return self.parallel_tool_calls is not False

    @property
    @abstractmethod
    def effort(self) -> tuple[str, str | None]:
        """The name of the field that says how much the model is to think, and what it says."""

    @property
    def forms(self) -> Mapping[str, Any]:
        """The fields that ask for a form of the text, by name."""
        given = {name: getattr(self, name) for name in _FORMS}
        return {name: value for name, value in given.items() if value not in (None, {"type": "text"})}

    def check(self) -> None:
        """Refuse what contradicts itself; raises ApiError."""
        super().check()
        if self.add_generation_prompt and self.continue_final_message:
            raise ApiError(
                "add_generation_prompt and continue_final_message are true; give one of them",
                param="continue_final_message",
            )

    @property
    def form_params(self) -> dict[str, Any]:
        """The same fields under the names, and in the shapes, of SamplingParams."""
        return dict(self.forms)

    @property
    def form(self) -> StructuredOutput | None:
        """The form that an answer without calls has to have; raises ApiError."""
        try:
            return structured_output(**self.form_params, json_whitespace=self.json_whitespace or "bounded")
        except RequestError as error:
            raise ApiError.of(error) from None

    def params(self, **more: Any) -> SamplingParams:
        """What these fields mean; a `grammar` among the others holds calls, and the form if there is one."""
        if more.get("grammar") is None:
            return super().params(**more)
        bare = self.model_copy(update=dict.fromkeys(_FORMS))
        return super(ConversationFields, bare).params(**more | {"response_format": None})
