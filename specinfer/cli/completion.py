"""`specinfer completion`: prints the completion script of a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from specinfer.cli.help import Command

VARIABLE = "_SPECINFER_COMPLETE"  # click's name; the script sets it when it asks for completions


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that completes commands, options, values and file names.

    \b
    Add a line to the file that the shell reads at its start:
    ~/.bashrc                   eval "$(specinfer completion bash)"
    ~/.zshrc, after compinit    eval "$(specinfer completion zsh)"
    ~/.config/fish/config.fish  specinfer completion fish | source
    """
    found = get_completion_class(shell)
    assert found is not None, "click has these shells"
    click.echo(found(context.find_root().command, {}, "specinfer", VARIABLE).source())
