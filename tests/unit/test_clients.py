"""The table of real clients, their scripts, and the page that says what each did: nothing runs here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clients.environments import Client, read_clients
from tests.clients.run import page
from tests.clients.visit import Check, Visit

CLIENTS = read_clients()
SCRIPTS = Path(__file__).parents[1] / "clients" / "scripts"


@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
def test_a_client_has_exact_versions_and_a_script_with_checks(client: Client) -> None:
    assert len(client.versions) == len(client.packages)
    assert client.registry in ("pip", "npm")
    assert re.search(r"^(@check|await check\()", client.script.read_text(encoding="utf-8"), re.MULTILINE)


def test_every_script_is_a_clients() -> None:
    assert {client.script for client in CLIENTS.values()} == set(SCRIPTS.glob("use_*"))


def test_the_page_names_versions_and_failures() -> None:
    client = Client("x", "pip", ["openai==3.57.0"], [], "2026-01-01", "pip==26.3")
    done = Visit([Check("it asks", True, ""), Check("it hears", False, "TypeError: deaf")], 3, 1)
    lines = page([client], {"x": done}, "tiny")
    assert "| x | openai 3.57.0 | 1 of 2 | 3 | 1 |" in lines
    assert lines[-1] == "- x fails: it hears: TypeError: deaf"
