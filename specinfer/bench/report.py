"""Comparison of two runs as JSON and as a terminal table."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from specinfer.bench.run import Comparison, EngineRun, Key, Load
from specinfer.check.difference import TextPromise, text_promise
from specinfer.engine.steps import Stage
from specinfer.kernels.disk import gigabytes
from specinfer.llm import LLM
from specinfer.report.dataset import Dataset
from specinfer.report.provenance import provenance
from specinfer.request import RequestOutput

STAGES = (Stage.PROPOSE, Stage.FORWARD, Stage.VERIFY)
BUSY = 0.1  # share of the cores; if other programs use more, speeds are unreliable
OTHER = "everything_else"  # scheduling, committing, tokenizing, sending requests


def as_json(comparison: Comparison, llm: LLM, dataset: Dataset, load: Load) -> dict[str, Any]:
    """Return all measurements and the settings to repeat them.

    Fields have the names of `vllm bench serve` if it has them: rates are per second, times in milliseconds.
    `llm` is the speculating engine.
    """
    promised = text_promise(load.params, llm.config.speculation.verifier, llm.models.target.device)
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        **provenance(llm.config.threads),
        "model": llm.config.model,
        "options": options_of(llm, load),
        "dataset": {
            "name": dataset.name,
            "conversations": len(dataset.conversations),
            "requests": dataset.num_turns,
            "duplicates_dropped": dataset.duplicates,
        },
        "requests": len(comparison.pairs),
        "identical": comparison.identical,
        "promised": promised.value,
        "speedup": comparison.speedup,
        "group_speedups": comparison.group_speedups,
        "busy_elsewhere_cores": comparison.busy_elsewhere,
        "tokens_per_step": comparison.speculative.figures.tokens_per_step,
        "baseline": _run(comparison.baseline),
        "speculative": _run(comparison.speculative),
    }


def options_of(llm: LLM, load: Load) -> dict[str, Any]:
    """Return the options and the values chosen for `auto`, as plain JSON values."""
    speculation, target = llm.config.speculation, llm.models.target
    return {
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantization": llm.config.quantization,
        "device": str(target.device),
        "batch_size": load.batch_size,
        "chat": load.chat,
        "sampling": asdict(load.params),
        "speculation": {
            **asdict(speculation),
            "expansion": speculation.shape,
            "draw": speculation.draw_rule.value,
        },
        "scheduler": asdict(llm.config.scheduler),
        "cache": asdict(llm.config.cache),
        "lora": list(llm.config.adapters),
        "memory": llm.config.memory,
        "memory_plan": None if (plan := llm.models.plan) is None else str(plan),
    }


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Return mean, median and 99th percentile of times, in ms; zeros without times."""
    if not seconds:
        return {"mean": 0.0, "median": 0.0, "p99": 0.0}
    values = 1e3 * np.asarray(seconds)
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "p99": float(np.percentile(values, 99)),
    }


def acceptance_per_depth(accepted: Sequence[int], drafted: Sequence[int]) -> list[float]:
    """Return the share of steps with a node at depth d = 1, 2, ... that accepted one there."""
    padded = [*accepted, *[0] * (len(drafted) - len(accepted))]
    return [hits / steps if steps else 0.0 for hits, steps in zip(padded, drafted, strict=True)]


def _run(run: EngineRun) -> dict[str, Any]:
    figures = run.figures
    stages = {stage.value: run.done.stage_seconds[stage] for stage in STAGES}
    stages[OTHER] = max(run.seconds - sum(stages.values()), 0.0)
    outputs = list(run.outputs.values())
    return {
        "completed": len(run.outputs),
        "failed": len(run.failures),
        "failures": [{"request": _name(key), "error": error} for key, error in sorted(run.failures.items())],
        "duration": run.seconds,
        "total_input": sum(len(output.prompt_token_ids) for output in outputs),
        "total_output": run.total_output,
        "request_throughput": len(run.outputs) / run.seconds,
        "output_throughput": run.output_throughput,
        "ttft_ms": milliseconds([_ttft(output) for output in outputs]),
        "tpot_ms": milliseconds([_tpot(output) for output in outputs if len(output.token_ids) > 1]),
        "e2el_ms": milliseconds([_finished(output) - output.timing.arrived for output in outputs]),
        "steps": figures.steps,
        "tokens_per_step": figures.tokens_per_step,
        "acceptance_per_depth": acceptance_per_depth(figures.accepted_per_depth, figures.drafted_per_depth),
        "drafted_tokens": figures.drafted_tokens,
        "accepted_tokens": figures.accepted_tokens,
        "credit": {
            name: {"proposed": proposed, "accepted": figures.accepted_by.get(name, 0)}
            for name, proposed in figures.proposed_by.items()
        },
        "stages": {
            name: {"seconds": seconds, "share": seconds / run.seconds} for name, seconds in stages.items()
        },
        "preemptions": run.done.preemptions,
        "peak_memory_bytes": run.peak_memory,
        "passes": run.done.steps,
        "tokens_per_pass": run.total_output / run.done.steps,  # of the target, prefill included
        "streamed_bytes": run.done.streamed_bytes,
        "stream_wait_seconds": run.done.stream_wait_seconds,
    }


