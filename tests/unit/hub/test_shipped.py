"""Heads that come with the package: there, small enough, and what they say they are."""

from __future__ import annotations

import json
import re

import pytest

from specinfer.heads.checkpoint import is_head
from specinfer.hub import CATALOGUE, resolve
from specinfer.hub.catalogue import SHIPPED_HEADS


@pytest.mark.parametrize("name", SHIPPED_HEADS)
def test_a_shipped_head_is_in_the_package(name: str) -> None:
    found = resolve(name)
    assert found.name == name
    assert is_head(found.path)
    assert sum(file.stat().st_size for file in found.path.iterdir()) <= 12 << 20
    described = json.loads((found.path / "config.json").read_text())
    verifier = described["speculators_config"]["verifier"]["name_or_path"]
    assert verifier == SHIPPED_HEADS[name]
    assert verifier in CATALOGUE
    assert re.fullmatch(r"[0-9a-f]{64}", described["target_fingerprint"])
    card = (found.path / "README.md").read_text()
    for part in ("## Licence", "Apache-2.0", "CC BY-SA 3.0", "MIT", CATALOGUE[verifier].file):
        assert part in card
