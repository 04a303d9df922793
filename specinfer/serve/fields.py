"""The fields that all endpoints have which make text, and the SamplingParams they mean."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from specinfer.errors import RequestError
from specinfer.sampling_params import SamplingParams
from specinfer.serve.api_error import ApiError

_Body = TypeVar("_Body", bound=BaseModel)
_Item = TypeVar("_Item")


class _FirstFault(FailFast):
    """A list is given up at its first bad item: of millions, each would have a complaint in memory."""

    def __hash__(self) -> int:  # which unions ask for, and FailFast has none
        return hash(_FirstFault)


Items = Annotated[list[_Item], _FirstFault()]
Ids = Items[int]


class Fields(BaseModel):
    """A JSON object of a request: exactly these fields, each of its own type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(Fields):
    """How a stream ends."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against listeners; this server sends none


class SamplingFields(Fields):
    """What decides a text, under the names of OpenAI's API, of vLLM's, and of SamplingParams."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # who asks; it changes nothing here
    metadata: dict[str, str] | None = None  # the caller's notes; they are returned where the API says so

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: Items[str] | None = None
    allowed_token_ids: Ids | None = None

    min_tokens: int | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    logprobs_mode: str | None = None
    prompt_logprobs: int | None = None

    response_format: dict[str, Any] | None = None
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None

    speculation: bool | dict[str, Any] | None = None
    cache_salt: str | None = None
    trace: bool | None = Field(None, description="Whether chunks carry the token tree of each step.")

    def check(self) -> None:
        """Refuse what contradicts itself; raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options needs stream: true; add it, or drop them", param="stream_options")

    def params(self, **more: Any) -> SamplingParams:
        """What these fields mean, with others of SamplingParams; a field that is None is left at its default.

        Raises ApiError, naming the field at fault.
        """
        given = {
            name: value
            for name in SamplingFields.model_fields
            if name in _OF_PARAMS and (value := getattr(self, name)) is not None
        }
        given |= {name: value for name, value in more.items() if value is not None}
        try:
            return SamplingParams(**given)
        except RequestError as error:
            raise ApiError.of(error) from None


_OF_PARAMS = frozenset(SamplingParams.__dataclass_fields__)


def parse(kind: type[_Body], body: bytes) -> _Body:
    """A request's body; raises ApiError where it is not JSON, or not what the endpoint takes."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise ApiError.of_validation(error) from None
