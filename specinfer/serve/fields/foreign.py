"""Fields of other servers' requests, and of OpenAI's that ask for nothing here: what each of them means.

Fields that an endpoint has itself are not looked up here, whatever stands in these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic_core import from_json

from specinfer.serve.http.api_error import ApiError, shown

Own = Set[str]  # the names of an endpoint's own fields
# By name: the values that ask for nothing, and what to do instead of others.
_Usual = Mapping[str, tuple[Sequence[Any], str]]


@dataclass(frozen=True, slots=True)
class Rules:
    """What is known of the foreign fields of one kind of object."""

    notes: Set[str] = frozenset()
    usual: _Usual = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)


# Taken with any value: how something is kept, paid, scheduled or told apart, and what matters only beside a
# field that is refused.
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
_SAMPLER: Final = "this sampler is not offered; use temperature, top_k, top_p or min_p, or drop it"
_PENALTY: Final = "this penalty is not offered; use frequency_penalty, presence_penalty or repetition_penalty"
_BEAMS: Final = "there is no beam search; set n and logprobs, and choose the answer you like best"
_REPORT: Final = "answers do not report that; drop it, and see logprobs, usage and metrics"
_TEXT_ALONE: Final = "only text is read and written here; drop it"
_OWN_PROCESSORS: Final = "use logit_bias, bad_words or allowed_token_ids"
_NO_ADAPTER: Final = "an adapter is asked for by its name as model; drop it"
_NO_BUDGET: Final = "reasoning has no limit of its own; use max_tokens"
_NO_PARTS: Final = "this server's requests have no such part; drop it"
_KEPT: Final = "conversations are not kept; send previous_response_id, or the messages"
# Taken with these values, which ask for what happens anyway; with others refused, with this advice.
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
    "penalize_nl": ((True,), "penalties are taken of all tokens, line breaks too; drop it"),
    "use_beam_search": ((False,), _BEAMS),
    "early_stopping": ((False,), _BEAMS),
    "num_beams": ((1,), _BEAMS),
    "length_penalty": ((1,), _BEAMS),
    "n_indent": ((0,), "lines are not held to an indentation; use regex or grammar"),
    "t_max_predict_ms": ((0, -1), "answers have no limit of time; use max_tokens"),
    "t_max_prompt_ms": ((0, -1), "prompts have no limit of time; drop it"),
    "repetition_detection": ((), "use frequency_penalty or repetition_penalty, or drop it"),
    "watermarking": ((False,), "texts are not marked; drop it"),
    "detokenize": ((True,), "answers are text; drop it"),
    "skip_special_tokens": ((True,), "special tokens are left out of texts; see logprobs for their names"),
    "truncate_prompt_tokens": ((), "prompts are not cut; shorten it yourself"),
    "truncation": (("disabled",), "nothing is left out of a context; shorten the input"),
    "context_management": (([],), "nothing is left out of a context; shorten the input"),
    "transforms": (([],), "prompts are not changed; drop it"),
    "chat_template": ((), "the model's own template is used; drop it, or ask /v1/completions"),
    "chat_template_kwargs": (
        ({},),
        "this endpoint takes no variables of a template; ask /v1/chat/completions",
    ),
    "documents": (([],), "put them into a message"),
    "safe_prompt": ((False,), "prompts are not changed; put it into a message"),
    "prompt_mode": ((), "prompts are not changed; put it into a message"),
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
    "priority": ((0,), "requests are served in the order they come; drop it"),
    "service_tier": (("auto", "default"), "all requests are served alike; drop it"),
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
    "include_reasoning": ((True,), "what the model thinks is reported; leave it out of what you show"),
    "separate_reasoning": ((True,), "reasoning comes as reasoning_content; drop it"),
    "stream_reasoning": ((True,), "reasoning is streamed as it comes; drop it"),
    "reasoning_format": (("auto", "deepseek"), "reasoning comes as reasoning_content; drop it"),
    "reasoning_in_content": ((False,), "reasoning comes as reasoning_content; drop it"),
    "reasoning_control": ((False,), "reasoning cannot be ended from outside; drop it"),
    **dict.fromkeys(
        ("reasoning_budget", "reasoning_budget_tokens", "thinking_token_budget"), ((-1,), _NO_BUDGET)
    ),
    "verbosity": (("medium",), "no model here knows of it; say in a message how long the answer is to be"),
    "functions": (([],), "send them as tools"),
    "function_call": (("none", "auto"), "send tools and tool_choice"),
    "tools": (([],), "this endpoint calls no tools; ask /v1/chat/completions"),
    "tool_choice": (("none", "auto"), "this endpoint calls no tools; ask /v1/chat/completions"),
    "parallel_tool_calls": ((True, False), "drop it"),
    "parse_tool_calls": ((True,), "calls are told from text; drop tools where you want them as text"),
    "max_tool_calls": ((), "it counts calls of built-in tools, and there are none; drop it"),
    "plugins": (([],), "there are no plugins; drop it"),
    "web_search_options": ((), "nothing is looked up; drop it"),
    "moderation": ((), "nothing is moderated; drop it"),
    "models": (([],), "one model is served, and no other takes its place; send model"),
    "access_programs": (({},), "there are no such programs; drop it"),
    "store": ((False,), "only /v1/responses keeps answers; drop it"),
    "background": ((False,), "answers are made while the client waits; drop it, or ask for a stream"),
    "background_options": (({},), "answers are made while the client waits; drop it"),
    **dict.fromkeys(("conversation", "previous_response", "previous_input_messages"), ((), _KEPT)),
    "enable_response_messages": ((False,), _REPORT),
    "grammar_lazy": ((False,), "a grammar holds the whole answer; use tools, or write the rest into it"),
    "grammar_triggers": (([],), "a grammar holds the whole answer; use tools, or write the rest into it"),
    "preserved_tokens": (([],), "special tokens are left out of texts; see logprobs for their names"),
    "echo": ((False,), "an answer does not repeat its conversation; ask /v1/completions"),
    "suffix": (("",), "no model here fills in the middle; give the text before it alone"),
    "continue_final_message": ((False,), "this endpoint has no messages; ask /v1/chat/completions"),
    "add_generation_prompt": ((True, False), "drop it"),
}
# The first of these names that the endpoint has is what is meant.
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
_WHOLE_MESSAGE: Final = "messages are whole; send continue_final_message for the last one to be gone on with"
# Of objects inside of these fields.
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
            "defer_loading": ((False,), "tools are told of at once; drop it"),
            "allowed_callers": ((["direct"],), "the model alone calls; drop it"),
        },
    ),
    "function": Rules(
        notes=frozenset(("cache_control",)),
        usual={"defer_loading": ((False,), "tools are told of at once; drop it")},
    ),
    "tool_calls": Rules(notes=frozenset(("cache_control", "provider_specific_fields", "extra_content"))),
    "reasoning": Rules(
        usual={
            "context": (("auto",), "templates decide what of earlier reasoning is read again; drop it"),
            "mode": (("standard",), "there is one way to reason; drop it"),
            "generate_summary": ((), "thoughts come as they are; drop it"),
        }
    ),
}


def put(body: dict[str, Any], name: str, value: Any, by: str) -> None:
    """Set the endpoint's own field as the field `by` means it; raises ApiError where both disagree."""
    if body.setdefault(name, value) != value:
        raise ApiError(f"{by} and {name} are given, and differ; give one of them", param=by)


