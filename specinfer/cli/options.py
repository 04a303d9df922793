"""Commands, their options of the engine and of one request, and the configs that these make.

An option that is not given is None, so a configuration file's key or the default applies.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from specinfer.config import ENGINE_OPTIONS, EngineConfig
from specinfer.errors import ConfigError, RequestError
from specinfer.hub.catalogue import CATALOGUE, SHIPPED_HEADS, heads_of
from specinfer.option import Option
from specinfer.speculation_config import AUTO, OWN_HEAD, SELF

if TYPE_CHECKING:
    from specinfer.llm import LLM

DEFAULT_MODEL = "smollm2-135m"
_WIDTH: Final = 100  # line width in characters, if the terminal is that wide
MODEL_WORD: Final = "model_word"  # the argument MODEL of a command that has --model as well
FILE: Final = click.Path(path_type=Path, readable=False)  # shells complete its name; commands report faults
_Command = TypeVar("_Command", bound=Callable[..., Any])
# Options of the engine in commands that answer at a terminal; a server has all of them.
_MODEL: Final = (
    *("model_impl", "trust_remote_code", "dtype", "quantization", "device", "threads", "tensor_parallel"),
    *("pipeline_parallel", "master", "key_file", "local_ranks", "sum_parts", "chat_template", "memory"),
    *("kv_cache_dtype", "kv_cache_memory", "offload", "offload_folder", "prepared", "max_context"),
)
_DRAFT: Final = ("draft_quantization", "draft_lora")
DRAFT_ONLY: Final = (*_DRAFT, "expansion", "draw")  # options that a named draft needs
_TREES: Final = ("max_nodes", "tree_size", "verifier")

_SAMPLING = [
    click.option("--temperature", type=float, help="0 is greedy.  [the model's own, else 0.8]"),
    click.option("--top-k", type=int, help="Sample from the k most likely tokens; 0: all."),
    click.option(
        "--top-p",
        type=float,
        help="Sample from the likeliest tokens of this mass.  [the model's own, else 0.95]",
    ),
    click.option("--min-p", type=float, help="Keep tokens with p >= min-p * max p."),
    click.option("--seed", type=int, help="The same seed gives the same text."),
    click.option("--presence-penalty", type=float, default=0.0, help="On tokens of the answer; -2 to 2."),
    click.option("--frequency-penalty", type=float, default=0.0, help="On each occurrence; -2 to 2."),
    click.option("--repetition-penalty", type=float, help="On prompt and answer; 1: none."),
]
_FORM = [
    click.option("--json-schema", type=FILE, metavar="FILE", help="Answer with JSON of this schema."),
    click.option("--regex", metavar="REGEX", help="The whole answer matches."),
    click.option("--choice", multiple=True, metavar="TEXT", help="Answer with one of these; repeatable."),
    click.option("--grammar", type=FILE, metavar="FILE", help="Answer in a Lark or GBNF grammar."),
]
_END = [
    click.option("--max-tokens", type=int, help="Longest answer, in tokens.  [256; in a chat: no limit]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable."),
    click.option("--ignore-eos", is_flag=True, help="Continue past the end-of-text token."),
    click.option("--prediction", type=FILE, metavar="FILE", help="Predicted answer, used as a draft."),
]
_PLAIN = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("regex", "max_tokens", "stop", "ignore_eos"),
)


class Command(click.Command):
    """A click command that takes its model as first word or as --model."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        more["context_settings"] = {"max_content_width": _WIDTH, "show_default": True}
        super().__init__(*arguments, **more)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; the model is the first word, or the value of --model."""
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as error:
            # The class itself is raised for surplus arguments, its subclasses for all else.
            if type(error) is not click.UsageError or ctx.params.get("prompt") is None:
                raise
            raise click.UsageError(f"{error.message}; put the prompt in quotes", ctx) from None
        word, prompted = ctx.params.pop(MODEL_WORD, None), "prompt" in ctx.params
        if isinstance(word, tuple):
            ctx.params["models"], word = word, next(iter(word), None)
        if word is None:
            return rest
        named = ctx.get_parameter_source("model") is ParameterSource.COMMANDLINE
        if prompted and ctx.params["prompt"] is None and (named or not _names_a_model(word)):
            ctx.params["prompt"] = word
        elif named:
            given = ctx.params["model"]
            hint = "; put the prompt in quotes" if prompted else ""
            raise click.UsageError(
                f"the model is {word!r} and --model is {given!r}; give one of them{hint}", ctx
            )
        else:
            ctx.params["model"] = word
            ctx.set_parameter_source("model", ParameterSource.COMMANDLINE)
        return rest


def _names_a_model(word: str) -> bool:
    """True if a single word of `generate` is a model, not a prompt for the default model."""
    is_path = "/" in word or word.endswith(".gguf")
    return word in CATALOGUE or os.path.exists(word) or (is_path and len(word.split()) == 1)


class _NumberOr(click.ParamType[Any]):
    """An integer, or one of a few words."""

    name = "INTEGER"

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the integer or the word; raises click.BadParameter."""
        try:
            return value if value in self._words else int(value)
        except ValueError:
            self.fail(f"{value!r} is not a valid integer, nor {' or '.join(self._words)}.", param, ctx)


template_option: Final = click.option(
    "--chat/--raw",
    "templated",
    default=None,
    show_default="--chat, if there is a template",
    help="Use the chat template, or the bare prompt.",
)


def flags(options: Sequence[Option]) -> Callable[[_Command], _Command]:
    """Return a decorator that adds each option that has a flag to a command, in their order."""

    def decorated(command: _Command) -> _Command:
        for one in reversed([one for one in options if not one.about.rare]):
            command = _flag(one)(command)
        return command

    return decorated


