"""SamplingFields: the fields of a request that decide a text, and the SamplingParams they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

from pydantic import Field

from specinfer.errors import RequestError
from specinfer.sampling_params import SamplingParams
from specinfer.serve.fields.body import Fields, Ids, Items, TextOrItems
from specinfer.serve.http.api_error import ApiError

# Of one request: each stop string is looked for in every step, and each bad word in every law.
MOST_STOPS: Final = 64
MOST_BAD_WORDS: Final = 1024
_LONGEST_STOP: Final = 1024  # characters, of a bad word too
MOST_LOGPROBS: Final = 20  # of a token, as OpenAI and vLLM have it: each is an object in two processes


class TextPart(Fields):
    """A piece of a message; of text, as nothing else is read."""

    type: Literal["text"]
    text: str


class Prediction(Fields):
    """The caller's guess of the answer."""

    type: Literal["content"]
    content: TextOrItems[TextPart]

    @property
    def text(self) -> str:
        """The guess."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class StreamOptions(Fields):
    """How a stream ends."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="Whether each chunk has the usage so far.")
    include_obfuscation: Literal[False] | None = Field(
        None, description="Padding against listeners is not offered."
    )


def check_strings(name: str, given: Sequence[str], most: int) -> None:
    """Raise ApiError where a list that the engine looks at for every token is too long."""
    longest = max(map(len, given), default=0)
    if len(given) > most or longest > _LONGEST_STOP:
        raise ApiError(
            f"{name} has {len(given)} strings, the longest of {longest} characters; allowed: at most "
            f"{most}, of at most {_LONGEST_STOP}; send fewer or shorter ones",
            param=name,
        )


class SamplingFields(Fields):
    """What decides a text, under the names of OpenAI's API, of vLLM's, and of SamplingParams."""

    # Whether the model's own sampling parameters hold where a request says nothing.
    takes_defaults: ClassVar[bool] = True
    # Fields that the endpoint cannot honour, and what to do instead.
    refused: ClassVar[Mapping[str, str]] = {}

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
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    logprobs_mode: str | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    response_format: dict[str, Any] | None = None
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_whitespace: Literal["bounded", "any", "none"] | None = Field(
        None, description="Between the parts of JSON: what a pretty printer writes (bounded), any, or none."
    )

    speculation: bool | dict[str, Any] | None = None
    cache_salt: str | None = None
    trace: bool | None = Field(None, description="Whether chunks carry the token tree of each step.")

    def check(self) -> None:
        """Refuse what contradicts itself or is too much; raises ApiError."""
        for name, advice in self.refused.items():
            value = getattr(self, name)
            if value not in (None, []) and (name, value) not in (("n", 1), ("n_probs", 0)):
                raise ApiError(f"{name} is not offered here: {advice}", param=name)
        check_strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop or [], MOST_STOPS)
        check_strings("bad_words", self.bad_words or [], MOST_BAD_WORDS)

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
