"""lm-evaluation-harness: two log-likelihood tasks at /v1/completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import yaml
from lm_eval.tasks import TaskManager
from zoo import MODEL, TOKENIZER, URL, ask, check

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Japan": "Tokyo"}
CHOICES = list(CAPITALS.values())
LOCAL = {"dataset_path": "json", "test_split": "test", "doc_to_text": "The capital of {{country}} is"}
CAPITAL = {"task": "capital", "output_type": "multiple_choice", "doc_to_choice": CHOICES}
LAST_WORD = {"task": "last_word", "output_type": "loglikelihood", "doc_to_target": " {{city}}"}
METRICS = {"metric_list": [{"metric": "acc"}, {"metric": "perplexity"}]}
ROWS = [json.dumps({"country": country, "city": city}) for country, city in CAPITALS.items()]
Path("capitals.jsonl").write_text("".join(f"{row}\n" for row in ROWS))
for task in (CAPITAL | {"doc_to_target": "{{city}}"}, LAST_WORD | METRICS):
    local = {**LOCAL, "dataset_kwargs": {"data_files": {"test": str(Path("capitals.jsonl").resolve())}}}
    Path(f"{task['task']}.yaml").write_text(yaml.safe_dump({**local, **task}))


def evaluated(tasks: list[str], **more: Any) -> dict:
    """Return the results of tasks, with samples; prompts are token ids unless `more` changes that."""
    arguments = {"model": MODEL, "base_url": f"{URL}/completions", "max_retries": 1}
    arguments |= {"tokenizer": TOKENIZER, "tokenizer_backend": "huggingface", **more}
    given = {"tasks": tasks, "task_manager": TaskManager(include_path="."), "bootstrap_iters": 0}
    return lm_eval.simple_evaluate(model="local-completions", model_args=arguments, **given)


def likelihoods(results: dict, task: str) -> list[tuple[float, bool]]:
    """Return (log-likelihood, is greedy) of each choice of each row."""
    rows = sorted(results["samples"][task], key=lambda row: row["doc_id"])
    return [tuple(answer) for row in rows for answer in row["filtered_resps"]]


@check
def two_tasks_of_log_likelihoods() -> None:
    results = evaluated(["capital", "last_word"])
    assert results["results"]["capital"]["acc,none"] >= 0.8
    assert results["results"]["last_word"]["acc,none"] >= 0.6
    answers = likelihoods(results, "last_word")
    chosen = likelihoods(results, "capital")
    for row, (country, city) in enumerate(CAPITALS.items()):
        total, greedy = answers[row]
        assert chosen[row * len(CHOICES) + CHOICES.index(city)] == (total, greedy)
        written = ask("/v1/completions", prompt=f"The capital of {country} is", temperature=0, max_tokens=3)
        assert greedy == written["choices"][0]["text"].startswith(f" {city}")


@check
def batches_of_prompts_are_read_as_one_by_one() -> None:
    one = likelihoods(evaluated(["capital"]), "capital")
    assert likelihoods(evaluated(["capital"], batch_size=4, num_concurrent=2), "capital") == one


@check
def prompts_may_be_texts() -> None:
    ids = likelihoods(evaluated(["last_word"]), "last_word")
    assert likelihoods(evaluated(["last_word"], tokenized_requests=False), "last_word") == ids
