"""Request bodies: JSON of bounded size, translated to the fields of an endpoint and validated.

The field policy applies to every body before validation (docs/reference.md):

1. `null` means absent everywhere, and 2.0 is the integer 2.
2. Names of other servers are translated, unless the endpoint has a field of that name.
3. A field that would change the text and is not supported is refused, with an alternative.
4. Other unknown fields are ignored, and logged once for each name, or refused.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cache
from itertools import islice
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Tag, ValidationError
from pydantic_core import from_json

from specinfer.serve.config import UnknownFields
from specinfer.serve.http.api_error import ApiError, cut, shown

_Body = TypeVar("_Body", bound=BaseModel)
_Item = TypeVar("_Item")
_LOG = logging.getLogger(__name__)

# Minimum of bytes a JSON token. A parsed token takes up to 200 bytes of memory, so the values of a body take
# a few times the limit of its bytes at most. Ordinary requests have longer tokens.
_BYTES_OF_TOKEN: Final = 32
_ALWAYS_TOKENS: Final = 100_000  # allowed with any limit of bytes
# A string, ended or not, or a punctuation character; numbers and names are not counted themselves.
_TOKEN: Final = re.compile(rb'"[^"]*"?|[\[\]{},:]')
_MAX_LINES: Final = 1000  # logged, once each; a client can send millions of names
_EXACT: Final = 2**53  # maximum integer up to which all integers are exact floats
# Fields with values that are passed on unchanged: schemas, and variables of a template.
_OPAQUE: Final = frozenset(
    [
        "body",  # a line of a batch: the endpoint applies the policy to it
        "metadata",
        *("schema", "parameters", "input_schema", "input_examples", "output_schema"),
        *("guided_json", "structured_outputs", "chat_template_kwargs", "documents"),
    ]
)

Own = Set[str]  # the names of an endpoint's own fields

# Foreign name -> own names; the first one that the endpoint has is used.
RENAMED: Final[Mapping[str, Sequence[str]]] = {
    "repeat_penalty": ("repetition_penalty",),
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), ("max_tokens", "max_output_tokens")),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), ("max_output_tokens", "max_tokens")),
    "max_output_tokens": ("max_tokens",),
    "min_new_tokens": ("min_tokens",),
    "n_cmpl": ("n",),
    "random_seed": ("seed",),
    "stop_sequences": ("stop",),
    "no_stop_trim": ("include_stop_str_in_output",),
    "guided_regex": ("regex",),
    "guided_choice": ("choice",),
    **dict.fromkeys(("guided_grammar", "ebnf"), ("grammar",)),
}
_NONE: Final[Sequence[Any]] = (0, "", [], {})  # also false
# Fields that would change the text -> the values that do not.
_UNSUPPORTED: Final[Mapping[str, Sequence[Any]]] = {
    # samplers and penalties
    "top_a mirostat mirostat_mode xtc_probability dynatemp_range epsilon_cutoff eta_cutoff": _NONE,
    "smoothing_factor penalty_alpha dry_multiplier no_repeat_ngram_size samplers watermarking": _NONE,
    "typical_p typ_p tfs_z encoder_repetition_penalty num_beams best_of": (1,),
    "top_n_sigma adaptive_target min_keep": (-1, 0),
    "penalize_nl do_sample": (True,),
    "use_beam_search custom_logit_processor logits_processors custom_params vllm_xargs": _NONE,
    # the length and the form of the text
    "n_indent t_max_predict_ms": (-1, 0),
    "repeat_last_n reasoning_budget reasoning_budget_tokens thinking_token_budget": (-1,),
    "repetition_detection stop_regex guided_whitespace_pattern guided_json_object grammar_lazy": _NONE,
    "format text output_config output_format": (),
    "skip_special_tokens parse_tool_calls separate_reasoning": (True,),
    "reasoning_format": ("auto", "deepseek"),
    # the prompt
    "truncate_prompt_tokens": (-1,),
    "truncation": ("disabled", "auto"),  # a prompt that is too long is refused
    "context_management documents echo suffix options functions tools lora": _NONE,
    "function_call": ("none", "auto"),
    "chat_template prompt_mode safe_prompt prompt_embeds audio lora_path system instructions": _NONE,
    "modalities": (["text"],),
    "conversation previous_response previous_response_id previous_input_messages background": _NONE,
}
REFUSED: Final = {name: values for names, values in _UNSUPPORTED.items() for name in names.split()}
THINKING: Final = ("enable_thinking", "think", "thinking", "reasoning")  # switches and efforts of reasoning
SCHEMAS: Final = ("guided_json", "json_schema")  # schemas of the answer


class _FirstFault(FailFast):
    """Stops validating a list at its first bad item; millions of errors would take too much memory."""

    def __hash__(self) -> int:  # unions need it, and FailFast has none
        return hash(_FirstFault)


def _is_text(value: object) -> str:
    return "str" if isinstance(value, str) else "list"


Items = Annotated[list[_Item], _FirstFault()]
Ids = Items[int]
# The type of the value selects one of the two, so an error concerns that one only.
TextOrItems = Annotated[
    Annotated[str, Tag("str")] | Annotated[Items[_Item], Tag("list")], Discriminator(_is_text)
]


class Fields(BaseModel):
    """A JSON object of a request; other fields and other types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class OtherKind(Fields):
    """An object of an unsupported type; the error names the type, and other fields are not checked."""

    model_config = ConfigDict(extra="ignore")

    type: str


