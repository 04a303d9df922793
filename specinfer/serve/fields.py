"""The fields that endpoints share, read from JSON of bounded size, and the SamplingParams they mean."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag, ValidationError
from pydantic_core import from_json

from specinfer.errors import RequestError
from specinfer.sampling_params import SamplingParams
from specinfer.serve.api_error import MOST_FAULTS, ApiError
from specinfer.serve.field_policy import FieldPolicy
from specinfer.structured_output import StructuredOutput, structured_output

if TYPE_CHECKING:
    from specinfer.serve.tools.tool import Function, ToolChoice

# A token of JSON is up to 200 bytes when it is read, and the worst of faults: so a body's values take a few
# times its bytes at most. Requests that mean something have longer ones.
_BYTES_OF_TOKEN: Final = 32
_ALWAYS_TOKENS: Final = 100_000  # whatever the limit of a body's bytes
_EARLY_TOKENS: Final = 4000  # in which the first fault is looked for where there are too many to tell apart
# A string, ended or not, or a mark between values; numbers and names have none beside the marks around them.
_TOKEN: Final = re.compile(rb'"[^"]*"?|[\[\]{},:]')
_ENDS: Final = {b"[": b"]", b"{": b"}"}

_Body = TypeVar("_Body", bound=BaseModel)
_Item = TypeVar("_Item")

_FORMS: Final = ("regex", "choice", "grammar")  # beside JSON


class _FirstFault(FailFast):
    """A list is given up at its first bad item: of millions, each would have a complaint in memory."""

    def __hash__(self) -> int:  # which unions ask for, and FailFast has none
        return hash(_FirstFault)


def _is_text(value: object) -> str:
    return "str" if isinstance(value, str) else "list"


Items = Annotated[list[_Item], _FirstFault()]
Ids = Items[int]
# Which of the two is meant is plain, so a fault is told of that one alone.
TextOrItems = Annotated[
    Annotated[str, Tag("str")] | Annotated[Items[_Item], Tag("list")], Discriminator(_is_text)
]


# Of one request: each stop string is looked for in every step, and each bad word in every law.
MOST_STOPS: Final = 64
MOST_BAD_WORDS: Final = 1024
_LONGEST_STOP: Final = 1024  # characters, of a bad word too
MOST_LOGPROBS: Final = 20  # of a token, as OpenAI and vLLM have it: each is an object in two processes


class Fields(BaseModel):
    """A JSON object of a request: exactly these fields, each of its own type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class OtherKind(Fields):
    """An object of a type that is not supported; it is refused for what it is, whatever else it has."""

    model_config = ConfigDict(extra="ignore")

    type: str


def by_type(tags: Mapping[str | None, str], other: str) -> Discriminator:
    """The tag of the model that an object is of, by its `type`; `other` where that is not among `tags`."""

    def tag(value: object) -> str:
        kind = value.get("type") if isinstance(value, Mapping) else None
        return tags.get(kind, other) if kind is None or isinstance(kind, str) else other

    return Discriminator(tag)


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


def parse(
    kind: type[_Body], body: bytes, most_bytes: int = 16 << 20, policy: FieldPolicy | None = None
) -> _Body:
    """A request's body, of which there may be `most_bytes`, under the policy of fields; raises ApiError.

    That is where it is not JSON, or not what the endpoint takes, or has so many values that much more memory
    than `most_bytes` would be needed for them.
    """
    policy = policy or FieldPolicy()
    most = max(_ALWAYS_TOKENS, most_bytes // _BYTES_OF_TOKEN)
    if has_more_tokens(body, most):
        raise _early_fault(kind, body, policy) or ApiError(
            f"the body has more than {most} strings, commas, colons and brackets; send fewer values",
            status=413,
        )
    given = _json(body)
    policy.apply(kind, given)
    try:
        return policy.read(kind, given)
    except ValidationError as error:
        early = _early_fault(kind, body, policy) if error.error_count() > MOST_FAULTS else None
        fault = early or ApiError.of_validation(error)
    raise fault  # here, where it does not keep all of the faults as its context


def _json(body: bytes) -> Any:
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None


def _early_fault(kind: type[_Body], body: bytes, policy: FieldPolicy) -> ApiError | None:
    """What is wrong at a body's beginning, found without the rest; None where nothing is."""
    part = beginning(body, _EARLY_TOKENS)
    if not part:
        return None
    try:
        given = _json(part)
        policy.apply(kind, given)
        policy.read(kind, given)
    except ApiError as error:
        return error
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            if fault["type"] != "missing":  # in the beginning alone, perhaps
                return ApiError.of_fault(fault)
    return None


def has_more_tokens(text: bytes, most: int) -> bool:
    """Whether a JSON text has more strings and marks than `most`; it may be no JSON at all."""
    if len(text) <= most:
        return False
    return next(islice(_TOKEN.finditer(_without_escapes(text)), most, None), None) is not None


def beginning(text: bytes, most: int) -> bytes:
    """A JSON text up to the last comma of its first `most` tokens, and an end for all that is open there.

    It is JSON where the text is, and b"" where there is no such comma.
    """
    ends: list[bytes] = []  # of what is open, the innermost last
    cut, missing = 0, b""
    for token in islice(_TOKEN.finditer(_without_escapes(text)), most):
        mark = token[0]
        if mark in _ENDS:
            ends.append(_ENDS[mark])
        elif mark in (b"]", b"}"):
            if not ends:
                break
            ends.pop()
        elif mark == b",":
            cut, missing = token.start(), b"".join(reversed(ends))
    return text[:cut] + missing


def _without_escapes(text: bytes) -> bytes:
    """The text with each quote that ends no string, and each backslash, replaced by as many other bytes."""
    return text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
