"""Provenance of results."""

from __future__ import annotations

import json
import re

import pytest

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


@pytest.mark.parametrize(("option", "threads"), [(None, 8), (3, 3)])
def test_threads_are_those_of_the_engine(
    option: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch has one thread in the tests, as it has beside native kernels.
    monkeypatch.setattr(provenance, "thread_count", lambda wanted: wanted or 8)
    assert provenance.provenance(option)["hardware"]["threads"] == threads


def test_an_installed_copy_has_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    # A .venv inside another repository must not report that repository's commit.
    installed = "/usr/lib/python3/site-packages/specinfer/report/provenance.py"
    monkeypatch.setattr(provenance, "__file__", installed)
    assert provenance.commit() is None
