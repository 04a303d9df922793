"""`specinfer pull`, which fetches a model, and `specinfer cache`, which lists and removes what is on disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from specinfer.cli.options import Command, complete_model
from specinfer.errors import ConfigError
from specinfer.files import cache_dir
from specinfer.progress import ProgressBar, format_bytes

# Folders of the cache; those whose entries are listed by name are models.
KINDS: Final = {
    "prepared": "weights in int8 and int4, and for streaming",
    "models": "downloads",
    "kernels": "compiled kernels, and their trials",
    "curves": "measured costs of passes",
    "policies": "learned acceptance rates",
}
_NAMED: Final = ("prepared", "models")
_PASSING: Final = (".lock", ".partial")  # ends of names that belong to another entry


@click.command(cls=Command)
@click.argument("action", required=False, type=click.Choice(["list", "clear"]), default="list")
@click.argument("name", required=False)
def cache(action: str, name: str | None) -> None:
    """List the files that specinfer keeps on disk, or remove them.

    `specinfer cache clear` removes all of them, `clear NAME` a kind, or one model by its name in the list.
    They are made, measured or fetched again when they are needed. Models of the Hugging Face hub are in the
    hub's own cache.
    """
    folder = cache_dir()
    if action == "clear":
        _clear(folder, name)
        return
    if name is not None:
        raise ConfigError(f"list takes no name, got {name!r}; `specinfer cache clear {name}` removes it")
    click.echo(f"{folder}")
    for kind, words in KINDS.items():
        click.echo(f"{format_bytes(_size(folder / kind)):>10}  {kind:<9}  {words}")
        for entry in _entries(folder / kind) if kind in _NAMED else ():
            click.echo(f"{format_bytes(_size(entry)):>10}    {entry.name}")


def _clear(folder: Path, name: str | None) -> None:
    chosen = [folder / kind for kind in KINDS if name in (kind, None)]
    chosen = chosen or [entry for kind in _NAMED for entry in _entries(folder / kind) if entry.name == name]
    if not chosen:
        raise ConfigError(
            f"the cache has no {name!r}; allowed: {', '.join(KINDS)}, or a name that `specinfer cache` lists"
        )
    for path in chosen:
        size = _size(path)
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"{path} cannot be removed: {error.strerror or error}") from error
        if size:
            click.echo(f"removed {path} ({format_bytes(size)})")


def _entries(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from sorted(path for path in folder.iterdir() if not path.name.endswith(_PASSING))


def _size(path: Path) -> int:
    """The bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())


@click.command(cls=Command)
@click.argument("name", required=False, shell_complete=complete_model)
@click.option("--list", "list_names", is_flag=True, help="Show the catalogue.")
@click.option("--with-draft", is_flag=True, help="Fetch the best known draft for it, too.")
def pull(name: str | None, list_names: bool, with_draft: bool) -> None:
    """Fetch the model NAME and print its path.

    NAME is a catalogue name, or a hub name: org/name, org/name@revision, org/name:Q4_K_M,
    org/name:file.gguf.
    """
    from specinfer.hub import CATALOGUE, resolve

    if list_names:
        click.echo("name\tsize\tlicence\tfile")
        for entry in CATALOGUE.values():
            click.echo(f"{entry.name}\t{format_bytes(entry.size)}\t{entry.licence}\t{entry.file}")
        return
    if name is None:
        raise click.UsageError("no model named; give a name, or --list to see the catalogue")
    files = resolve(name, progress=ProgressBar())
    click.echo(files.path)
    if with_draft:
        from specinfer.hub.known_drafts import drafts_for

        rows = drafts_for(files)
        if not rows:
            raise ConfigError(
                f"no draft is known for {name}; docs/which_draft.md lists the models that have one"
            )
        click.echo(resolve(rows[0].name_for(files), progress=ProgressBar()).path)
