"""Where a number comes from, as Markdown: command, commit, versions, hardware; and where it is kept."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path

from specinfer.report.provenance import hardware, provenance

RESULTS = Path(__file__).parent / "results"


def provenance_lines(threads: int | None = None) -> list[str]:
    """Markdown lines that say how and where the figures above were measured; `threads` is the option."""
    facts = provenance(threads)
    versions, hardware = facts["versions"], facts["hardware"]
    command = " ".join(["python", "benchmarks/" + Path(sys.argv[0]).name, *map(_short, sys.argv[1:])])
    return [
        f"- date: {facts['date'][:10]}",
        f"- command: `{command}`",
        f"- commit: {facts['commit'] or 'not a checkout'}",
        f"- specinfer {versions['specinfer']}, Python {versions['python']}, torch {versions['torch']}",
        f"- hardware: {hardware['cpu']}, {hardware['cores']} cores, "
        f"{hardware['memory_bytes'] / 2**30:.0f} GiB, {hardware['threads']} threads"
        + "".join(f", {gpu}" for gpu in hardware["gpus"]),
    ]


def default_result(question: str, model: str) -> Path:
    """results/<question>_<model>_<hardware>_<date>.md, which may be there already."""
    facts = hardware()
    brand = re.split(r" \(family| amx| avx", facts["cpu"])[0]
    machine = "-".join([*re.findall(r"[a-z0-9.]+", brand.lower()), f"{facts['cores']}c"])
    return RESULTS / f"{question}_{model.lower()}_{machine}_{datetime.now(UTC):%Y-%m-%d}.md"


def _short(argument: str) -> str:
    """Paths by their last part: where a file lay on some machine helps nobody."""
    name, sign, path = argument.rpartition("=")
    return name + sign + (Path(path).name if "/" in path else path)
