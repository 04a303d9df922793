"""Write the tables of docs/options.md and docs/commands.md from the code: python tools/options_page.py.

Options come from the config classes, flags and help from click's commands.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specinfer.cli import GROUPS, cli
from specinfer.cli.options import sampling_options
from specinfer.config import ENGINE_OPTIONS
from specinfer.option import Option, options_of
from specinfer.serve.config import ServeConfig

DOCS = Path(__file__).resolve().parents[1] / "docs"
ENGINE = [one for _, one in ENGINE_OPTIONS.values()]
SERVER = list(options_of(ServeConfig))
FLAGGED = [[one for one in options if not one.about.rare] for options in (ENGINE, SERVER)]
_SHARED: Final = "Flags of a request"  # their table stands behind the commands
_WIDTH: Final = 130  # of paragraphs, in characters
_HELP: Final = {"--help"}  # the page's introduction has them


def table(options: Sequence[Option]) -> str:
    """Return a Markdown table of options, their defaults and their purposes."""
    rows = ["| option | default | |", "|---|---|---|"]
    for one in options:
        default = one.about.shown or f"`{one.shown_default() or 'none'}`"
        text = f"{one.about.purpose} {one.about.more}".rstrip()
        rows.append(f"| `{one.name}`{' *' if one.about.rare else ''} | {default} | {text} |")
    return "\n".join(rows)


def commands_text() -> str:
    """Return a section for each command, then the flags that commands share."""
    blocks: list[str] = []
    sampling: list[str] = []  # commands that accept the flags of a request
    accepted: dict[tuple[str, str], list[str]] = {}
    shared = click.command()(sampling_options(lambda **_: None)).params
    for group, names in GROUPS.items():
        blocks.append(f"## {group}")
        for context in (found for name in names for found in _leaves(_context(name, cli))):
            path = context.command_path.removeprefix("specinfer ")
            usage = " ".join(context.command.get_usage(context).split()).removeprefix("Usage: ")
            blocks += [f"### {path}", f"`{usage}`", _help(context)]
            own = [one for one in context.command.params if _option_of(one) is None]
            if also := all(_is_in(one, own) for one in shared):
                sampling.append(path)
                own = [one for one in own if not _is_in(one, shared)]
            if options := [one for one in own if isinstance(one, click.Option)]:
                blocks.append(_flags(options, context))
            if also:
                link = f"[{_SHARED.lower()}](#{_SHARED.lower().replace(' ', '-')})"
                blocks.append(f"`{path}` also has the {link}.")
            of_engine, of_server = (_accepted(context.command, options) for options in FLAGGED)
            if of_engine or of_server:
                accepted.setdefault((of_engine, of_server), []).append(path)
    blocks += [f"## {_SHARED}", f"Commands that accept them: {_listed(sampling)}."]
    blocks.append(_flags(shared, click.Context(cli)))
    rows = ["| commands | options of the engine | options of the server |", "|---|---|---|"]
    rows += [f"| {_listed(paths)} | {' | '.join(sets)} |" for sets, paths in accepted.items()]
    blocks += ["## Options of the engine and the server", "[options.md](options.md#options) describes them."]
    return "\n\n".join([*blocks, "\n".join(rows)])


def _context(name: str, group: click.Group, parent: click.Context | None = None) -> click.Context:
    parent = parent or click.Context(group, info_name="specinfer")
    command = group.get_command(parent, name)
    assert command is not None
    return click.Context(command, parent, info_name=name)


def _leaves(context: click.Context) -> Iterator[click.Context]:
    """Yield the commands below a command that has commands, else the command itself."""
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            yield _context(name, context.command, context)
    else:
        yield context


def _is_in(param: click.Parameter, params: Sequence[click.Parameter]) -> bool:
    return any(
        (param.opts, getattr(param, "help", None)) == (one.opts, getattr(one, "help", None)) for one in params
    )


def _option_of(param: click.Parameter) -> Option | None:
    """Return the option of the engine or the server that a parameter sets, or None."""
    for one in (*ENGINE, *SERVER):
        if param.opts[0] == one.flag and getattr(param, "help", "").startswith(one.about.purpose):
            return one
    return None


def _accepted(command: click.Command, options: Sequence[Option]) -> str:
    """Return which of the options a command accepts, as text; empty: none."""
    has = [_option_of(param) for param in command.params]
    there, missing = [one for one in options if one in has], [one for one in options if one not in has]
    if not missing:
        return "all"
    if len(missing) < len(there):
        return "all but " + _listed([one.flag for one in missing])
    return _listed([one.flag for one in there])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _help(context: click.Context) -> str:
    """Return a command's help in Markdown; a paragraph that begins with \\b keeps its lines, as in click."""
    return "\n\n".join(
        f"```text\n{one.removeprefix(chr(8)).strip()}\n```"
        if one.startswith("\b")
        else textwrap.fill(one, _WIDTH, break_on_hyphens=False, break_long_words=False)
        for one in inspect.cleandoc(context.command.help or "").split("\n\n")
    )