def by_type(tags: Mapping[str | None, str], other: str) -> Discriminator:
    """Select the model of an object by its `type`; `other` if the type is not in `tags`."""

    def tag(value: object) -> str:
        kind = value.get("type") if isinstance(value, Mapping) else None
        return tags.get(kind, other) if kind is None or isinstance(kind, str) else other

    return Discriminator(tag)


def parse(
    kind: type[_Body], body: bytes, max_bytes: int = 16 << 20, policy: FieldPolicy | None = None
) -> _Body:
    """Read a request's body of at most `max_bytes` bytes under the field policy.

    Raises ApiError if it is not JSON, if the endpoint does not accept it, or if its values would take much
    more memory than `max_bytes`.
    """
    policy = policy or FieldPolicy()
    max_tokens = max(_ALWAYS_TOKENS, max_bytes // _BYTES_OF_TOKEN)
    if has_more_tokens(body, max_tokens):
        raise ApiError(
            f"the body has more than {max_tokens} strings, commas, colons and brackets; send fewer values",
            status=413,
        )
    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    policy.apply(kind, given)
    try:
        return policy.read(kind, given)
    except ValidationError as error:
        fault = ApiError.of_validation(error)
    raise fault  # outside the except block, so that it does not hold all errors as its context


def has_more_tokens(text: bytes, max_tokens: int) -> bool:
    """True if a text, valid JSON or not, has more than `max_tokens` strings and punctuation characters."""
    if len(text) <= max_tokens:
        return False
    plain = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")  # without escaped quotes
    return next(islice(_TOKEN.finditer(plain), max_tokens, None), None) is not None


class FieldPolicy:
    """Applies the policy; keeps the lines already logged. Belongs to one event loop."""

    def __init__(self, unknown: UnknownFields = "error", sampling: Mapping[str, Any] | None = None) -> None:
        """`sampling` holds the defaults of sampling fields, by name."""
        self._unknown = unknown
        self._sampling = dict(sampling or {})
        self._logged: set[str] = set()

    def apply(self, kind: type[BaseModel], body: Any) -> None:
        """Rewrite a body in place to the fields of `kind`; raises ApiError for an unsupported field."""
        if not isinstance(body, dict):
            return
        _read_prefix(body)
        for name in [*body]:
            body[name] = _tidied(body[name], name, top=True)
            if body[name] is None:
                del body[name]
        own = own_names(kind)
        for name in [name for name in RENAMED if name in body and name not in own]:
            if target := next((one for one in RENAMED[name] if one in own), None):
                put(body, target, body.pop(name), name)
        if "response_format" in own:
            _read_forms(body)
        if "chat_template_kwargs" in own:
            _read_template_fields(body, own)
        for name in [name for name in body if name in REFUSED and name not in own]:
            value = body.pop(name)
            # Penalties look at the whole text; their range has no effect without them.
            if name != "repeat_last_n" or _penalized({**self._sampling, **body}):
                _check_neutral(name, value, REFUSED[name])
        _settle(body, own)

    def read(self, kind: type[_Body], body: Any) -> _Body:
        """Validate a body after `apply`; raises pydantic's ValidationError."""
        if self._unknown == "error":
            return kind.model_validate(body)
        read = kind.model_validate(body, extra="allow")
        if not (unknown := [*_unknown(read)]):
            return read
        for name in unknown:
            self.log_once(f"the unknown field {cut(name)!r} is ignored")
        return kind.model_validate(body, extra="ignore")

    def log_once(self, line: str) -> None:
        """Log a line about requests, unless it has been logged before."""
        if line in self._logged or len(self._logged) >= _MAX_LINES:
            return
        self._logged.add(line)
        if len(self._logged) == _MAX_LINES:
            line = f"{_MAX_LINES - 1} lines about unknown fields were logged; more are left out"
        _LOG.warning("%s", line)


@cache
def own_names(kind: type[BaseModel]) -> Own:
    """The names of an endpoint's own fields."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


def _read_prefix(body: dict[str, Any]) -> None:
    """Set `continue_final_message` if the last message has `prefix` or `partial`."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return
    for name in ("prefix", "partial"):
        if messages[-1].get(name) is True:
            del messages[-1][name]
            put(body, "continue_final_message", True, f"messages[{len(messages) - 1}].{name}")


def _tidied(value: Any, name: str, *, top: bool = False) -> Any:
    """Return the value of a field without nulls in its objects, and with integers for whole numbers.

    Objects and lists are changed in place.
    """
    if type(value) is float:
        return int(value) if value.is_integer() and abs(value) <= _EXACT else value
    # An input that is an object holds the arguments of an earlier call.
    if name in _OPAQUE or (top and name == "json_schema") or (name == "input" and type(value) is dict):
        return value
    if type(value) is dict:
        for key, one in [*value.items()]:
            if one is None:
                del value[key]
            elif name == "messages" and key == "reasoning":
                value.setdefault("reasoning_content", value.pop(key))
            else:
                value[key] = _tidied(one, key)
    elif type(value) is list:
        for index, one in enumerate(value):
            if type(one) in (float, list, dict):
                value[index] = _tidied(one, name)
    return value


def _settle(body: dict[str, Any], own: Own) -> None:
    """Rewrite values of other servers in the endpoint's own fields."""
    for name in ("top_k", "seed", "max_tokens", "max_completion_tokens", "max_output_tokens"):
        # -1 means no limit, or a random seed. If max_tokens has a default or is required, -1 is not the same
        # as an absent field.
        whole = "messages" in own and "output_config" not in own
        if body.get(name) == -1 and (name != "max_tokens" or whole):
            del body[name]
    for name in ("stop", "stop_sequences"):
        if isinstance(stop := body.get(name), list):
            body[name] = [one for one in stop if one not in (None, "")]
    for name in ("stop", "stop_sequences", "grammar", "suffix"):
        if body.get(name) in ("", []):
            del body[name]
    if "messages" not in own and body.get("logprobs") is False:
        del body["logprobs"]
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") in ("json_object", "json_schema"):
        if isinstance(form.get("schema"), dict):  # llama.cpp's shape
            schema = {"name": "answer", "schema": form["schema"]}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif isinstance(form.get("json_schema"), dict):
            form["json_schema"].setdefault("name", "answer")


def _unknown(value: Any) -> Iterator[str]:
    """Return the names of unknown fields of an object and the objects inside it."""
    if isinstance(value, BaseModel):
        if type(value).model_config.get("extra") == "ignore":
            return  # a tool that is left out
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name))
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for one in value:
            yield from _unknown(one)


