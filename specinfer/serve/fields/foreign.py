"""Tables of foreign fields: names of other servers, and fields that would change the text and are refused.

An endpoint's own fields take precedence over these tables. A field in neither is ignored (policy.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final

from pydantic_core import from_json

from specinfer.serve.http.api_error import ApiError, shown

Own = Set[str]  # the names of an endpoint's own fields

# Fields of OpenAI's and Anthropic's APIs that no answer here depends on; ignored without a log line.
NOTES: Final = frozenset(
    [
        *("cache_control", "client_metadata", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "verbosity"),
    ]
)
_SAMPLER: Final = "this sampler is not supported; use temperature, top_k, top_p or min_p, or remove it"
_PENALTY: Final = "this is not supported; use frequency_penalty, presence_penalty or repetition_penalty"
_BEAMS: Final = "beam search is not supported; set n and logprobs, and choose the best answer"
_PROCESSORS: Final = "use logit_bias, bad_words or allowed_token_ids"
_LENGTH: Final = "use max_tokens, stop, regex or grammar"
_WHOLE: Final = "the prompt is used as it is; shorten it yourself"
_TEMPLATE: Final = "the server uses the model's own template; write it in a message, or use /v1/completions"
_TEXT: Final = "this server reads and writes only text; remove it"
_ADAPTER: Final = "to select an adapter, give its name as model; remove it"
_BUDGET: Final = "there is no separate limit for reasoning; use max_tokens"
_REASONING: Final = "the reasoning is in reasoning_content; remove it"
_FORM: Final = "a grammar covers the whole answer; use tools, or extend the grammar"
_KEPT: Final = "conversations are not stored; send the messages, or previous_response_id to /v1/responses"
# Names -> (their values without effect, what to do about other values, which would change the text).
_REFUSED: Final[Mapping[str, tuple[Sequence[Any], str]]] = {
    "typical_p typ_p tfs_z": ((1,), _SAMPLER),
    "top_a mirostat mirostat_mode xtc_probability dynatemp_range epsilon_cutoff": ((0,), _SAMPLER),
    "eta_cutoff smoothing_factor penalty_alpha": ((0,), _SAMPLER),
    "top_n_sigma adaptive_target": ((-1, 0), _SAMPLER),
    "min_keep": ((0, 1), _SAMPLER),
    "dry_multiplier no_repeat_ngram_size": ((0,), _PENALTY),
    "encoder_repetition_penalty": ((1,), _PENALTY),
    "penalize_nl": ((True,), _PENALTY),
    "repetition_detection": ((), _PENALTY),
    "use_beam_search": ((False,), _BEAMS),
    "num_beams": ((1,), _BEAMS),
    "custom_logit_processor logits_processors": (([],), _PROCESSORS),
    "custom_params vllm_xargs": (({},), _PROCESSORS),
    "watermarking": ((False,), "texts are not marked; remove it"),
    "n_indent t_max_predict_ms": ((0, -1), _LENGTH),
    "stop_regex guided_whitespace_pattern": ((), _LENGTH),
    "skip_special_tokens": ((True,), "texts omit special tokens; see logprobs for their names"),
    "truncate_prompt_tokens": ((-1,), _WHOLE),
    "context_management": (([], {}), _WHOLE),
    "truncation": (("disabled", "auto"), _WHOLE),  # a prompt that is too long is refused
    "chat_template prompt_mode": ((), _TEMPLATE),
    "documents": (([],), "this endpoint has no chat template; use /v1/chat/completions"),
    "safe_prompt": ((False,), _TEMPLATE),
    "prompt_embeds audio": ((), _TEXT),
    "modalities": ((["text"],), _TEXT),
    "system instructions": ((), "write it as a message of the role system"),
    "options": (({},), "give its values as fields of the request"),
    "format text output_config output_format": ((), "use response_format"),
    "guided_json_object": ((False,), "use response_format"),
    "do_sample": ((True,), "for a greedy text set temperature to 0"),
    "lora": (([],), _ADAPTER),
    "lora_path": ((), _ADAPTER),
    "reasoning_budget reasoning_budget_tokens thinking_token_budget": ((-1,), _BUDGET),
    "separate_reasoning": ((True,), _REASONING),
    "reasoning_format": (("auto", "deepseek"), _REASONING),
    "functions": (([],), "send them as tools"),
    "function_call": (("none", "auto"), "send tools and tool_choice"),
    "tools": (([],), "this endpoint has no tool calls; use /v1/chat/completions"),
    "parse_tool_calls": ((True,), "tool calls are always parsed; remove tools to get them as text"),
    "grammar_lazy": ((False,), _FORM),
    "echo": ((False,), "a conversation is not echoed; use /v1/completions"),
    "suffix": (("",), "this endpoint does not fill in the middle; use /v1/completions"),
    "background": ((False,), "answers are made while the client waits; remove it, or set stream"),
    "conversation previous_response previous_response_id previous_input_messages": ((), _KEPT),
}
REFUSED: Final = {name: rule for names, rule in _REFUSED.items() for name in names.split()}
# Foreign name -> own names; the first one that the endpoint has is used.
RENAMED: Final[Mapping[str, Sequence[str]]] = {
    "repeat_penalty": ("repetition_penalty",),
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), ("max_tokens", "max_output_tokens")),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), ("max_output_tokens", "max_tokens")),
    "max_output_tokens": ("max_tokens",),
    "min_new_tokens": ("min_tokens",),
    "n_cmpl": ("n",),
    "random_seed": ("seed",),
    "guided_regex": ("regex",),
    "guided_choice": ("choice",),
    **dict.fromkeys(("guided_grammar", "ebnf"), ("grammar",)),
    "stop_sequences": ("stop",),
    "no_stop_trim": ("include_stop_str_in_output",),
}


def check_neutral(name: str, value: Any, neutral: Sequence[Any], advice: str) -> None:
    """Raise ApiError for a value other than the `neutral` ones, which have no effect."""
    if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
        return
    allowed = f"; allowed: {' or '.join(map(json.dumps, neutral))}" if neutral else ""
    raise ApiError(f"{name} is {shown(value)}{allowed}; {advice}", param=name)


def put(body: dict[str, Any], name: str, value: Any, by: str) -> None:
    """Set the endpoint's own field from the field `by`; raises ApiError if both are given and differ."""
    if body.setdefault(name, value) != value:
        raise ApiError(f"{by} and {name} are given, and differ; give one of them", param=by)


