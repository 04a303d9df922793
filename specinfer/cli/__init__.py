"""The command line: `specinfer generate | chat | pull | demo | bench | check`.

Commands are imported when they are called, so `specinfer --help` answers before torch would have loaded.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Final

import click

from specinfer.errors import IntegrityError, UserError
from specinfer.version import VERSION

COMMANDS: Final = {  # name -> module, which has a click command of that name; in the order --help shows
    "generate": "Answer a prompt.",
    "chat": "Talk with a model.",
    "pull": "Fetch a model.",
    "demo": "Watch a model answer through token trees, and what that gains.",
    "bench": "Measure a model without and with speculation.",
    "check": "Test on your own models that speculation does not change the output.",
}
BUG: Final = 70  # the exit status of an internal error, as in sysexits.h


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"specinfer.cli.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="specinfer")
def cli() -> None:
    """Tree-based speculative inference: the text the model would have written anyway, sooner."""


def main() -> None:
    """Run the command line and exit: 0, 1 (a check failed), 2 (user error), 70 (a bug), 130 (Ctrl-C)."""
    try:
        status = cli.main(prog_name="specinfer", standalone_mode=False)
        sys.stdout.flush()
    except click.Abort:
        status = _interrupted()
    except KeyboardInterrupt:
        status = _interrupted()
    except click.ClickException as error:
        _complain(error.format_message())
        status = 2
    except UserError as error:
        _complain(str(error))
        status = 2
    except IntegrityError as error:
        _complain(f"internal error: {error}; please report it")
        status = BUG
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`); keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status if isinstance(status, int) else 0)


def _complain(message: str) -> None:
    click.echo(f"specinfer: error: {' '.join(message.split())}", err=True)


def _interrupted() -> int:
    click.echo("", err=True)
    return 130