def _flags(params: Sequence[click.Parameter], context: click.Context) -> str:
    """Return a Markdown table of flags, their defaults and their help."""
    rows = ["| flag | default | |", "|---|---|---|"]
    for one in params:
        if isinstance(one, click.Option) and not _HELP.intersection(one.opts):
            text = " ".join([one.help or "", *_limits(one)]).replace("|", "\\|")
            rows.append(f"| {_names(one)} | {_default(one, context)} | {text} |")
    return "\n".join(rows)


def _names(param: click.Option) -> str:
    """Return all flags of a parameter, long ones first, with the name of its value."""
    names = sorted(param.opts, key=lambda name: not name.startswith("--")) + param.secondary_opts
    if param.metavar is not None:
        names[0] += f" {param.metavar}"
    elif not param.is_flag and not isinstance(param.type, click.Choice):
        names[0] += " TEXT" if param.type is click.STRING else " N"
    # Inside of `...` a backslash before | would be shown on the site.
    return ", ".join(
        f"<code>{name.replace('|', '&#124;')}</code>" if "|" in name else f"`{name}`" for name in names
    )


def _default(param: click.Option, context: click.Context) -> str:
    if param.required:
        return "required"
    if isinstance(param.show_default, str):
        return param.show_default
    value = param.get_default(context)
    if param.secondary_opts and isinstance(value, bool):
        return f"`{(param.opts if value else param.secondary_opts)[0]}`"
    if param.is_flag and not param.secondary_opts:
        return "`off`"
    if isinstance(value, str | int | float):
        return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
    return "`none`"


def _limits(param: click.Option) -> Iterator[str]:
    """Yield sentences about allowed values and the variable of the environment."""
    kind = param.type
    if isinstance(kind, click.Choice):
        yield f"Allowed: {_listed(kind.choices)}."
    elif isinstance(kind, click.IntRange):
        yield f"Allowed: {kind.min} {'or more' if kind.max is None else f'to {kind.max}'}."
    if param.envvar is not None:
        yield f"Also: the variable `{param.envvar}`."


# Parts of the pages, by the name in the comment before each.
PAGES: Final[dict[str, dict[str, Callable[[], str]]]] = {
    "options.md": {"engine options": lambda: table(ENGINE), "server options": lambda: table(SERVER)},
    "commands.md": {"commands": commands_text},
}


def written(name: str) -> str:
    """Return a page of PAGES with new parts; raises ValueError if it has no place for one."""
    page = (DOCS / name).read_text(encoding="utf-8")
    for part, text in PAGES[name].items():
        begin, end = f"<!-- {part}: tools/options_page.py -->\n", "<!-- end -->"
        before, after = page.split(begin)
        page = before + begin + text() + "\n" + after[after.index(end) :]
    return page


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(written(name), encoding="utf-8")