def put(body: dict[str, Any], name: str, value: Any, by: str) -> None:
    """Set the endpoint's own field from the field `by`; raises ApiError if both are given and differ."""
    if body.setdefault(name, value) != value:
        raise ApiError(f"{by} and {name} are given, and differ; give one of them", param=by)


def _put_inside(field: str, body: dict[str, Any], name: str, value: Any, by: str) -> None:
    """Set a field inside the object `field` of the body, as `put` does."""
    inside = body.setdefault(field, {})
    if isinstance(inside, dict):  # validation refuses other types
        put(inside, name, value, by)


def _check_neutral(name: str, value: Any, neutral: Sequence[Any]) -> None:
    """Raise ApiError for a value that would change the text."""
    if value not in neutral:
        allowed = " or ".join(map(json.dumps, neutral if neutral is not _NONE else _NONE[:1]))
        raise ApiError(
            f"{name} is {shown(value)}, and this endpoint does not support it"
            f"{f'; allowed: {allowed}' if allowed else ''}; remove it (docs/reference.md has alternatives)",
            param=name,
        )


def _penalized(body: Mapping[str, Any]) -> bool:
    return body.get("repetition_penalty", 1) != 1 or any(
        body.get(name) for name in ("frequency_penalty", "presence_penalty")
    )


