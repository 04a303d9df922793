"""Compares lm-evaluation-harness through /v1/completions with the model in transformers, in float32.

    make test-clients ARGS=lm-eval                   once: installs the harness in its own environment
    python -m benchmarks.identity.lm_eval_parity --model FILE.gguf --dataset piqa.jsonl --dataset webq.jsonl

Each data set becomes a multiple-choice task decided by log-likelihoods. A row's choices are its solutions, if
it has any (sol1, sol2, label); otherwise its reference and those of the next rows with other references. The
harness sends the token ids of each prompt to our server (echo, logprobs), then runs its own backend (hf).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.process import WorkerError, specinfer_server
from benchmarks.study import REQUIRED, Study, parser, row, run, settings_of
from specinfer.errors import DatasetError
from specinfer.hub import resolve
from specinfer.report.dataset import json_object, read_rows
from specinfer.tokenizer.gguf_vocabulary import write_tokenizer

WORKER = Path(__file__).parents[1] / "peers" / "run_lm_eval.py"
CHOICES = 4  # for a row without its own
STARTING = 300.0  # seconds
SIDES = ("specinfer", "transformers")


def main() -> None:
    args = arguments()
    study = Study("lm_eval", args.out, settings_of(args, without=("python",)))
    if not args.python.exists():
        sys.exit(f"error: {args.python} is not there; run: make test-clients ARGS=lm-eval")
    with tempfile.TemporaryDirectory() as folder:
        tasks = [write_task(path, args.limit, Path(folder)) for path in args.dataset]
        write_tokenizer(resolve(args.model), Path(folder))
        for side in SIDES:
            if side not in study.cells:
                study.keep(side, {"tasks": measured(side, args, tasks, folder)})
                print(f"{side}: done", flush=True)
    ours, theirs = (study.cells[side]["tasks"] for side in SIDES)
    lines, alike = page(study.settings, tasks, ours, theirs, args.within)
    print(study.write(lines))
    raise SystemExit(0 if alike else 1)


def arguments() -> argparse.Namespace:
    options = parser(__doc__, model=REQUIRED, dataset=REQUIRED, limit=200)
    options.add_argument("--within", type=float, default=1e-2, help="log-likelihoods may differ by this much")
    clients = os.environ.get("SPECINFER_CLIENTS")
    home = Path(clients) if clients else Path.home() / ".cache" / "specinfer-clients"
    options.add_argument(
        "--python", type=Path, default=home / "lm-eval" / "bin" / "python", help="the harness's Python"
    )
    return options.parse_args()


def write_task(path: Path, limit: int, folder: Path) -> str:
    """Write a task of the first `limit` rows of a data set for the harness; return its name."""
    rows, faults = read_rows(path, lambda line, _, where: json_object(line, where, "give one object a line"))
    if faults:
        raise DatasetError(faults[0])
    docs = [question for n in range(min(limit, len(rows))) if (question := with_choices(rows, n))]
    data = folder / f"{path.stem}.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs), encoding="utf-8")
    task = {
        "task": path.stem,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
    }
    (folder / f"{path.stem}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    return path.stem


def with_choices(rows: Sequence[Mapping[str, Any]], number: int) -> dict[str, Any]:
    """Return a row as a question with choices and the number of the correct one."""
    this = rows[number]
    if "sol1" in this:
        return {"question": this["prompt"], "choices": [this["sol1"], this["sol2"]], "label": this["label"]}
    choices = [first(this["reference"])]
    for other in (*rows[number + 1 :], *rows[:number]):
        if len(choices) < CHOICES and (said := first(other["reference"])) not in choices:
            choices.append(said)
    label = number % len(choices)  # the correct one does not always come first
    choices[0], choices[label] = choices[label], choices[0]
    return {"question": this["prompt"], "choices": choices, "label": label}


def first(reference: str | Sequence[str]) -> str:
    return reference if isinstance(reference, str) else reference[0]


def measured(side: str, args: argparse.Namespace, tasks: Sequence[str], folder: str) -> dict[str, Any]:
    """Return the harness's results of each task with one of the two backends."""
    tokenizer = {"tokenizer": folder}
    if side == "transformers":
        target = resolve(args.model).path
        place = {"pretrained": str(target)}
        if target.is_file():
            place = {"pretrained": str(target.parent), "gguf_file": target.name}
        return evaluate(
            args, tasks, folder, "hf", {**place, **tokenizer, "dtype": "float32", "batch_size": 4}
        )
    with specinfer_server(args.model, "--dtype", "float32", "--served-model-name", "model") as server:
        try:
            server.wait_until_ready(STARTING)
        except WorkerError as error:
            sys.exit(f"error: the server {error}")
        options = {
            "model": "model",
            "base_url": f"{server.url}/v1/completions",
            "tokenizer_backend": "huggingface",
            "num_concurrent": 4,
            "batch_size": 4,
            "timeout": 3600,
        }
        return evaluate(args, tasks, folder, "local-completions", {**options, **tokenizer})


def evaluate(
    args: argparse.Namespace, tasks: Sequence[str], folder: str, model: str, model_args: Mapping[str, Any]
) -> dict[str, Any]:
    """Run the harness in its environment, without a network."""
    out = Path(folder) / "results.json"
    job = {"model": model, "model_args": model_args, "tasks": tasks, "folder": folder, "out": str(out)}
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    done = subprocess.run(
        [str(args.python), str(WORKER)],
        input=json.dumps(job),
        text=True,
        check=False,
        env={**os.environ, **offline, "HF_HOME": folder},
    )
    if done.returncode:
        sys.exit(f"error: the harness ended with status {done.returncode}; its last words stand above")
    results: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return results


def page(
    settings: Mapping[str, Any],
    tasks: Sequence[str],
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    within: float,
) -> tuple[list[str], bool]:
    """Return the page as lines of Markdown, and whether both sides agree."""
    lines = [
        f"# {settings['model']}: lm-evaluation-harness through /v1/completions and in transformers, float32",
        "",
        row("task", "rows", "choices", "accuracy, specinfer", "accuracy, transformers",
            "largest difference of a log-likelihood", "greedy or not: differ"),
        row(*["---"] * 7),
    ]  # fmt: skip
    alike = True
    for task in tasks:
        pairs = [
            (mine, other)
            for rows in zip(ours[task]["answers"], theirs[task]["answers"], strict=True)
            for mine, other in zip(*rows, strict=True)
        ]
        most = max(abs(mine[0] - other[0]) for mine, other in pairs)
        greedy = sum(mine[1] != other[1] for mine, other in pairs)
        accuracy = ours[task]["accuracy"], theirs[task]["accuracy"]
        alike = alike and accuracy[0] == accuracy[1] and most <= within
        shown = (f"{value:.3f}" for value in accuracy)
        lines.append(row(task, len(ours[task]["answers"]), len(pairs), *shown, f"{most:.1e}", greedy))
    lines += ["", f"Equal accuracy and log-likelihoods within {within:g}: {'yes' if alike else 'no'}."]
    return lines, alike


if __name__ == "__main__":
    run(main)
