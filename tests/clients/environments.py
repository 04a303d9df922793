"""Pinned client packages, and a cached environment for each client."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent
_SCRIPTS: Final = _HERE / "scripts"
_MAX_SHOWN: Final = 300  # characters of an installer's error


class MissingError(Exception):
    """An environment cannot be created; the message is one line."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client and its packages; dependencies are those published until `before`."""

    name: str
    registry: str  # "pip" or "npm"
    packages: Sequence[str]
    without: Sequence[str]  # dependencies that are uninstalled again
    before: str  # YYYY-MM-DD
    pip: str  # version of pip that supports --uploaded-prior-to
    is_agent: bool = False  # whether it runs against the server of agents

    @property
    def script(self) -> Path:
        """Path of the client's script; most agents share one."""
        suffix = ".py" if self.registry == "pip" else ".mjs"
        path = _SCRIPTS / f"use_{self.name.replace('-', '_')}{suffix}"
        return _SCRIPTS / "use_agents.mjs" if self.is_agent and not path.exists() else path

    @property
    def versions(self) -> dict[str, str]:
        """The version of each package."""
        parts = [re.fullmatch(r"(@?[^@=\[]+)(?:\[.*\])?(?:==|@)(.+)", package) for package in self.packages]
        return {part[1]: part[2] for part in parts if part is not None}


def read_clients() -> dict[str, Client]:
    """Return the clients of clients.toml, by name."""
    table = tomllib.loads((_HERE / "clients.toml").read_text(encoding="utf-8"))
    clients = {}
    for kind in ("clients", "agents"):
        for name, entry in table[kind].items():
            without = entry.pop("without", [])
            [(registry, packages)] = entry.items()
            made = Client(name, registry, packages, without, table["before"], table["pip"], kind == "agents")
            clients[name] = made
    return clients


def command(client: Client, home: Path) -> list[str]:
    """Return the command that runs the client's script, and create its environment below `home` if needed.

    Raises MissingError if the environment cannot be created.
    """
    folder = home / client.name
    stamp = folder / "made-of.json"
    made_of = json.dumps([client.registry, client.packages, client.without, client.before, client.pip])
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != made_of:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        print(f"{client.name}: installing {', '.join(client.packages)}", flush=True)
        (_install_python if client.registry == "pip" else _install_node)(client, folder, home)
        stamp.write_text(made_of, encoding="utf-8")
    if client.registry == "pip":
        return [str(folder / "bin" / "python"), str(client.script)]
    # Node searches packages in the script's folder.
    for file in (client.script, _SCRIPTS / "zoo.mjs"):
        shutil.copyfile(file, folder / file.name)
    return ["node", str(folder / client.script.name), client.name]


def _install_python(client: Client, folder: Path, home: Path) -> None:
    installer = home / "pip" / "bin" / "python"
    if not installer.exists():
        _run(sys.executable, "-m", "venv", str(home / "pip"))
    if f"pip {client.pip.partition('==')[2]} " not in _run(str(installer), "-m", "pip", "--version"):
        _run(str(installer), "-m", "pip", "install", client.pip)
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    pip = (str(installer), "-m", "pip", "--python", str(folder / "bin" / "python"))
    _run(*pip, "install", "--uploaded-prior-to", client.before, *client.packages)
    if client.without:
        _run(*pip, "uninstall", "--yes", *client.without)


def _install_node(client: Client, folder: Path, home: Path) -> None:
    (folder / "package.json").write_text('{"type": "module", "private": true}', encoding="utf-8")
    # Agents install their programs by scripts.
    scripts = () if client.is_agent else ("--ignore-scripts",)
    quiet = ("--no-audit", "--no-fund", *scripts, "--loglevel", "error")
    _run("npm", "install", "--prefix", str(folder), "--before", client.before, *quiet, *client.packages)


def _run(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise MissingError(f"this machine has no {words[0]}; install it") from None
    if done.returncode:
        output = " ".join((done.stderr or done.stdout).split())
        raise MissingError(f"{Path(words[0]).name} failed: {output[-_MAX_SHOWN:]}")
    return done.stdout