def _put_inside(field: str, body: dict[str, Any], name: str, value: Any, by: str) -> None:
    """Set a field inside the object `field` of the body, as `put` does."""
    inside = body.setdefault(field, {})
    if isinstance(inside, dict):  # validation refuses other types
        put(inside, name, value, by)


def _put_form(form: Mapping[str, Any], body: dict[str, Any], own: Own, by: str) -> None:
    """Set the endpoint's own field for the form of the text; raises ApiError if it has no such form."""
    if "output_config" in own:
        if form["type"] != "json_schema":
            raise ApiError(
                f"{by} requires a JSON object without a schema; give a schema in output_config.format",
                param=by,
            )
        schema = {"type": "json_schema", "schema": form["json_schema"]["schema"]}
        _put_inside("output_config", body, "format", schema, by)
        return
    where, name = (body, "response_format") if "text" not in own else (body.setdefault("text", {}), "format")
    if not isinstance(where, dict):
        return  # validation refuses it
    if where.get(name) == {"type": "text"}:
        del where[name]
    put(where, name, form if where is body else {"type": form["type"], **form.get("json_schema", {})}, by)


def _schema(name: str, value: Any, body: dict[str, Any], own: Own) -> None:
    """Translate a schema of the answer, given as an object or as JSON text."""
    schema = value
    if isinstance(value, str):
        try:
            schema = from_json(value, allow_inf_nan=False)
        except ValueError:
            schema = None
    if not isinstance(schema, dict):
        raise ApiError(f"{name} is {shown(value)}; allowed: a JSON schema, as an object", param=name)
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    _put_form(form, body, own, name)


_SWITCHES: Final = ("disable_any_whitespace", "disable_additional_properties")  # of structured_outputs


def _structured_outputs(name: str, value: Any, body: dict[str, Any], own: Own) -> None:
    """Translate vLLM's object with one form; a bool is OpenRouter's flag, which has no effect."""
    if isinstance(value, bool):
        return
    if not isinstance(value, dict):
        raise ApiError(f"{name} is {shown(value)}; allowed: an object with one form", param=name)
    for key, one in value.items():
        where = f"{name}.{key}"
        if one is None or (key, one) == ("json_object", False):
            continue
        if key == "json":
            _schema(where, one, body, own)
        elif key == "json_object":
            _put_form({"type": "json_object"}, body, own, where)
        elif key in ("regex", "choice", "grammar"):
            put(body, key, one, where)
        elif (key, one) == ("disable_any_whitespace", True):
            put(body, "json_whitespace", "none", where)
        elif key in ("backend", "disable_fallback") or (key in _SWITCHES and one is False):
            continue
        else:
            raise ApiError(
                f"{where[:100]} is {shown(one)}; allowed: json, json_object, regex, choice or grammar alone",
                param=where,
            )


