"""Every option of an engine and of the server, as flags and as keys of a YAML file.

Flags are made of the fields of the config classes, so none can be forgotten; what each is for stands here.
A flag that is not given is None, and so leaves the file's key, or the default.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from specinfer.cli.options import DEFAULT_MODEL, parse_size
from specinfer.config import (
    GONE_OPTIONS,
    OLD_OPTIONS,
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
    SpeculationConfig,
    new_names,
)
from specinfer.errors import ConfigError
from specinfer.serve.config import ServeConfig

_Command = TypeVar("_Command", bound=Callable[..., Any])
_PARTS: Final = (SpeculationConfig, CacheConfig, SchedulerConfig)
_SIZES: Final = ("kv_cache_memory", "lookup_memory", "max_body", "max_bodies_memory", "log_traffic_size")
_STEP_TOKENS: Final = (
    128  # a step of more keeps whoever comes meanwhile waiting; of fewer reads prompts slowly
)
_LISTS: Final = (  # of the server's options
    *("served_model_name", "api_key", "cors_origin", "allowed_host", "trusted_proxy"),
)
_OF_BATCHES: Final = (  # options of the server that do not concern connections
    *("served_model_name", "max_n", "max_prompt_tokens", "max_body", "call_format", "engine_timeout"),
    *("unknown_fields", "special_tokens_in_messages", "log_traffic", "log_traffic_size", "log_level"),
    *("log_format", "otlp_endpoint"),
)
_FLAGS: Final = {"drafts": "draft"}  # one is given at a time

PURPOSES: Final = {
    "model": "The target: a folder, a GGUF file, a hub id (org/name) or a catalogue name.",
    "dtype": "Of weights that are not quantized.",
    "device": "auto, cpu, cuda or cuda:N.",
    "quantization": "How matrices are kept, on a CPU.",
    "kernels": "auto: native ones on a CPU where they can be had.",
    "chat_template": "A file with a chat template in place of the model's own.",
    "generation_config": "auto: sample as the model recommends where a request does not say; none: do not.",
    "threads": "That compute on a CPU; default: its cores.",
    "drafts": "A draft model; repeatable.",
    "draft_quantization": "As --quantization, of draft models.",
    "draft_vocabulary": "Cut a draft's output layer to N common tokens, or to the token ids in a file.",
    "draft_tokens": "What drafts of another vocabulary guess: shared tokens, text, or auto.",
    "lookup": "Look guesses up in the text and in earlier answers.",
    "lookup_min": "Tokens that must match, at least.",
    "lookup_depth": "Tokens of a guess.",
    "lookup_nodes": "Of a guessed tree, the root included.",
    "lookup_memory": "For earlier answers; 0 keeps none.",
    "prediction_depth": "Tokens guessed at once from a request's prediction.",
    "prediction_branches": "Ways to go on that are guessed after a difference.",
    "forced_depth": "Tokens guessed at once where a grammar leaves no choice.",
    "expansion": "Children of each frontier node of a draft's tree, level by level: K1,K2,...; or learned: "
    "where guesses are likely, the default where trees are sized by cost.",
    "max_nodes": "Of one request's tree in one step, the root included.",
    "tree_size": "cost: of these trees the part that is fastest here; fixed: all of them.",
    "clock": "measured: costs follow what steps take; curve: as measured at first, to repeat texts of mss.",
    "verifier": "Which rule accepts guesses.",
    "draw": "How drafts draw: coupled or top_k; with mss without_replacement, iid or top_k.",
    "block_size": "Cache positions of a block.",
    "kv_cache_memory": "For all KV caches, like 2GB.",
    "prefix_reuse": "Whether requests that begin alike share blocks.",
    "max_batch_size": "Requests that run in one step.",
    "max_step_tokens": "Rows of one pass, of prompts and trees together; for a server 128.",
    "max_context": "Prompt and output tokens at most.",
    "host": "Address to listen on; only this machine reaches the default.",
    "port": "Port to listen on; 0 picks a free one.",
    "root_path": "Under which a reverse proxy shows the server.",
    "served_model_name": "What requests may call the model; repeatable.",
    "api_key": "Ask everybody for this key, or another one given; repeatable. Also: SPECINFER_API_KEY.",
    "api_key_file": "More keys, a line each.",
    "cors_origin": "Let pages of this origin call; repeatable.",
    "allowed_host": "Answer where asked for by this name, a proxy's perhaps; repeatable; * for any.",
    "trusted_proxy": "A proxy's address or network, whose X-Forwarded-For is logged; repeatable; * for any.",
    "page": "Show a page to chat on at /.",
    "max_waiting": "Completions that may wait for the engine; more get 429.",
    "max_n": "Completions of one prompt, and prompts of one request.",
    "max_prompt_tokens": "Of one prompt; default: what the context leaves.",
    "max_body": "Bytes of one request, like 16MB.",
    "max_bodies_memory": "Bytes of all unanswered requests; more get 503. Default: twice --max-body.",
    "max_connections": "At once; more get 503.",
    "idle_timeout": "Seconds that a connection may say nothing.",
    "max_wait": "Seconds that a request may wait for its first step; more get 503. 0: no limit.",
    "ping_interval": "Seconds after which a quiet stream gets a comment, so that no proxy ends it; 0: never.",
    "engine_timeout": "Seconds after which an engine that gives no sign of life is started again; 0: never.",
    "grace": "Seconds that answers in progress get after SIGTERM.",
    "unknown_fields": "Of requests: error refuses them, ignore takes them out and says so once a name.",
    "stored_responses": "Answers that previous_response_id may name.",
    "special_tokens_in_messages": "Names of special tokens in what users and tools say: text, or the tokens.",
    "call_format": "How the model writes tool calls; auto: as its chat template says.",
    "log_traffic": "A file that gets prompts and answers, to tune drafts on.",
    "log_traffic_size": "After which that file is rotated.",
    "log_level": "From which on the server logs.",
    "log_format": "json: an object a line.",
    "otlp_endpoint": "Where OpenTelemetry spans go.",
}


def every_option(command: _Command) -> _Command:
    """A flag for each option of the engine and of the server, the model excepted."""
    return _options(command, [*_engine_fields(), *_own_fields(ServeConfig)])


def batch_options(command: _Command) -> _Command:
    """A flag for each option of the engine, the model excepted, and for the server options of run-batch."""
    return _options(
        command, [*_engine_fields(), *(f for f in _own_fields(ServeConfig) if f[0] in _OF_BATCHES)]
    )


def _options(command: _Command, found: list[tuple[str, Any, Any]]) -> _Command:
    for name, hint, default in reversed(found):
        if name != "model":
            command = _flag(name, hint, default)(command)
    return command


@contextmanager
def needs_serving() -> Iterator[None]:
    """A block that imports the server's dependencies; raises ConfigError if they are not installed."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed; this command needs it: pip install 'specinfer[serve]'"
        ) from None


