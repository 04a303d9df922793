"""Fields of other servers: translated to the fields of an endpoint, or refused (docs/reference.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

from pydantic_core import from_json

from specinfer.serve.http.api_error import ApiError, shown

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
    **dict.fromkeys(("reasoning_budget", "reasoning_budget_tokens"), ("thinking_token_budget",)),
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
    "reasoning_budget reasoning_budget_tokens thinking_token_budget": (-1,),
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


def translate(body: dict[str, Any], own: Own) -> None:
    """Rewrite a body in place to an endpoint's `own` fields; raises ApiError for an unsupported one."""
    _read_prefix(body)
    for name in [*body]:
        body[name] = _tidied(body[name], name, top=True)
        if body[name] is None:
            del body[name]
    if not body.keys() <= own:
        for name in [name for name in RENAMED if name in body and name not in own]:
            if target := next((one for one in RENAMED[name] if one in own), None):
                put(body, target, body.pop(name), name)
        if "response_format" in own:
            _read_forms(body)
        if "chat_template_kwargs" in own:
            _read_template_fields(body, own)
        for name in [*body]:
            if name in REFUSED and name not in own:
                _check_neutral(name, body.pop(name), REFUSED[name])
    _settle(body, own)


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


def _read_forms(body: dict[str, Any]) -> None:
    """Translate schemas of the answer, and vLLM's object with one form."""
    for name in SCHEMAS:
        if name in body:
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
        if not isinstance(enabled, bool | None):
            allowed = "true, false, an effort, or an object with enabled, effort or a budget"
            raise ApiError(f"{name} is {shown(value)}; allowed: {allowed}", param=name)
        for key in given.keys() & {"max_tokens", "budget_tokens"}:
            put(body, "thinking_token_budget", given[key], f"{name}.{key}")
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