def _think(name: str, value: Any, body: dict[str, Any], own: Own) -> None:
    """Translate a reasoning switch, or an effort."""
    if isinstance(value, bool):
        _set_thinking(value, body, name)
    elif isinstance(value, str) and name == "think":  # Ollama's
        put(body, "reasoning_effort", value, name)
    elif value in ({"type": "enabled"}, {"type": "disabled"}):
        _set_thinking(value["type"] == "enabled", body, name)
    elif value not in ({"type": "auto"}, {"type": "adaptive"}):
        allowed = 'true or false, or {"type": "enabled"} or "disabled", without a budget'
        raise ApiError(f"{name} is {shown(value)}; allowed: {allowed}; use max_tokens", param=name)


def _set_thinking(enabled: bool, body: dict[str, Any], by: str) -> None:
    _put_inside("chat_template_kwargs", body, "enable_thinking", enabled, by)


def _documents(name: str, value: Any, body: dict[str, Any], own: Own) -> None:
    """Hand documents to the chat template, which may show them; [] has no effect."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ApiError(f"{name} is {shown(value)}; allowed: objects, such as title and text", param=name)
    if value:
        _put_inside("chat_template_kwargs", body, name, value, name)


def _reasoning(name: str, value: Any, body: dict[str, Any], own: Own) -> None:
    """Translate `enabled` and `effort` of OpenRouter's object; its other fields shape the answer only."""
    if not isinstance(value, dict) or "max_tokens" in value:
        raise ApiError(
            f"{name} is {shown(value)}; allowed: an object with effort or enabled; use max_tokens",
            param=name,
        )
    if (effort := value.get("effort")) is not None:
        put(body, "reasoning_effort", effort, name)
    if isinstance(enabled := value.get("enabled"), bool):
        _set_thinking(enabled, body, name)


def _reasoning_effort(name: str, value: Any, body: dict[str, Any], own: Own) -> None:
    """Translate the effort: at /v1/responses into `reasoning`, at /v1/messages into `output_config`."""
    _put_inside("output_config" if "output_config" in own else "reasoning", body, "effort", value, name)


def _best_of(name: str, value: Any, body: Mapping[str, Any]) -> None:
    check_neutral(name, value, (body.get("n", 1),), _BEAMS)


def _repeat_last_n(name: str, value: Any, body: Mapping[str, Any]) -> None:
    if _penalized(body):
        check_neutral(name, value, (-1,), "penalties apply to the whole text; send -1, or remove it")


def _penalized(body: Mapping[str, Any]) -> bool:
    repeated = any(body.get(name, 1) != 1 for name in ("repeat_penalty", "repetition_penalty"))
    return repeated or bool(body.get("frequency_penalty") or body.get("presence_penalty"))


def _samplers(name: str, value: Any, body: Mapping[str, Any]) -> None:
    """Check the order of samplers: accepted if it gives the same distribution as the order here."""
    filters = [
        one
        for one, usual in (("top_k", (0, -1)), ("top_p", (1,)), ("min_p", (0,)))
        if body.get(one, usual[0]) not in usual
    ]
    active = ["penalties"] if _penalized(body) else []
    # The temperature does not change the k likeliest tokens; it changes the other filters.
    if body.get("temperature", 1) not in (0, 1):
        active += ["temperature", *filters] if filters != ["top_k"] else []
    active = active if "temperature" in active else active + filters
    given = value if isinstance(value, list) else []
    found = [one for one in given if one in active]
    if not isinstance(value, list) or found != active or "infill" in given:
        raise ApiError(
            f"samplers is {shown(value)}; this request requires the order "
            "penalties, temperature, top_k, top_p, min_p; send that, or remove it",
            param=name,
        )


_Translation = Callable[[str, Any, dict[str, Any], Own], None]
FORMS: Final[Mapping[str, _Translation]] = {
    "guided_json": _schema,
    "json_schema": _schema,
    "structured_outputs": _structured_outputs,
}
# For endpoints with a chat template.
VARIABLES: Final[Mapping[str, _Translation]] = {
    "think": _think,
    "thinking": _think,
    "enable_thinking": _think,
    "reasoning": _reasoning,
    "reasoning_effort": _reasoning_effort,
    "documents": _documents,
}
# These depend on the values of other fields, so they are checked last.
CHECKED: Final[Mapping[str, Callable[[str, Any, Mapping[str, Any]], None]]] = {
    "best_of": _best_of,
    "repeat_last_n": _repeat_last_n,
    "samplers": _samplers,
}