def configs(flags: Mapping[str, Any], file: Path | None) -> tuple[dict[str, Any], ServeConfig]:
    """The engine's options and the server's config: flags, then the file's keys, then defaults.

    Raises ConfigError.
    """
    given = {} if file is None else read_options(file)
    given |= {name: value for name, value in flags.items() if value not in (None, ())}
    if (vllm := given.pop("speculative_config", None)) is not None:
        given = speculative_config(vllm) | given
    for name in _SIZES:
        if isinstance(given.get(name), str):
            given[name] = parse_size(given[name])
    own = {f.name for f in fields(ServeConfig)}
    of_server = {name: given.pop(name) for name in list(given) if name in own}
    for name, value in of_server.items():
        if isinstance(value, list):
            of_server[name] = tuple(value)
        elif isinstance(value, str) and name in _LISTS:  # whose letters are no list of texts
            of_server[name] = (value,)
    given.setdefault("model", DEFAULT_MODEL)
    batch = given.get("max_batch_size")
    given.setdefault("max_step_tokens", max(_STEP_TOKENS, batch if isinstance(batch, int) else 0))
    return given, ServeConfig(**of_server)


def read_options(file: Path) -> dict[str, Any]:
    """The options of a YAML file, which may write them with - or _; raises ConfigError."""
    import yaml

    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigError(f"cannot read the options in {file}: {reason}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds {type(found).__name__}; allowed: options, like `port: 8000`")
    known = {*PURPOSES, *OLD_OPTIONS, *GONE_OPTIONS, "speculative_config"}
    options: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        name = next((field for field, flag in _FLAGS.items() if flag == name), name)
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see specinfer serve --help"
            raise ConfigError(f"{file} has the unknown option {key!r}; {hint}")
        if value is not None:
            options[name] = value
    return new_names(options)