def _read_forms(body: dict[str, Any]) -> None:
    """Translate schemas of the answer, and vLLM's object with one form."""
    for name in [name for name in SCHEMAS if name in body]:
        _put_schema(body, body.pop(name), name)
    form = body.pop("structured_outputs", None)
    if form is None or isinstance(form, bool):  # OpenRouter's flag has no effect
        return
    if not isinstance(form, dict):
        raise ApiError(
            f"structured_outputs is {shown(form)}; allowed: an object with one form",
            param="structured_outputs",
        )
    for key, value in form.items():
        where = f"structured_outputs.{key}"
        if key in ("backend", "disable_fallback") or value is None or value is False:
            continue
        if key == "json":
            _put_schema(body, value, where)
        elif key == "json_object":
            put(body, "response_format", {"type": "json_object"}, where)
        elif key == "disable_any_whitespace":
            put(body, "json_whitespace", "none", where)
        elif key in ("regex", "choice", "grammar"):
            put(body, key, value, where)
        else:
            raise ApiError(
                f"{where[:100]} is {shown(value)}; allowed: json, json_object, regex, choice or grammar",
                param=where,
            )


def _put_schema(body: dict[str, Any], schema: Any, by: str) -> None:
    """Set `response_format` from a schema, given as an object or as JSON text."""
    if isinstance(schema, str):
        try:
            schema = from_json(schema, allow_inf_nan=False)
        except ValueError:
            schema = None
    if not isinstance(schema, dict):
        raise ApiError(f"{by} has no JSON schema; give it as an object", param=by)
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    if body.get("response_format") == {"type": "text"}:
        del body["response_format"]
    put(body, "response_format", form, by)


def _read_template_fields(body: dict[str, Any], own: Own) -> None:
    """Translate fields for the chat template: documents, and switches and efforts of reasoning."""
    if isinstance(body.get("documents"), list) and body["documents"]:  # others are unsupported
        _put_inside("chat_template_kwargs", body, "documents", body.pop("documents"), "documents")
    for name in [name for name in THINKING if name in body and name not in own]:
        value = body.pop(name)
        given = (
            value if isinstance(value, dict) else {"effort" if isinstance(value, str) else "enabled": value}
        )
        enabled, effort = given.get("enabled"), given.get("effort")
        for kind, switch in (("enabled", True), ("disabled", False)):
            enabled = switch if given.get("type") == kind else enabled
        if given.keys() & {"max_tokens", "budget_tokens"} or not isinstance(enabled, bool | None):
            allowed = "true, false, an effort, or an object with enabled or effort, without a budget"
            raise ApiError(f"{name} is {shown(value)}; allowed: {allowed}; use max_tokens", param=name)
        if enabled is not None:
            _put_inside("chat_template_kwargs", body, "enable_thinking", enabled, name)
        if effort is not None:
            _put_effort(body, effort, own, name)
    if "reasoning_effort" in body and "reasoning_effort" not in own:
        _put_effort(body, body.pop("reasoning_effort"), own, "reasoning_effort")


def _put_effort(body: dict[str, Any], effort: Any, own: Own, by: str) -> None:
    """Set the endpoint's field for the effort."""
    if "reasoning_effort" in own:
        put(body, "reasoning_effort", effort, by)
    else:
        _put_inside("output_config" if "output_config" in own else "reasoning", body, "effort", effort, by)
