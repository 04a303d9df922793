"""The child's side of the protocol: an engine behind stdin and stdout, one JSON object per line.

    <- {"model": ..., "draft": ..., "threads": 2, "context": 1024, "options": {...}}
    -> {"versions": {"name": "1.2.3"}}                                when the engine is loaded
    <- {"prompt": [1, 2, 3], "max_tokens": 32}                        any number of times
    -> {"tokens": [...], "arrivals": [[seconds, tokens], ...]}        seconds from the request on

The target's tokens of one step arrive together, so an arrival is a step. The end of input ends the worker. An
error ends it, too; its last line on stderr is the reported reason.

It imports only the standard library, because every engine's environment runs this file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Arrived = Callable[[Sequence[int]], None]
Generate = Callable[[list[int], int, Arrived], None]  # prompt, max_tokens, callback for each step's tokens
Setup = dict[str, Any]


def serve(start: Callable[[Setup], tuple[Generate, dict[str, str]]]) -> None:
    """Answer stdin's requests with the engine that `start` makes from the first; it also returns versions."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of a library is not a reply
    generate, versions = start(json.loads(sys.stdin.readline()))
    print(json.dumps({"versions": versions}), file=replies)
    for line in sys.stdin:
        request = json.loads(line)
        tokens: list[int] = []
        arrivals: list[tuple[float, int]] = []
        began = time.perf_counter()

        def arrived(
            new: Sequence[int],
            tokens: list[int] = tokens,
            arrivals: list[tuple[float, int]] = arrivals,
            began: float = began,
        ) -> None:
            if len(new):
                arrivals.append((time.perf_counter() - began, len(new)))
                tokens.extend(map(int, new))

        generate(request["prompt"], request["max_tokens"], arrived)
        print(json.dumps({"tokens": tokens, "arrivals": arrivals}), file=replies)