def _put_inside(field: str, body: dict[str, Any], name: str, value: Any, by: str) -> None:
    """The same of an object that is one of the endpoint's fields."""
    inside = body.setdefault(field, {})
    if isinstance(inside, dict):  # anything else is refused when it is read
        put(inside, name, value, by)


def _put_form(form: Mapping[str, Any], body: dict[str, Any], own: Own, by: str) -> None:
    """Ask for a form of the text in the endpoint's own field; raises ApiError where that has no such form."""
    if "output_config" in own:
        if form["type"] != "json_schema":
            raise ApiError(f"{by} asks for any JSON object; give a schema in output_config.format", param=by)
        wanted = {"type": "json_schema", "schema": form["json_schema"]["schema"]}
        _put_inside("output_config", body, "format", wanted, by)
        return
    where, name = (body, "response_format") if "text" not in own else (body.setdefault("text", {}), "format")
    if not isinstance(where, dict):
        return  # it is refused when it is read
    if where.get(name) == {"type": "text"}:
        del where[name]
    put(where, name, form if where is body else {"type": form["type"], **form.get("json_schema", {})}, by)


def _schema(name: str, value: Any, body: dict[str, Any], own: Own) -> None:
    """A schema of the answer, as an object or as JSON text."""
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
    """vLLM's object of one form; for OpenRouter a flag that says nothing."""
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
    """Whether the model is to reason before it answers, or how much."""
    if isinstance(value, bool):
        _set_thinking(value, body, own, name)
    elif isinstance(value, str) and name == "think":  # Ollama's
        put(body, "reasoning_effort", value, name)
    elif value in ({"type": "enabled"}, {"type": "disabled"}):
        _set_thinking(value["type"] == "enabled", body, own, name)
    elif value not in ({"type": "auto"}, {"type": "adaptive"}):
        allowed = 'true or false, or {"type": "enabled"} or "disabled", without a budget'
        raise ApiError(f"{name} is {shown(value)}; allowed: {allowed}; use max_tokens", param=name)


