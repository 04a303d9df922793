"""Run common tasks of published clients against one server, each client in its own environment.

    python -m tests.clients.run [NAME...] [--page docs/clients.md]

A client's work is a script of tests/clients/scripts, and clients.toml lists its packages. Environments are
kept in $SPECINFER_CLIENTS, else ~/.cache/specinfer-clients. The exit status is 1 if any check fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from specinfer.hub import resolve
from specinfer.report.provenance import provenance
from specinfer.tokenizer.gguf_vocabulary import write_tokenizer
from tests.clients.agent_server import PROGRAM
from tests.clients.environments import Client, MissingError, command, read_clients
from tests.clients.visit import Check, Visit, visit
from tests.scripted_server import MODEL
from tests.served import Served


def main() -> None:
    clients = read_clients()
    args = _arguments(sorted(clients))
    chosen = [clients[name] for name in args.names] if args.names else list(clients.values())
    commands: dict[str, list[str]] = {}
    visits: dict[str, Visit] = {}
    for client in chosen:  # before the server starts, because installing would slow it down
        try:
            commands[client.name] = command(client, args.home)
        except MissingError as error:
            visits[client.name] = Visit([Check("its packages can be installed", False, str(error))], 0, 0)
    agents = {name: words for name, words in commands.items() if clients[name].is_agent}
    others = {name: words for name, words in commands.items() if name not in agents}
    if others:
        with tempfile.TemporaryDirectory() as tokenizer:
            write_tokenizer(resolve(args.model), Path(tokenizer))
            flags = ("--log-format", "json", "--served-model-name", args.model, "--call-format", "hermes")
            with Served(args.model, *flags) as server:
                visits |= _visits(others, args.home, server, ZOO_MODEL=args.model, ZOO_TOKENIZER=tokenizer)
    if agents:
        with Served(MODEL, script=PROGRAM) as server:
            visits |= _visits(agents, args.home, server, ZOO_MODEL=MODEL)
    failed = [name for name, done in visits.items() if not done.passed]
    if args.page is not None:
        args.page.write_text("\n".join(page(chosen, visits, args.model)) + "\n", encoding="utf-8")
    print(f"{len(visits) - len(failed)} of {len(visits)} clients passed all checks")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; see {args.home}/homes/NAME/log.txt")


def _visits(commands: Mapping[str, list[str]], home: Path, server: Served, **given: str) -> dict[str, Visit]:
    visits = {}
    for name, words in commands.items():
        visits[name] = visit(words, home / "homes" / name, server, {**given, "ZOO_URL": server.url})
        print(_summary(name, visits[name]), flush=True)
    return visits


def _arguments(names: Sequence[str]) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--model", default="smollm2-135m", help="served model (default %(default)s)")
    parser.add_argument("--page", type=Path, help="write the results as a Markdown page")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specinfer-clients"
    home = Path(os.environ.get("SPECINFER_CLIENTS") or cache)
    parser.add_argument("--home", type=Path, default=home, help="environments' folder (SPECINFER_CLIENTS)")
    args = parser.parse_args()
    if unknown := sorted({*args.names} - {*names}):
        parser.error(f"unknown clients: {', '.join(unknown)}; allowed: {', '.join(names)}")
    return args


def _summary(name: str, done: Visit) -> str:
    passed = sum(check.passed for check in done.checks)
    lines = [f"{name}: {passed} of {len(done.checks)} checks passed, {done.requests} requests"]
    lines += [f"    {check.title}: {check.note}" for check in done.checks if not check.passed]
    return "\n".join(lines)


def page(clients: Sequence[Client], visits: Mapping[str, Visit], model: str) -> list[str]:
    """Return the page as lines of Markdown."""
    where = provenance()
    machine = where["hardware"]
    lines = [
        "# Clients",
        "",
        "Each client, as published in its registry, runs common tasks against one `specinfer serve`.",
        "Its script in `tests/clients/scripts/` has the checks: whole and streamed answers, tools, forms,",
        "agents, errors, as far as the client has them. The run also reads the server's log: a client fails",
        "if a request is refused that its script does not expect to be refused.",
        "",
        f'- command: `make test-clients ARGS="--page docs/clients.md"`, model `{model}`',
        f"- server: `specinfer serve {model} --call-format hermes`, everything else at its default",
        "- agents, from claude-code on: the same server with scripted answers that call their shell",
        f"- date and commit: {where['date'][:10]}, {where['commit']}",
        f"- hardware: {machine['cpu']}, {machine['cores']} cores",
        "",
        "| client | versions | checks passed | requests | expected refusals |",
        "|---|---|---|---|---|",
    ]
    for client in clients:
        done = visits[client.name]
        versions = ", ".join(f"{package} {version}" for package, version in client.versions.items())
        passed = f"{sum(check.passed for check in done.checks)} of {len(done.checks)}"
        lines.append(f"| {client.name} | {versions} | {passed} | {done.requests} | {done.refused} |")
    failed = [(name, check) for name, done in visits.items() for check in done.checks if not check.passed]
    lines += ["", *(f"- {name} fails: {check.title}: {check.note}" for name, check in failed)]
    return lines if failed else lines[:-1]


if __name__ == "__main__":
    main()