def _ttft(output: RequestOutput) -> float:
    ttft = output.timing.ttft
    assert ttft is not None, "the answer is whole"
    return ttft


def _finished(output: RequestOutput) -> float:
    assert output.timing.finished is not None, "the answer is whole"
    return output.timing.finished


def _tpot(output: RequestOutput) -> float:
    """Seconds per token after the first."""
    first = output.timing.arrived + _ttft(output)
    return (_finished(output) - first) / (len(output.token_ids) - 1)


def _name(key: Key) -> str:
    """Return conversation and turn, counted from 1."""
    return f"{key[0] + 1}.{key[1] + 1}"


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return facts that the table does not show; `result` comes from `as_json`."""
    speculative = result["speculative"]
    rates = " ".join(f"{100 * rate:.0f}%" for rate in speculative["acceptance_per_depth"])
    accepted_by = ", ".join(
        f"{name} {counts['accepted']} of {counts['proposed']}"
        for name, counts in speculative["credit"].items()
    )
    facts = [
        _speedup(result),
        f"accepted at depth 1, 2, ...: {rates or 'nothing was guessed'}",
        f"accepted tokens by speculator: {accepted_by or 'none'}",
        _identity(result),
    ]
    for name in ("baseline", "speculative"):
        if failures := result[name]["failures"]:
            first = failures[0]
            facts.append(
                f"failed requests in the {name} run: {len(failures)}; request {first['request']}: "
                f"{first['error']}"
            )
    if dropped := result["dataset"]["duplicates_dropped"]:
        facts.append(f"repeated prompts that were dropped: {dropped}")
    return facts


def _speedup(result: Mapping[str, Any]) -> str:
    sentence = f"speedup: {result['speedup']:.2f}x in output tokens/s, prompts included"
    if len(result["group_speedups"]) >= 4:
        low, middle, high = np.percentile(result["group_speedups"], (25, 50, 75))
        sentence += f"; by groups of prompts {middle:.2f}x (quartiles {low:.2f} to {high:.2f})"
    busy = result["busy_elsewhere_cores"]
    if busy > BUSY * (result["hardware"]["cores"] or 1):
        sentence += (
            f"\nother programs used {busy:.1f} of {result['hardware']['cores']} cores during the run: "
            "the speeds are unreliable; measure again on an idle machine"
        )
    return sentence


def _identity(result: Mapping[str, Any]) -> str:
    sentence = f"identical texts: {result['identical']} of {result['requests']}"
    promised = TextPromise(result["promised"])
    if promised is TextPromise.LAW:
        return f"{sentence} (sampling with mss keeps the law of the text, not the text)"
    if result["identical"] == result["requests"]:
        return sentence
    if promised is TextPromise.IDENTICAL:
        return f"{sentence}, but here all must be identical; run `specinfer check`, and please report them"
    device = result["options"]["device"]
    return f"{sentence}; they are not promised on {device}: `specinfer check` tells rounding from faults"


def table(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return rows of name, value without speculation and value with it; `result` comes from `as_json`."""
    runs = result["baseline"], result["speculative"]

    def row(name: str, value: Any) -> tuple[str, str, str]:
        return name, value(runs[0]), value(runs[1])

    def times(key: str) -> Any:
        return lambda run: " / ".join(f"{run[key][part]:.1f}" for part in ("mean", "median", "p99"))

    def share(stage: str) -> Any:
        return lambda run: f"{100 * run['stages'][stage]['share']:.0f}%"

    rows = [
        row("output tokens/s", lambda run: f"{run['output_throughput']:.1f}"),
        row("requests/s", lambda run: f"{run['request_throughput']:.2f}"),
        row("tokens per step", lambda run: f"{run['tokens_per_step']:.2f}"),
        row("time to first token, ms (mean / median / p99)", times("ttft_ms")),
        row("time per output token, ms", times("tpot_ms")),
        row("time in propose", share(Stage.PROPOSE)),
        row("time in target forward", share(Stage.FORWARD)),
        row("time in verify", share(Stage.VERIFY)),
        row("time in everything else", share(OTHER)),
        row("requests completed", lambda run: str(run["completed"])),
        row("tokens in / out", lambda run: f"{run['total_input']} / {run['total_output']}"),
        row("preemptions", lambda run: str(run["preemptions"])),
        row("peak memory (all models are loaded in both runs)", lambda run: _gib(run["peak_memory_bytes"])),
    ]
    if any(run["streamed_bytes"] for run in runs):
        rows += [
            row("tokens per pass", lambda run: f"{run['tokens_per_pass']:.2f}"),
            row("streamed from the disk", lambda run: gigabytes(run["streamed_bytes"])),
            row("waited for the disk, s", lambda run: f"{run['stream_wait_seconds']:.1f}"),
        ]
    return rows


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
