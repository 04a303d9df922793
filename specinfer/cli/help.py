"""Help that fits a screen: --help has the usual options in groups, --help-all has every option."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

_WIDTH: Final = 100  # line width in characters, if the terminal is that wide
_COLUMN: Final = 28  # of option names
_ALL: Final = "specinfer.help_all"
_OWN: Final = "Options"
MODEL_WORD: Final = "model_word"  # the argument MODEL of a command that has --model as well
_METAVAR: Final = re.compile(r" (INTEGER|FLOAT)( RANGE)?\b")

# Headings of --help, each with the names of its options. Others stand first, under "Options".
_WORDS: Final = {
    "Model and memory": (
        "model model_impl trust_remote_code dtype quantization device kernels threads chat_template "
        "generation_config lora max_loras memory kv_cache_memory block_size prefix_reuse max_context "
        "offload offload_folder prepared max_batch_size max_step_tokens"
    ),
    "Speculation": (
        "drafts draft_quantization draft_vocabulary draft_lora speculative_config lookup "
        "lookup_min lookup_depth lookup_nodes lookup_memory prediction_depth prediction_branches "
        "forced_depth expansion max_nodes tree_size clock verifier draw prediction speculation"
    ),
    "Sampling": (
        "max_tokens min_tokens stop stop_token_ids ignore_eos temperature top_k top_p min_p seed "
        "presence_penalty frequency_penalty repetition_penalty logit_bias bad_words allowed_token_ids "
        "json_object json_schema regex choice grammar"
    ),
    "Processes": (
        "replicas cluster session_header tensor_parallel pipeline_parallel master key_file local_ranks "
        "sum_parts"
    ),
    "Access": (
        "host port root_path served_model_name api_key api_key_file cors_origin allowed_host trusted_proxy "
        "page"
    ),
    "Requests": (
        "unknown_fields stored_responses special_tokens_in_messages call_format max_waiting max_wait max_n "
        "max_prompt_tokens max_body max_bodies_memory max_connections idle_timeout ping_interval "
        "engine_timeout grace"
    ),
    "Logs": "log_traffic log_traffic_size log_level log_format otlp_endpoint",
}
GROUPS: Final = {heading: tuple(words.split()) for heading, words in _WORDS.items()}
_GROUP_OF: Final = {name: heading for heading, names in GROUPS.items() for name in names}
FILE: Final = click.Path(path_type=Path, readable=False)  # shells complete its name; commands report faults


class Command(click.Command):
    """A click command; `short` names the options of --help, None: all of them."""

    def __init__(self, *arguments: Any, short: Collection[str] | None = None, **more: Any) -> None:
        more.setdefault("context_settings", {}).setdefault("max_content_width", _WIDTH)
        super().__init__(*arguments, **more)
        self.short = short

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

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Add --help-all where --help leaves options out."""
        *params, help_option = super().get_params(ctx)
        if self.short is None:
            return [*params, help_option]
        return [*params, _help_all(), help_option]

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The first paragraph of the command's help; all of it with --help-all."""
        whole = self.help
        if self._is_short(ctx) and whole is not None:
            self.help = whole.partition("\n\n")[0]
        try:
            super().format_help_text(ctx, formatter)
        finally:
            self.help = whole

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options, under the headings of GROUPS."""
        groups: dict[str, list[tuple[str, str]]] = {_OWN: [], **{heading: [] for heading in GROUPS}}
        for param in self.get_params(ctx):
            if not isinstance(param, click.Option):
                continue
            usual = param.name in (self.short or ()) or {"--help", "--help-all"}.intersection(param.opts)
            if (usual or not self._is_short(ctx)) and (record := param.get_help_record(ctx)) is not None:
                groups[_GROUP_OF.get(param.name or "", _OWN)].append(_compact(param, record))
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records, col_max=_COLUMN)

    def _is_short(self, ctx: click.Context) -> bool:
        return self.short is not None and not ctx.meta.get(_ALL)


def _names_a_model(word: str) -> bool:
    """True if a single word of `generate` is a model, not a prompt for the default model."""
    from specinfer.hub.catalogue import CATALOGUE

    is_path = "/" in word or word.endswith(".gguf")
    return word in CATALOGUE or os.path.exists(word) or (is_path and len(word.split()) == 1)


def _help_all() -> click.Option:
    def show(context: click.Context, _: click.Parameter, requested: bool) -> None:
        if requested and not context.resilient_parsing:
            context.meta[_ALL] = True
            click.echo(context.get_help(), color=context.color)
            context.exit()

    purpose = "Show every option and exit."
    return click.Option(
        ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=show, help=purpose
    )


def _compact(param: click.Parameter, record: tuple[str, str]) -> tuple[str, str]:
    """A line of help: the option without its older names, N for a number, and its bare default."""
    names, purpose = record
    longs = [name for name in param.opts if name.startswith("--")]
    for name in longs[1:]:
        names = names.replace(f", {name}", "")
    for name in [name for name in param.secondary_opts if name.startswith("--")][1:]:
        names = names.replace(f", {name}", "")
    return _METAVAR.sub(" N", names), purpose.replace("[default: ", "[")
