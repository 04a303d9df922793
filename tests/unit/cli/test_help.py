"""--help fits a screen, --help-all has every option, and neither imports torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from specinfer import cli
from specinfer.cli.help import GROUPS, Command

LINES = 40  # at 80 columns


def commands(
    group: click.Group, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


COMMANDS = {" ".join(path): command for path, command in commands(cli.cli)}
SHORTENED = {
    path: one for path, one in COMMANDS.items() if isinstance(one, Command) and one.short is not None
}


def help_of(path: str, flag: str = "--help") -> str:
    result = CliRunner().invoke(cli.cli, [*path.split(), flag], terminal_width=80)
    assert result.exit_code == 0, result.output
    return result.output


def listed(text: str) -> list[str]:
    """The first long name of each option that has a line."""
    return re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.M)


@pytest.mark.parametrize("path", ["", *COMMANDS])
def test_it_fits_a_screen(path: str) -> None:
    lines = help_of(path).splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("path", SHORTENED)
def test_help_all_has_the_options_that_help_omits(path: str) -> None:
    command = SHORTENED[path]
    short, everything = help_of(path), help_of(path, "--help-all")
    names = {one.name for one in command.params}
    assert set(command.short or ()) <= names, "an option of `short` that the command has not"
    assert "--help-all" in short
    options = [one for one in command.params if isinstance(one, click.Option)]
    first_names = [next(name for name in one.opts if name.startswith("--")) for one in options]
    assert sorted(listed(everything)) == sorted([*first_names, "--help-all", "--help"])
    usual = [
        name for name, one in zip(first_names, options, strict=True) if one.name in (command.short or ())
    ]
    assert sorted(listed(short)) == sorted([*usual, "--help-all", "--help"])


def test_each_group_names_options_that_exist() -> None:
    known = {param.name for command in COMMANDS.values() for param in command.params}
    for names in GROUPS.values():
        assert set(names) <= known
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))


def test_every_command_is_in_the_list() -> None:
    text = help_of("")
    for heading, named in cli.GROUPS.items():
        assert f"{heading}:" in text
        assert all(name in text for name in named)


@pytest.mark.parametrize("path", ["", *COMMANDS])
def test_every_flag_is_on_a_page(path: str) -> None:
    pages = Path(__file__).parents[3] / "docs"
    start, *found = re.split(r"^###? (.+)$", (pages / "commands.md").read_text(encoding="utf-8"), flags=re.M)
    sections = dict(zip(found[::2], found[1::2], strict=True))
    text = start + sections.get(path, "")
    text += sections["Flags of a request"] if "flags of a request" in text else ""
    options = (pages / "options.md").read_text(encoding="utf-8")
    purposes = dict(re.findall(r"^\| `(\w+)` \| .*? \| (.*) \|$", options, re.M))
    command = COMMANDS.get(path, cli.cli)
    missing = []
    for param in command.get_params(click.Context(command)):
        if not isinstance(param, click.Option):
            continue
        purpose = (param.help or "").partition("  [")[0]  # behind it is the default
        if purpose and purposes.get(param.name or "", "").startswith(purpose):
            continue  # an option of the engine or the server, with a row on their page
        missing += [
            name for name in (*param.opts, *param.secondary_opts) if not re.search(rf"[`>]{name}\b", text)
        ]
    assert missing == [], "run python tools/options_page.py"
