"""The command line: `specinfer serve | generate | chat | pull | demo | bench | check | doctor`, and others.

Commands are imported when they are called, so `specinfer --help` answers before torch would have loaded.
"""

from __future__ import annotations

import io
import os
import sys
from difflib import get_close_matches
from importlib import import_module
from typing import Final

import click

from specinfer.errors import IntegrityError, UserError

COMMANDS: Final = {  # name -> what --help says, in its order; each a click command in a module of its name
    "serve": "Serve a model to OpenAI clients.",
    "run-batch": "Answer a file of requests, as a server would.",
    "follow": "Compute a part of a model that is served on another host.",
    "generate": "Answer a prompt.",
    "chat": "Talk with a model.",
    "pull": "Fetch a model.",
    "demo": "Watch a model answer through token trees, and what that gains.",
    "bench": "Measure a model without and with speculation.",
    "check": "Test on your own models that speculation does not change the output.",
    "doctor": "Print what a bug report needs: versions, CPU, kernels and how fast they are.",
    "trace": "Record texts with all that drafts would have guessed along them.",
    "tune": "Train drafts on what a model says.",
    "policy": "See and reset what speculation has learnt, and play recorded texts under policies.",
    "view": "Look at the token trees of a trace file, in a browser.",
}
_MODULES: Final = {"run_batch": "serve", "pull": "small", "view": "small"}  # commands in others
BUG: Final = 70  # the exit status of an internal error, as in sysexits.h
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells have it


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            if close := get_close_matches(cmd_name, COMMANDS, n=1):
                ctx.fail(f"there is no command {cmd_name!r}; did you mean {close[0]!r}?")
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(import_module(f"specinfer.cli.{_MODULES.get(name, name)}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from specinfer.cli.version import version_text

        click.echo(version_text())
        context.exit()


@click.group(
    cls=_LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    callback=_version,
    expose_value=False,
    help="Print the version, Python, torch and CPU kernels.",
)
@click.pass_context
def cli(context: click.Context) -> None:
    """Tree-based speculative inference: the text the model would have written anyway, sooner."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> None:
    """Run the command line and exit.

    Statuses: 0; 1, a check failed or nobody reads the output; 2, a user error; 70, a bug; 130, Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
    try:
        status = cli.main(prog_name="specinfer", standalone_mode=False)
        sys.stdout.flush()
    except click.Abort:
        status = INTERRUPTED  # click has ended the line
    except KeyboardInterrupt:
        click.echo("", err=True)
        status = INTERRUPTED
    except click.ClickException as error:
        _complain(error.format_message())
        status = 2
    except UserError as error:
        _complain(str(error))
        status = 2
    except IntegrityError as error:
        _complain(f"internal error: {error}; please report it")
        status = BUG
    except BrokenPipeError:  # whoever read our output has gone (`| head`)
        _drop_output()
        status = 1
    except OSError as error:  # a full disk, a folder that may not be written
        reason = error.strerror or str(error)
        _complain(f"{error.filename}: {reason}" if error.filename else reason)
        _drop_output()
        status = 2
    sys.exit(status if isinstance(status, int) else 0)


def _complain(message: str) -> None:
    click.echo(f"specinfer: error: {' '.join(message.split())}", err=True)


def _drop_output() -> None:
    """Where standard output takes no more, drop what is left, or Python would complain at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
