"""specinfer as a worker of offload/offload.py: peers/worker.py's protocol with several prompts at once.

    <- {"model": ..., "threads": 2, "options": {...}}
    -> {"versions": {...}, "own": bytes, "load_seconds": ...}   own: resident before a model is loaded
    <- {"prompts": [[1, 2, 3], ...], "params": [{...}, ...]}
    -> {"answers": [{"tokens": [...], "arrivals": [[seconds, tokens], ...]}, ...], "counted": {...}}

`counted` is the increase of `LLM.statistics()` by these answers. Without a model the worker only reports its
own memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from specinfer import LLM, RequestOutput, SamplingParams
from specinfer.version import VERSION


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of a library is not a reply
    setup = json.loads(sys.stdin.readline())
    facts: dict[str, Any] = {
        "versions": {"specinfer": VERSION, "torch": torch.__version__},
        "own": resident(),
    }
    if setup["model"] is None:
        print(json.dumps(facts), file=replies)
        return
    torch.set_num_threads(setup["threads"])
    began = time.perf_counter()
    with LLM(setup["model"], **setup["options"]) as llm:
        print(json.dumps(facts | {"load_seconds": time.perf_counter() - began}), file=replies)
        for line in sys.stdin:
            print(json.dumps(answered(llm, json.loads(line))), file=replies)


def answered(llm: LLM, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answers to one request's prompts, which run together."""
    arrivals: dict[str, list[tuple[float, int]]] = {}
    lengths: dict[str, int] = {}
    before, began = llm.statistics(), time.perf_counter()

    def arrived(output: RequestOutput) -> None:
        new = len(output.token_ids) - lengths.get(output.request_id, 0)
        if new:
            lengths[output.request_id] = len(output.token_ids)
            arrivals.setdefault(output.request_id, []).append((time.perf_counter() - began, new))

    params = [SamplingParams(**options) for options in request["params"]]
    outputs = llm.generate(request["prompts"], params, on_output=arrived)
    counted = asdict(llm.statistics().since(before))
    llm.check_integrity()
    return {
        "answers": [{"tokens": out.token_ids, "arrivals": arrivals[out.request_id]} for out in outputs],
        "counted": {name: value for name, value in counted.items() if isinstance(value, int | float)},
    }


def resident() -> int:
    """Return the resident bytes of this process; 0 if unknown."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    except OSError:
        return 0
    return int(fields["VmRSS"].split()[0]) << 10


if __name__ == "__main__":
    main()
