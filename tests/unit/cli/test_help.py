"""Every command is listed, and every flag is on a page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
from click.testing import CliRunner

from specinfer import cli


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


def test_every_command_is_in_the_list() -> None:
    text = CliRunner().invoke(cli.cli, ["--help"], terminal_width=80).output
    for heading, named in cli.GROUPS.items():
        assert f"{heading}:" in text
        assert all(name in text for name in named)


def test_every_flag_is_on_a_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference.md").read_text(encoding="utf-8")
    start, *found = re.split(r"^### (.+)$", page, flags=re.M)
    sections = dict(zip(found[::2], found[1::2], strict=True))
    purposes = dict(re.findall(r"^\| `(\w+)` \| .*? \| (.*) \|$", page, re.M))
    missing = []
    for path, command in {"": cli.cli, **COMMANDS}.items():
        text = start + sections.get(path, "")
        text += sections["Flags of a request"] if "flags of a request" in text else ""
        for param in command.get_params(click.Context(command)):
            if not isinstance(param, click.Option):
                continue
            purpose = (param.help or "").partition("  [")[0]  # behind it is the default
            if purpose and purposes.get(param.name or "", "").startswith(purpose):
                continue  # an option of the engine or the server, with a row on their page
            names = (*param.opts, *param.secondary_opts)
            missing += [(path, name) for name in names if not re.search(rf"(?<!\w){name}\b", text)]
    assert missing == [], "run python tools/reference.py"
