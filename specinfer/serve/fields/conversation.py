"""ConversationFields: the fields that endpoints of conversations share beside their messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from pydantic import Field

from specinfer.errors import RequestError
from specinfer.sampling_params import SamplingParams
from specinfer.serve.dialect.tool import ToolChoice
from specinfer.serve.fields.functions import Function
from specinfer.serve.fields.sampling import SamplingFields
from specinfer.serve.http.api_error import ApiError
from specinfer.structured_output import StructuredOutput, structured_output

_FORMS: Final = ("regex", "choice", "grammar")  # beside JSON


class ConversationFields(SamplingFields):
    """What a conversation may ask beside its messages."""

    format_field: ClassVar[str] = "response_format"  # which says what JSON the answer is to be
    effort_field: ClassVar[str] = "reasoning_effort"  # which says how much the model is to think

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
    def functions(self) -> Sequence[Function]:
        """The functions that `tools` describes."""

    @property
    @abstractmethod
    def chosen(self) -> ToolChoice:
        """What `tool_choice` says, or what holds where it says nothing."""

    @property
    def parallel(self) -> bool:
        """Whether an answer may call several tools."""
        return self.parallel_tool_calls is not False

    @property
    def effort(self) -> str | None:
        """How much the model is to think, as `effort_field` says."""
        value: Any = self
        for name in self.effort_field.split("."):
            value = None if value is None else getattr(value, name)
        return None if value is None else str(value)

    @property
    def answer_format(self) -> dict[str, Any] | None:
        """The JSON that the answer is to be, in the shape of `response_format`; None for any text."""
        return None if self.response_format == {"type": "text"} else self.response_format

    @property
    def forms(self) -> list[str]:
        """The names of the fields that ask for a form of the text."""
        given = [*((name, getattr(self, name)) for name in _FORMS), (self.format_field, self.answer_format)]
        return [name for name, value in given if value is not None]

    def check(self) -> None:
        """Refuse what contradicts itself; raises ApiError."""
        super().check()
        if self.add_generation_prompt and self.continue_final_message:
            raise ApiError(
                "add_generation_prompt and continue_final_message are true; give one of them",
                param="continue_final_message",
            )

    @property
    def form(self) -> StructuredOutput | None:
        """The form that an answer without calls has to have; raises ApiError."""
        given = {name: getattr(self, name) for name in _FORMS}
        try:
            return structured_output(
                self.answer_format, **given, json_whitespace=self.json_whitespace or "bounded"
            )
        except RequestError as error:
            raise ApiError.of(error) from None

    @abstractmethod
    def sampling_params(self, room: int, **held: Any) -> SamplingParams:
        """What these fields mean where an answer may have `room` tokens and is held so; raises ApiError."""

    def params(self, **more: Any) -> SamplingParams:
        """What these fields mean; a `grammar` among the others holds calls, and the form if there is one."""
        if more.get("grammar") is None:
            return super().params(**{"response_format": self.answer_format} | more)
        bare = self.model_copy(update=dict.fromkeys((*_FORMS, "response_format")))
        return SamplingFields.params(bare, **more)
