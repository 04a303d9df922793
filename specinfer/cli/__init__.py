"""The command line `specinfer`.

A command's module is imported when the command is called, so `specinfer --help` imports no torch.
"""

from __future__ import annotations

import io
import os
import sys
from difflib import get_close_matches
from importlib import import_module
from typing import Final

import click

from specinfer.errors import IntegrityError, UserError, lack_of_memory

# Headings of --help, each with commands and their help.
GROUPS: Final = {
    "Answers": {
        "serve": "Serve a model to OpenAI clients.",
        "run-batch": "Answer a file of requests.",
        "generate": "Answer one prompt.",
        "chat": "Converse in the terminal.",
        "follow": "Compute a part of a model for an engine on another host.",
    },
    "Models and drafts": {
        "pull": "Fetch a model.",
        "drafts": "List or try drafts for a model.",
        "cache": "List and remove what is kept on disk.",
        "tune": "Train drafts on a model's own answers.",
        "policy": "Show learned acceptance rates.",
    },
    "Measurements and checks": {
        "demo": "Show speculation at work on three prompts.",
        "bench": "Time a model without and with speculation.",
        "check": "Test that speculation does not change the output.",
        "doctor": "Print versions, CPU, kernels and speeds, for a bug report.",
    },
}
TRY: Final = """\
specinfer chat                     converse with a small model, which is fetched first
specinfer chat my-model.gguf       or with your own: a GGUF file, a folder, org/name:Q4_K_M
specinfer serve my-model.gguf      the same for OpenAI clients and the browser
specinfer bench my-model.gguf      its speed without and with speculation
specinfer --help                   all commands"""
COMMANDS: Final = {name: words for commands in GROUPS.values() for name, words in commands.items()}
BUG: Final = 70  # exit status of an internal error, as in sysexits.h
INTERRUPTED: Final = 130  # exit status after Ctrl-C: 128 + SIGINT, as in shells


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            if close := get_close_matches(cmd_name, COMMANDS, n=1):
                ctx.fail(f"there is no command {cmd_name!r}; did you mean {close[0]!r}?")
            return None
        module = {"run-batch": "serve", "pull": "cache"}.get(cmd_name, cmd_name)
        command: click.Command = getattr(import_module(f"specinfer.cli.{module}"), cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, commands in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl(list(commands.items()))


def _version(context: click.Context, _: click.Parameter, requested: bool) -> None:
    if requested:
        from specinfer.cli.doctor import version_text

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
    """Serve language models with tree-based speculative inference: the same text, sooner."""
    if context.invoked_subcommand is None:
        click.echo(TRY)


def main() -> None:
    """Run the command line and exit.

    Exit statuses: 0; 1, a check failed or the output was closed; 2, a user error; 70, a bug; 130, Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # print "?" for a character that the terminal lacks
    try:
        status = cli.main(prog_name="specinfer", standalone_mode=False)
        sys.stdout.flush()
    except click.Abort:
        status = INTERRUPTED  # click has printed the line break
    except KeyboardInterrupt:
        click.echo("", err=True)
        status = INTERRUPTED
    except (click.ClickException, UserError) as error:
        _complain(error.format_message() if isinstance(error, click.ClickException) else str(error))
        status = 2
    except IntegrityError as error:
        _complain(f"internal error: {error}; please report it")
        status = BUG
    except BrokenPipeError:  # the reader of the output has ended, as in `| head`
        _drop_output()
        status = 1
    except (MemoryError, RuntimeError, ImportError, OSError) as error:
        if (line := lack_of_memory(error)) is not None:
            _complain(line)
        elif isinstance(error, OSError):  # for example a full disk, or a read-only folder
            reason = error.strerror or str(error)
            _complain(f"{error.filename}: {reason}" if error.filename else reason)
        else:
            raise
        if isinstance(error, OSError):
            _drop_output()
        status = 2
    sys.exit(status if isinstance(status, int) else 0)


def _complain(message: str) -> None:
    click.echo(f"specinfer: error: {' '.join(message.split())}", err=True)


def _drop_output() -> None:
    """Discard unwritten output if standard output is closed, so that Python reports no error at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
