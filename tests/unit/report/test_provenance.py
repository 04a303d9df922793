"""Provenance of results."""

from __future__ import annotations

import json
import re

from specinfer.report import provenance
from specinfer.version import VERSION


def test_it_names_versions_hardware_and_date() -> None:
    facts = provenance.provenance()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["versions"]["specinfer"] == VERSION
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", facts["date"])
    assert facts["hardware"]["cpu"].strip()
    assert facts["hardware"]["cores"] >= 1
    assert facts["commit"] is None or re.fullmatch(r"[0-9a-f]{12}\+?", facts["commit"])
