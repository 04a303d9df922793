"""The families that are read are those that the docs list, and each refuses what no decoder computes."""

from __future__ import annotations

import re
from pathlib import Path

from specinfer.models.families.registry import GGUF_FAMILIES, HF_FAMILIES

DOCS = Path(__file__).parents[3] / "docs" / "options.md"


def test_the_docs_list_every_family() -> None:
    rows = re.findall(r"^  \| [A-Z].* \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    columns = [row.strip(" |").split(" | ") for row in rows]
    listed = [[name for row in columns for name in re.findall(r"`(.+?)`", (*row, "")[i])] for i in (1, 2)]
    assert sorted(listed[0]) == sorted(HF_FAMILIES)
    assert sorted({*listed[1]}) == sorted(GGUF_FAMILIES)
