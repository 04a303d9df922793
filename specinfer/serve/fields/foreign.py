"""Tables of foreign fields: fields of other servers, and fields of OpenAI's API without effect here.

An endpoint's own fields take precedence over these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic_core import from_json

from specinfer.serve.http.api_error import ApiError, shown

Own = Set[str]  # the names of an endpoint's own fields
# Field name -> (values without effect, advice for other values).
_Usual = Mapping[str, tuple[Sequence[Any], str]]


@dataclass(frozen=True, slots=True)
class Rules:
    """Foreign fields of one kind of object."""

    notes: Set[str] = frozenset()
    usual: _Usual = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)


# Accepted with any value: caching, billing, scheduling and identification, and fields that only matter with a
# refused field.
NOTES: Final = frozenset(
    [
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"),
        *("cache_control", "provider", "route", "usage", "request_id", "rid", "session_id"),
        *("keep_alive", "ttl", "draft_model", "cache_prompt", "id_slot", "slot_id", "n_keep", "n_discard"),
        *("n_cache_reuse", "sse_ping_interval", "stream_interval", "backend_sampling"),
        *("guided_decoding_backend", "return_mm_kwargs", "truncation_side", "spaces_between_special_tokens"),
        *("mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent", "adaptive_decay"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    ]
)
_SAMPLER: Final = "this sampler is not supported; use temperature, top_k, top_p or min_p, or remove it"
_PENALTY: Final = (
    "this penalty is not supported; use frequency_penalty, presence_penalty or repetition_penalty"
)
_BEAMS: Final = "beam search is not supported; set n and logprobs, and choose the best answer"
_REPORT: Final = "answers do not contain that; remove it, and see logprobs, usage and metrics"
_TEXT_ALONE: Final = "this server supports only text; remove it"
_OWN_PROCESSORS: Final = "use logit_bias, bad_words or allowed_token_ids"
_NO_ADAPTER: Final = "to select an adapter, give its name as model; remove it"
_NO_BUDGET: Final = "there is no separate limit for reasoning; use max_tokens"
_NO_PARTS: Final = "this server does not have that feature; remove it"
_KEPT: Final = "conversations are not stored; send previous_response_id, or the messages"
# Accepted with these values, which are the behaviour here; other values are refused with this advice.
USUAL: Final[_Usual] = {
    **dict.fromkeys(("typical_p", "typ_p", "tfs_z"), ((1,), _SAMPLER)),
    **dict.fromkeys(("top_a", "mirostat", "mirostat_mode", "xtc_probability"), ((0,), _SAMPLER)),
    **dict.fromkeys(("dynatemp_range", "epsilon_cutoff", "eta_cutoff"), ((0,), _SAMPLER)),
    **dict.fromkeys(("smoothing_factor", "penalty_alpha"), ((0,), _SAMPLER)),
    "top_n_sigma": ((-1, 0), _SAMPLER),
    "adaptive_target": ((-1,), _SAMPLER),
    "min_keep": ((0, 1), _SAMPLER),
    "dry_multiplier": ((0,), _PENALTY),
    "no_repeat_ngram_size": ((0,), _PENALTY),
    "encoder_repetition_penalty": ((1,), _PENALTY),
    "penalize_nl": ((True,), "penalties apply to all tokens, line breaks too; remove it"),
    "use_beam_search": ((False,), _BEAMS),
    "early_stopping": ((False,), _BEAMS),
    "num_beams": ((1,), _BEAMS),
    "length_penalty": ((1,), _BEAMS),
    "n_indent": ((0,), "this endpoint does not check indentation; use regex or grammar"),
    "t_max_predict_ms": ((0, -1), "answers have no time limit; use max_tokens"),
    "t_max_prompt_ms": ((0, -1), "prompts have no time limit; remove it"),
    "repetition_detection": ((), "use frequency_penalty or repetition_penalty, or remove it"),
    "watermarking": ((False,), "watermarks are not supported; remove it"),
    "detokenize": ((True,), "answers are always text; remove it"),
    "skip_special_tokens": ((True,), "texts omit special tokens; see logprobs for their names"),
    "truncate_prompt_tokens": ((), "prompts are not truncated; shorten the prompt"),
    "truncation": (("disabled",), "contexts are not truncated; shorten the input"),
    "context_management": (([],), "contexts are not truncated; shorten the input"),
    "transforms": (([],), "prompts are not changed; remove it"),
    "chat_template": ((), "the server uses the model's own template; remove it, or use /v1/completions"),
    "chat_template_kwargs": (({},), "this endpoint has no chat template; use /v1/chat/completions"),
    "documents": (([],), "write them in a message"),
    "safe_prompt": ((False,), "prompts are not changed; write it in a message"),
    "prompt_mode": ((), "prompts are not changed; write it in a message"),
    "prompt_embeds": ((), _TEXT_ALONE),
    "mm_processor_kwargs": (({},), _TEXT_ALONE),
    "media_io_kwargs": (({},), _TEXT_ALONE),
    "audio": ((), _TEXT_ALONE),
    "image": (({},), _TEXT_ALONE),
    "image_config": (({},), _TEXT_ALONE),
    "modalities": ((["text"],), _TEXT_ALONE),
    "kv_transfer_params": (({},), _NO_PARTS),
    "ec_transfer_params": (({},), _NO_PARTS),
    "vllm_xargs": (({},), _NO_PARTS),
    **dict.fromkeys(("custom_logit_processor", "logits_processors"), ((), _OWN_PROCESSORS)),
    "guided_whitespace_pattern": ((), "use regex or grammar"),
    "custom_params": (({},), _NO_PARTS),
    "lora": (([],), _NO_ADAPTER),
    "lora_path": ((), _NO_ADAPTER),
    "stop_regex": ((), "use stop, or regex for the whole answer"),
    "priority": ((0,), "requests are served in order of arrival; remove it"),
    "service_tier": (("auto", "default"), "there is one service tier; remove it"),
    "logprob_token_ids": (([],), "use logprobs or top_logprobs"),
    "n_probs": ((0,), "use logprobs or top_logprobs"),
    "post_sampling_probs": ((False,), "use logprobs_mode: processed"),
    "routed_experts_prompt_start": ((0,), _REPORT),
    "response_fields": (([],), _REPORT),
    **dict.fromkeys(("return_tokens_as_token_ids", "return_token_ids"), ((False,), _REPORT)),
    **dict.fromkeys(("return_prompt_text", "return_token_offsets"), ((False,), _REPORT)),
    **dict.fromkeys(("return_tokens", "return_progress", "timings_per_token"), ((False,), _REPORT)),
    "return_hidden_states": ((False,), _REPORT),
    "debug": (({},), _REPORT),
    "include_reasoning": ((True,), "answers always contain the reasoning; hide it in the client"),
    "separate_reasoning": ((True,), "the reasoning is in reasoning_content; remove it"),
    "stream_reasoning": ((True,), "reasoning is always streamed; remove it"),
    "reasoning_format": (("auto", "deepseek"), "the reasoning is in reasoning_content; remove it"),
    "reasoning_in_content": ((False,), "the reasoning is in reasoning_content; remove it"),
    "reasoning_control": ((False,), "a request cannot end the reasoning; remove it"),
    **dict.fromkeys(
        ("reasoning_budget", "reasoning_budget_tokens", "thinking_token_budget"), ((-1,), _NO_BUDGET)
    ),
    "verbosity": (
        ("medium",),
        "models here have no verbosity setting; give the length of the answer in a message",
    ),
    "functions": (([],), "send them as tools"),
    "function_call": (("none", "auto"), "send tools and tool_choice"),
    "tools": (([],), "this endpoint has no tool calls; use /v1/chat/completions"),
    "tool_choice": (("none", "auto"), "this endpoint has no tool calls; use /v1/chat/completions"),
    "parallel_tool_calls": ((True, False), "remove it"),
    "parse_tool_calls": ((True,), "tool calls are always parsed; remove tools to get them as text"),
    "max_tool_calls": ((), "it counts calls of built-in tools, and there are none; remove it"),
    "plugins": (([],), "plugins are not supported; remove it"),
    "web_search_options": ((), "web search is not supported; remove it"),
    "moderation": ((), "moderation is not supported; remove it"),
    "models": (([],), "there are no fallback models; send model"),
    "access_programs": (({},), "access programs are not supported; remove it"),
    "store": ((False,), "only /v1/responses stores answers; remove it"),
    "background": ((False,), "background answers are not supported; remove it, or set stream"),
    "background_options": (({},), "background answers are not supported; remove it"),
    **dict.fromkeys(("conversation", "previous_response", "previous_input_messages"), ((), _KEPT)),
    "enable_response_messages": ((False,), _REPORT),
    "grammar_lazy": ((False,), "a grammar covers the whole answer; use tools, or extend the grammar"),
    "grammar_triggers": (([],), "a grammar covers the whole answer; use tools, or extend the grammar"),
    "preserved_tokens": (([],), "texts omit special tokens; see logprobs for their names"),
    "echo": ((False,), "a conversation is not echoed; use /v1/completions"),
    "suffix": (("",), "this endpoint does not fill in the middle; use /v1/completions"),
    "continue_final_message": ((False,), "this endpoint has no messages; use /v1/chat/completions"),
    "add_generation_prompt": ((True, False), "remove it"),
}
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
    "no_stop_trim": ("include_stop_str_in_output",),
}
_OF_PARTS: Final = Rules(
    notes=frozenset(
        [
            *("cache_control", "prompt_cache_breakpoint", "citations", "annotations", "logprobs"),
            "provider_specific_fields",
        ]
    )
)
_WHOLE_MESSAGE: Final = "messages are complete; send continue_final_message to continue the last one"
# Rules for the objects inside these fields.
INSIDE: Final[Mapping[str, Rules]] = {
    "messages": Rules(
        notes=frozenset(
            [
                *("cache_control", "reasoning_details", "thinking_blocks", "provider_specific_fields"),
                *("parsed", "logprobs", "index", "id", "status"),
            ]
        ),
        usual=dict.fromkeys(("prefix", "partial"), ((False,), _WHOLE_MESSAGE)),
        renamed={"reasoning": "reasoning_content"},
    ),
    "input": Rules(notes=frozenset(("cache_control",))),
    "content": _OF_PARTS,
    "output": _OF_PARTS,
    "tools": Rules(
        notes=frozenset(("cache_control", "output_schema")),
        usual={
            "defer_loading": ((False,), "all tools are in the prompt; remove it"),
            "allowed_callers": ((["direct"],), "only the model calls tools; remove it"),
        },
    ),
    "function": Rules(
        notes=frozenset(("cache_control",)),
        usual={"defer_loading": ((False,), "all tools are in the prompt; remove it")},
    ),
    "tool_calls": Rules(notes=frozenset(("cache_control", "provider_specific_fields", "extra_content"))),
    "reasoning": Rules(
        usual={
            "context": (("auto",), "the chat template selects the earlier reasoning; remove it"),
            "mode": (("standard",), "there is one mode of reasoning; remove it"),
            "generate_summary": ((), "the reasoning is not summarized; remove it"),
        }
    ),
}


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
        _set_thinking(value, body, own, name)
    elif isinstance(value, str) and name == "think":  # Ollama's
        put(body, "reasoning_effort", value, name)
    elif value in ({"type": "enabled"}, {"type": "disabled"}):
        _set_thinking(value["type"] == "enabled", body, own, name)
    elif value not in ({"type": "auto"}, {"type": "adaptive"}):
        allowed = 'true or false, or {"type": "enabled"} or "disabled", without a budget'
        raise ApiError(f"{name} is {shown(value)}; allowed: {allowed}; use max_tokens", param=name)


def _set_thinking(enabled: bool, body: dict[str, Any], own: Own, by: str) -> None:
    if "chat_template_kwargs" in own:
        _put_inside("chat_template_kwargs", body, "enable_thinking", enabled, by)
    elif enabled:
        raise ApiError(
            f"{by} is true, and this endpoint has no chat template; use /v1/chat/completions", param=by
        )


def _reasoning(name: str, value: Any, body: dict[str, Any], own: Own) -> None:
    """Translate OpenRouter's object: `enabled`, `effort` and `exclude`."""
    left = dict(value) if isinstance(value, dict) else {"": value}
    if (effort := left.pop("effort", None)) is not None:
        put(body, "reasoning_effort", effort, name)
    if isinstance(enabled := left.pop("enabled", None), bool):
        _set_thinking(enabled, body, own, name)
    if left.pop("exclude", False) is not False or left:
        raise ApiError(
            f"{name} is {shown(value)}; allowed: an object with effort or enabled; use max_tokens",
            param=name,
        )