def model_named(
    default: str | None = DEFAULT_MODEL, *, several: bool = False
) -> Callable[[_Command], _Command]:
    """Return a decorator that adds the argument MODEL, and --model for the same.

    With `several` the command gets all words, as `models`, too.
    """
    more: dict[str, Any] = {"metavar": "[MODEL]...", "nargs": -1} if several else {"metavar": "[MODEL]"}
    word = click.argument(MODEL_WORD, required=False, shell_complete=complete_model, **more)
    option = click.option(
        "--model",
        "-m",
        default=default,
        show_default=DEFAULT_MODEL,
        shell_complete=complete_model,
        help="The same as MODEL.",
    )
    return lambda command: word(option(command))


def model_options(command: _Command) -> _Command:
    """Add MODEL and the engine's options of models, processes and memory."""
    return model_named()(_of_engine(*_MODEL)(command))


def adapter_option(command: _Command) -> _Command:
    """Add --lora: the adapter of all requests of a command."""
    return _of_engine("lora")(command)


def speculation_options(command: _Command) -> _Command:
    """Add --draft, --lookup and the engine's options of trees."""
    return _of_engine("drafts", *_DRAFT, "lookup", "expansion", *_TREES)(command)


def build_llm(options: dict[str, Any], **more: Any) -> LLM:
    """Load an LLM from the options of a command, with a progress bar; raises UserError.

    With --lora the adapter is that of all requests.
    """
    config = engine_config({**options, **more})  # before torch is imported, so that errors are immediate
    if len(config.adapters) > 1:
        raise ConfigError(
            f"--lora names {', '.join(config.adapters)}; allowed here: one adapter, for all requests; give "
            "one, or start `specinfer serve`, where each request names its own"
        )
    from specinfer.llm import LLM
    from specinfer.progress import ProgressBar

    llm = LLM(config, progress=ProgressBar())
    for name in config.adapters:
        assert llm.models.adapters is not None, "models that are loaded have a cache of adapters"
        llm.models.adapters.default = name
    return llm


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """The engine's config from the model and speculation options; None: the option is not given.

    If no speculator is named, a known draft for the model is added to the default ones. Raises ConfigError.
    """
    given = {name: value for name, value in options.items() if value not in (None, ())}
    model = given.pop("model")
    if given.pop("no_draft", False):
        if given.get("drafts"):
            raise ConfigError(
                f"--no-draft and --draft {given['drafts'][0]} exclude each other; give one of them"
            )
    elif not {"drafts", "lookup"} & given.keys() and given.get("max_nodes") != 1:
        given["drafts"] = heads_of(model) or (AUTO,)
    config = EngineConfig.from_options(model, given)
    for name in DRAFT_ONLY:
        if name in given and config.speculation.drafts in ((), (AUTO,)):
            raise ConfigError(f"{name} is for draft models, and none is named; add --draft MODEL")
    return config


def sampling_options(command: _Command) -> _Command:
    """Add the options of one request: sampling, structured output and length."""
    for option in reversed([*_SAMPLING, *_FORM, *_END]):
        command = option(command)
    return command


def sampling_fields(options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Remove the sampling options from `options` and return the fields of SamplingParams that they set.

    Raises RequestError for a wrong value.
    """
    from specinfer.sampling_params import SamplingParams

    values = {
        **{name: options.pop(name) for name in _PLAIN},
        **more,
        "choice": options.pop("choice") or None,
        "response_format": _response_format(options.pop("json_schema")),
        **{name: _read(name, options.pop(name)) for name in ("grammar", "prediction")},
    }
    given = {name: value for name, value in values.items() if value is not None}
    SamplingParams(**given)  # checks them before a model is loaded
    return given


def complete_model(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the catalogue, and files, for a shell's completion."""
    return _completed(CATALOGUE, incomplete)


def _complete_draft(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _completed((*CATALOGUE, *SHIPPED_HEADS, SELF, OWN_HEAD, AUTO), incomplete)


def _completed(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return [*found, CompletionItem(incomplete, type="file")]


def _of_engine(*names: str) -> Callable[[_Command], _Command]:
    return flags([ENGINE_OPTIONS[name][1] for name in names])


def _flag(one: Option) -> Callable[[_Command], _Command]:
    shown = one.shown_default().replace("`", "")
    more: dict[str, Any] = {
        "help": one.about.purpose + (f"  [{shown}]" if shown and not one.about.shown else "")
    }
    if one.name == "drafts":
        more |= {"shell_complete": _complete_draft, "multiple": True, "metavar": "TEXT"}
        named = click.option(one.flag, one.name, **more)
        without = click.option("--no-draft", is_flag=True, default=None, help="Use no draft.")
        return lambda command: named(without(command))
    if one.kind is bool or one.about.switch:
        return click.option(f"{one.flag}/--no-{one.flag[2:]}", one.name, default=None, **more)
    if one.is_list:
        more |= {"multiple": True, "metavar": "TEXT"}
    elif one.choices:
        more["type"] = click.Choice(one.choices)
    elif one.about.size:
        more["metavar"] = "SIZE"
    elif one.words:
        more["type"] = _NumberOr(one.words)
    elif one.kind in (int, float):
        more["type"] = one.kind
    else:
        more["metavar"] = "TEXT"
    return click.option(one.flag, one.name, **more)


def _response_format(schema: Path | None) -> dict[str, Any] | None:
    text = _read("JSON schema", schema)
    if schema is None or text is None:
        return None
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"{schema} is not JSON at line {error.lineno}: {error.msg}") from None
    return {"type": "json_schema", "json_schema": {"name": schema.stem, "schema": parsed}}


def _read(what: str, path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RequestError(f"cannot read the {what} from {path}: {reason}") from None
