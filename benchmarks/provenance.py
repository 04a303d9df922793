"""Where a number comes from, as Markdown: command, commit, versions, hardware."""

from __future__ import annotations

import sys
from pathlib import Path

from specinfer.bench.provenance import provenance


def provenance_lines() -> list[str]:
    """Markdown lines that say how and where the figures above them were measured."""
    facts = provenance()
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


def _short(argument: str) -> str:
    """Paths by their last part: where a file lay on some machine helps nobody."""
    name, sign, path = argument.rpartition("=")
    return name + sign + (Path(path).name if "/" in path else path)
