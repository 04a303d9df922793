"""A fake worker: counts up from the prompt's last token, one token in the first step, then two per step.

The option `mishap` makes it fail while loading, fail or stall in an answer, or print to stdout.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "peers"))

from worker import Arrived, Generate, serve


def start(setup: dict[str, Any]) -> tuple[Generate, dict[str, str]]:
    mishap = setup["options"].get("mishap")
    if mishap == "load":
        raise RuntimeError("no such model")
    if mishap == "print":
        print("a library's greeting")

    def generate(prompt: list[int], max_tokens: int, arrived: Arrived) -> None:
        if mishap == "answer":
            raise RuntimeError("out of memory")
        if mishap == "sleep":
            time.sleep(60)
        if mishap == "short":
            max_tokens -= 1
        text = [prompt[-1] + 1 + i for i in range(max_tokens)]
        arrived(text[:1])
        for i in range(1, max_tokens, 2):
            time.sleep(0.001)
            arrived(text[i : i + 2])
        arrived([])  # an empty step counts for nothing

    return generate, {"fake": "1.0"}


if __name__ == "__main__":
    serve(start)
