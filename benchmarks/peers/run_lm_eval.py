"""Runs lm-evaluation-harness on tasks of a folder; identity/lm_eval_parity.py sends the job as JSON on stdin.

It runs in the environment that `make test-clients ARGS=lm-eval` makes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager


def main() -> None:
    job: dict[str, Any] = json.load(sys.stdin)
    results = lm_eval.simple_evaluate(
        model=job["model"],
        model_args=job["model_args"],
        tasks=job["tasks"],
        task_manager=TaskManager(include_path=job["folder"]),
        device="cpu",
        bootstrap_iters=0,
    )
    scores = {}
    for task in job["tasks"]:
        rows = sorted(results["samples"][task], key=lambda row: row["doc_id"])
        scores[task] = {
            "accuracy": results["results"][task]["acc,none"],
            "answers": [row["filtered_resps"] for row in rows],  # for each choice: log-likelihood, greedy
        }
    Path(job["out"]).write_text(json.dumps(scores), encoding="utf-8")


if __name__ == "__main__":
    main()
