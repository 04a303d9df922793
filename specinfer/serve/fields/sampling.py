"""SamplingFields: sampling fields of a request, and their conversion to SamplingParams."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import Field

from specinfer.errors import RequestError
from specinfer.sampling_params import SamplingParams
from specinfer.serve.fields.body import Fields, Ids, Items, TextOrItems
from specinfer.serve.http.api_error import ApiError

# Limits of one request: each step searches all stop strings and masks all bad words.
MAX_STOPS: Final = 64
MAX_BAD_WORDS: Final = 1024
_MAX_STOP_LENGTH: Final = 1024  # characters; bad words too
MAX_LOGPROBS: Final = 20  # a token, as in OpenAI's API and vLLM; each is an object in two processes


class TextPart(Fields):
    """A text part of a message; only text is supported."""

    type: Literal["text"]
    text: str


def text_of(content: str | list[Any], between: str = "") -> str:
    """A text, or the texts of parts, joined."""
    return content if isinstance(content, str) else between.join(part.text for part in content)


class Prediction(Fields):
    """The predicted answer that the request gives."""

    type: Literal["content"]
    content: TextOrItems[TextPart]

    @property
    def text(self) -> str:
        """The predicted text."""
        return text_of(self.content)


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="Whether each chunk contains the usage so far."
    )


def check_strings(name: str, given: Sequence[str], limit: int) -> None:
    """Raise ApiError for a list of stop strings or bad words that is too long."""
    longest = max(map(len, given), default=0)
    if len(given) > limit or longest > _MAX_STOP_LENGTH:
        raise ApiError(
            f"{name} has {len(given)} strings, the longest of {longest} characters; allowed: at most "
            f"{limit}, of at most {_MAX_STOP_LENGTH}; send fewer or shorter ones",
            param=name,
        )


class SamplingFields(Fields):
    """Sampling fields, with the names of OpenAI's API, vLLM's API and SamplingParams."""

    # Whether the model's own sampling parameters are the defaults.
    takes_defaults: ClassVar[bool] = True
    # Fields that the endpoint does not support, and what to do instead.
    refused: ClassVar[Mapping[str, str]] = {}

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # id of the end user; no effect
    metadata: dict[str, str] | None = None  # the caller's notes, returned by /v1/responses

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: int | None = Field(None, description="Only -1 with penalties, which look at all text.")
    logit_bias: dict[str, float] | None = None
    bad_words: Items[str] | None = None
    allowed_token_ids: Ids | None = None

    min_tokens: int | None = None
    stop: str | Items[str] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    logprobs_mode: str | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    response_format: dict[str, Any] | None = None
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_whitespace: Literal["bounded", "any", "none"] | None = Field(
        None,
        description="White space in JSON: bounded (as a pretty printer writes it), any, or none.",
    )

    speculation: bool | dict[str, Any] | None = None
    cache_salt: str | None = None
    trace: bool | None = Field(None, description="Whether chunks contain the token tree of each step.")

    def check(self) -> None:
        """Raise ApiError for unsupported fields and lists that are too long."""
        for name, advice in self.refused.items():
            value = getattr(self, name)
            if value is not False and value not in (None, []) and (name, value) != ("n", 1):
                raise ApiError(f"{name} is not supported here: {advice}", param=name)
        check_strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop or [], MAX_STOPS)
        check_strings("bad_words", self.bad_words or [], MAX_BAD_WORDS)

    def with_defaults(self, usual: Mapping[str, float]) -> Self:
        """Return a copy with the model's own sampling parameters, `usual`, in place of absent fields.

        Raises ApiError for a range of penalties that is not the whole text, if there are penalties.
        """
        usual = usual if self.takes_defaults else {}
        own = self.model_copy(update={name: usual[name] for name in usual if getattr(self, name, 0) is None})
        penalties = own.frequency_penalty, own.presence_penalty, own.repetition_penalty not in (None, 1)
        if own.repeat_last_n not in (None, -1) and any(penalties):
            raise ApiError(
                f"repeat_last_n is {own.repeat_last_n}, and penalties look at the whole text; allowed: -1; "
                "remove it, or set the penalties to have no effect",
                param="repeat_last_n",
            )
        return own

    def check_equal(self, name: str, other: str) -> None:
        """Raise ApiError if two fields with one meaning are given and differ."""
        given, same = getattr(self, name), getattr(self, other)
        if None not in (given, same) and given != same:
            raise ApiError(f"{name} and {other} are given, and differ; give one of them", param=name)

    def params(self, **more: Any) -> SamplingParams:
        """Convert to SamplingParams, with `more` in place of its fields; None means the default.

        A seed is drawn if there is none, so that another engine can go on with the text.
        Raises ApiError, which names the field.
        """
        shared = SamplingFields.model_fields.keys() & SamplingParams.__dataclass_fields__.keys()
        given = {name: getattr(self, name) for name in shared} | more
        if given["seed"] is None:
            given["seed"] = secrets.randbits(63)
        try:
            return SamplingParams(**{name: one for name, one in given.items() if one is not None})
        except RequestError as error:
            raise ApiError.of(error) from None
