"""Command: a click command whose model is its first word or the value of --model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

_WIDTH: Final = 100  # line width in characters, if the terminal is that wide
MODEL_WORD: Final = "model_word"  # the argument MODEL of a command that has --model as well
FILE: Final = click.Path(path_type=Path, readable=False)  # shells complete its name; commands report faults


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
    from specinfer.hub.catalogue import CATALOGUE

    is_path = "/" in word or word.endswith(".gguf")
    return word in CATALOGUE or os.path.exists(word) or (is_path and len(word.split()) == 1)