def _reasoning_effort(name: str, value: Any, body: dict[str, Any], own: Own) -> None:
    """Translate the effort: at /v1/responses into `reasoning`, at /v1/messages into `output_config`."""
    if "output_config" in own:
        _put_inside("output_config", body, "effort", value, name)
    elif "reasoning" in own:
        _put_inside("reasoning", body, "effort", value, name)
    elif value != "none":
        raise ApiError(
            f"{name} is {shown(value)}, and this endpoint has no chat template; use /v1/chat/completions",
            param=name,
        )


def _best_of(name: str, value: Any, body: Mapping[str, Any]) -> None:
    if isinstance(value, bool) or value != body.get("n", 1):
        raise ApiError(
            f"best_of is {shown(value)}; values above n are not supported; set n and logprobs, and choose "
            "the best answer",
            param=name,
        )


def _repeat_last_n(name: str, value: Any, body: Mapping[str, Any]) -> None:
    """Check the window of penalties, which is the whole text here."""
    if value != -1 and _penalized(body):
        raise ApiError(
            f"repeat_last_n is {shown(value)}; penalties apply to the whole text; send -1, or remove it",
            param=name,
        )


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
TRANSLATED: Final[Mapping[str, _Translation]] = {
    "guided_json": _schema,
    "json_schema": _schema,
    "structured_outputs": _structured_outputs,
    "think": _think,
    "thinking": _think,
    "enable_thinking": _think,
    "reasoning": _reasoning,
    "reasoning_effort": _reasoning_effort,
}
# These depend on the values of other fields, so they are checked last.
CHECKED: Final[Mapping[str, Callable[[str, Any, Mapping[str, Any]], None]]] = {
    "best_of": _best_of,
    "repeat_last_n": _repeat_last_n,
    "samplers": _samplers,
}