def _set_thinking(thinks: bool, body: dict[str, Any], own: Own, by: str) -> None:
    if "chat_template_kwargs" in own:
        _put_inside("chat_template_kwargs", body, "enable_thinking", thinks, by)
    elif thinks:
        raise ApiError(
            f"{by} is true, and this endpoint has no chat template; ask /v1/chat/completions", param=by
        )


def _reasoning(name: str, value: Any, body: dict[str, Any], own: Own) -> None:
    """OpenRouter's object: whether, how much, and whether it is shown."""
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
    """How much is thought: at /v1/responses a part of `reasoning`, at /v1/messages of `output_config`."""
    if "output_config" in own:
        _put_inside("output_config", body, "effort", value, name)
    elif "reasoning" in own:
        _put_inside("reasoning", body, "effort", value, name)
    elif value != "none":
        raise ApiError(
            f"{name} is {shown(value)}, and this endpoint has no chat template; ask /v1/chat/completions",
            param=name,
        )


def _best_of(name: str, value: Any, body: Mapping[str, Any]) -> None:
    if isinstance(value, bool) or value != body.get("n", 1):
        raise ApiError(
            f"best_of is {shown(value)}; it is not offered beyond n: set n and logprobs, and choose the "
            "answer you like best",
            param=name,
        )


def _repeat_last_n(name: str, value: Any, body: Mapping[str, Any]) -> None:
    """How far back penalties look: here at the whole text."""
    if value != -1 and _penalized(body):
        raise ApiError(
            f"repeat_last_n is {shown(value)}; penalties look at the whole text here: send -1, or drop it",
            param=name,
        )


def _penalized(body: Mapping[str, Any]) -> bool:
    repeated = any(body.get(name, 1) != 1 for name in ("repeat_penalty", "repetition_penalty"))
    return repeated or bool(body.get("frequency_penalty") or body.get("presence_penalty"))


def _samplers(name: str, value: Any, body: Mapping[str, Any]) -> None:
    """The order of samplers: taken where it makes no difference from the one here."""
    filters = [
        one
        for one, usual in (("top_k", (0, -1)), ("top_p", (1,)), ("min_p", (0,)))
        if body.get(one, usual[0]) not in usual
    ]
    active = ["penalties"] if _penalized(body) else []
    # Which tokens are the k likeliest does not depend on the temperature; the other filters do.
    if body.get("temperature", 1) not in (0, 1):
        active += ["temperature", *filters] if filters != ["top_k"] else []
    active = active if "temperature" in active else active + filters
    given = value if isinstance(value, list) else []
    found = [one for one in given if one in active]
    if not isinstance(value, list) or found != active or "infill" in given:
        raise ApiError(
            f"samplers is {shown(value)}; this request needs them in the order "
            "penalties, temperature, top_k, top_p, min_p; send that, or drop it",
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
# Of what these ask for other fields decide whether it happens anyway; so they are looked at last.
CHECKED: Final[Mapping[str, Callable[[str, Any, Mapping[str, Any]], None]]] = {
    "best_of": _best_of,
    "repeat_last_n": _repeat_last_n,
    "samplers": _samplers,
}