def speculative_config(value: object) -> dict[str, Any]:
    """vLLM's speculative_config, JSON text or a mapping, as options; raises ConfigError for what is not."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"speculative_config is not JSON: {error.msg} at {error.pos}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"speculative_config is {value!r}; allowed: a mapping with a method")
    left = dict(value)
    method = left.pop("method", "draft_model" if "model" in left else None)
    tokens = left.pop("num_speculative_tokens", None)
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
        raise ConfigError(f"num_speculative_tokens is {tokens!r}; allowed: an integer >= 1")
    options: dict[str, Any] = {}
    names: dict[str, str | None] = {}
    if method == "ngram":
        options = {"lookup": True}
        # The most tokens that match bound a search there; here longer matches come first in any case.
        names = {"prompt_lookup_min": "lookup_min", "prompt_lookup_max": None}
        if tokens is not None:
            options["lookup_depth"] = tokens
    elif method == "suffix":
        options = {"lookup": True}
        names = {"suffix_decoding_max_tree_depth": "lookup_depth"}
        if tokens is not None:
            options["lookup_depth"] = tokens
    elif method == "draft_model":
        if "model" not in left:
            raise ConfigError("speculative_config has method draft_model and no model; name the draft")
        names = {"model": "drafts", "quantization": "draft_quantization"}
        if tokens is not None:
            options["expansion"] = ",".join(["1"] * tokens)
        if left.pop("draft_tensor_parallel_size", 1) != 1:
            raise ConfigError("draft_tensor_parallel_size is not 1; a draft runs in one process here")
    else:
        raise ConfigError(
            f"speculative_config has method {method!r}; allowed here: ngram, suffix, draft_model"
        )
    for key, name in names.items():
        if key in left:
            value = left.pop(key)
            if name is not None:
                options[name] = value
    if left:
        raise ConfigError(
            f"speculative_config of method {method} has {', '.join(map(str, left))}; allowed: method, "
            f"num_speculative_tokens, {', '.join(names)}"
        )
    return options


def _engine_fields() -> Iterator[tuple[str, Any, Any]]:
    parts = {"speculation", "cache", "scheduler"}
    yield from (one for one in _own_fields(EngineConfig) if one[0] not in parts)
    for part in _PARTS:
        for name, hint, default in _own_fields(part):
            yield ("kv_cache_memory" if name == "memory" else name), hint, default


def _own_fields(kind: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, type and default of a config class's fields."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        yield field.name, hints[field.name], _default(field)


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else None


def _flag(name: str, hint: Any, default: Any) -> Callable[[_Command], _Command]:
    names = (_FLAGS.get(name, name), *(old for old, new in OLD_OPTIONS.items() if new == name))
    flags = tuple(one.replace("_", "-") for one in names)
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    kind = kinds[0] if get_origin(hint) in (Union, UnionType) and kinds else hint
    shown = "" if default in (None, (), "", False) else f"  [{_shown(name, default)}]"
    more: dict[str, Any] = {"help": PURPOSES[name] + shown}
    if kind is bool:
        return click.option(*(f"--{one}/--no-{one}" for one in flags), name, default=None, **more)
    if get_origin(kind) is tuple:
        more |= {"multiple": True, "metavar": "TEXT"}
    elif get_origin(kind) is Literal:
        more["type"] = click.Choice(get_args(kind))
    elif name in _SIZES:
        more["metavar"] = "SIZE"
    elif kind in (int, float) and len(kinds) < 2:
        more["type"] = kind
    else:
        more["metavar"] = "TEXT"
    return click.option(*(f"--{one}" for one in flags), name, **more)


def _shown(name: str, default: Any) -> str:
    """A default as one would write it."""
    if default is True:
        return "on"
    return f"{default >> 20}MB" if name in _SIZES else str(default)
