"""Measures servers under load, with speculation and without, for 1, 2, ... concurrent users over HTTP.

    make peers-env                                   once: the others, each in its own environment
    python -m benchmarks.load.serving --model TARGET.gguf --draft SSM.gguf --dataset alpaca.jsonl

Every engine is a server process that runs for one round. Beside each mode with speculation the same engine
runs without. A missing or failing server is a row with its reason. A JSON file beside the Markdown keeps
every finished cell: an interrupted run continues, and failed cells run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any, Final

import numpy as np

from benchmarks.load.client import Answer, Client
from benchmarks.peers.engines import INSTALL, Home, WeightsError, default_home, select
from benchmarks.peers.process import Server, WorkerError, free_port
from benchmarks.study import REQUIRED, Study, digest, in_turn, natural, parser, run, spread, table
from specinfer.hub import resolve
from specinfer.kernels.machine import thread_count
from specinfer.report.dataset import read_dataset

LEAST: Final = 8  # min requests of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One server in one mode.

    Command and variables may contain $python (of its environment), $model, $draft, $port, $threads, $cores
    (a range of $threads cores), $context (tokens of a request) and $users (the most at once).
    """

    name: str
    plain: str  # name of the same engine without speculation
    command: tuple[str, ...]
    bits: str  # precision, for the page
    environment: str | None = None  # folder of its virtual environment; None: the Python of the benchmark
    form: str = "file"  # engines.Home.weights has the forms
    variables: Mapping[str, str] = field(default_factory=dict)  # of its process

    @property
    def draft(self) -> bool:
        """True if it starts with the draft model."""
        return any("$draft" in word for word in self.command)


_AT: Final = ("--host", "127.0.0.1", "--port", "$port")
_SPECINFER: Final = (
    *("$python", "-m", "specinfer", "serve", "$model", *_AT, "--dtype", "bfloat16"),
    *("--threads", "$threads", "--max-context", "$context", "--max-batch-size", "$users"),
)
_DRAFT: Final = ("--draft", "$draft", "--draft-quantization", "int4")
_SPECINFER_MODES: Final = {
    "": ("--no-lookup",),
    "+ngram": ("--lookup",),
    "+draft": (*_DRAFT, "--no-lookup"),
    "+draft+ngram": (*_DRAFT, "--lookup"),
}
_VLLM: Final = (
    # `vllm serve` checks the version of a package that the CPU build names differently.
    *("$python", "-m", "vllm.entrypoints.openai.api_server", "--model", "$model", *_AT),
    *("--dtype", "bfloat16", "--max-model-len", "$context", "--max-num-seqs", "$users"),
)
_VLLM_GUESSING: Final[dict[str, dict[str, Any]]] = {
    "+ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1},
    "+draft": {"method": "draft_model", "model": "$draft"},
}
_VLLM_MODES: Final[dict[str, tuple[str, ...]]] = {
    "": (),
    **{name: ("--speculative-config", json.dumps({**config, "num_speculative_tokens": 4}),
              "--per-request-spec-decode-metrics", "summary")
       for name, config in _VLLM_GUESSING.items()},
}  # fmt: skip
# It answers one request at a time; by default a new one would cancel the running one.
_LLAMA_CPP: Final = (
    *("$python", "-m", "llama_cpp.server", "--model", "$model", *_AT, "--n_ctx", "$context"),
    *("--n_threads", "$threads", "--n_threads_batch", "$threads"),
    *("--logits_all", "false", "--interrupt_requests", "false", "--verbose", "false"),
)


def _engines() -> Iterator[Engine]:
    for bits, kind in (("bf16", "none"), ("int8", "int8"), ("int4", "int4")):
        plain = f"specinfer-{bits}"
        for mode, flags in _SPECINFER_MODES.items():
            command = (*_SPECINFER, "--quantization", kind, *flags)
            yield Engine(name=plain + mode, plain=plain, command=command, bits=bits)
    own = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "$cores"}
    vllm: dict[str, Any] = {"environment": "vllm", "form": "safetensors", "variables": own, "bits": "bf16"}
    for mode, flags in _VLLM_MODES.items():
        yield Engine(name=f"vllm{mode}", plain="vllm", command=(*_VLLM, *flags), **vllm)
    for form in ("q8_0", "q4_0"):
        name, bits = f"llama.cpp-{form}", f"{form.upper()}, int8 activations"
        at: dict[str, Any] = {"environment": "llama_cpp", "form": form, "bits": bits}
        yield Engine(name=name, plain=name, command=_LLAMA_CPP, **at)


ENGINES: Final = tuple(_engines())
_HEAD: Final = (
    "users | engine | bits | output tokens/s | times no speculation | requests/s | "
    "first token ms, median / p99 | per token ms, median / p99 | between chunks ms, p99 | "
    "whole answer s, median / p99 | tokens per step | failed | text as without speculation"
)


def main() -> None:
    args = arguments()
    engines = select(ENGINES, args.engines, has_draft=args.draft is not None)
    chosen = {name for engine in engines for name in (engine.name, engine.plain)}
    engines = [engine for engine in ENGINES if engine.name in chosen]
    rows = in_turn([read_dataset(path) for path in args.dataset], args.limit)
    questions = [conversation.turns[0] for conversation in rows]
    if len(questions) < max(args.users):
        sys.exit(f"error: got {len(questions)} prompts; allowed: at least {max(args.users)}, one for a user")
    names = ("limit", "max_tokens", "rounds", "threads", "users", "per_user", "context")
    settings = {name: getattr(args, name) for name in names} | {"questions": digest(questions)}
    settings |= {name: Path(getattr(args, name) or "").name for name in ("model", "draft")}
    study, home = Study("serving", args.out, settings), Home(args.home)
    for round_ in range(args.rounds):
        for engine in engines if round_ % 2 == 0 else engines[::-1]:
            keys = {users: f"{engine.name}|{round_}|{users}" for users in args.users}
            left = {u: key for u, key in keys.items() if "tokens" not in study.cells.get(key, {})}
            if left:
                serve(engine, left, questions, args, study, home)
    print(study.write(page(engines, study.cells, settings), args.threads))


def arguments() -> argparse.Namespace:
    options = parser(
        __doc__,
        **{
            "model": REQUIRED,
            "draft": None,
            "dataset": REQUIRED,
            "limit": 128,
            "max_tokens": 128,
            "rounds": 1,
        },
        **{"threads": thread_count(), "engines": "*", "timeout": 1200.0, "home": default_home()},
    )
    users = [1, 2, 4, 8, 16, 32]
    options.add_argument("--users", type=natural, nargs="+", default=users, help="(default 1 2 4 8 16 32)")
    options.add_argument("--per-user", type=natural, default=4, help="prompts for each user (default 4)")
    options.add_argument("--context", type=natural, default=4096, help="tokens of a request (default 4096)")
    return options.parse_args()


def serve(
    engine: Engine, left: Mapping[int, str], questions: Sequence[str], args: Any, study: Study, home: Home
) -> None:
    """Start an engine's server, run the load of each number of users, end it, and keep every cell."""
    try:
        with start(engine, args, home) as server:
            server.wait_until_ready(args.timeout)
            for users, key in left.items():
                few = questions[: max(LEAST, args.per_user * users)]
                study.keep(key, asyncio.run(load(server, few, users, args)))
                print(f"{key}: {study.cells[key]['tokens'] / study.cells[key]['seconds']:.1f} tokens/s")
    except (WorkerError, WeightsError) as error:
        for key in left.values():
            if "tokens" not in study.cells.get(key, {}):
                study.keep(key, {"error": str(error)})
        print(f"{engine.name}: {error}", flush=True)


def start(engine: Engine, args: Any, home: Home) -> Server:
    """Return the engine's server while it loads; raises WorkerError or WeightsError."""
    python = Path(sys.executable) if engine.environment is None else home.python(engine.environment)
    if not python.exists():
        raise WorkerError(f"not installed; {INSTALL}")
    values = {
        "python": python,
        "model": home.weights(resolve(args.model).path, engine.form),
        "draft": home.weights(resolve(args.draft).path, engine.form) if engine.draft else "",
        "port": free_port(),
        "threads": args.threads,
        "cores": f"0-{args.threads - 1}",
        "context": args.context,
        "users": max(args.users),
    }
    command, *variables = (
        [Template(text).substitute(values) for text in texts]
        for texts in (engine.command, engine.variables.values())
    )
    own = {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    return Server(command, own | dict(zip(engine.variables, *variables, strict=True)), int(values["port"]))


async def load(server: Server, questions: Sequence[str], users: int, args: Any) -> dict[str, Any]:
    """Return the cell of one load: `users` send one request at a time each."""
    answers: dict[int, Answer] = {}
    numbers = iter(range(len(questions)))
    # Prompts of runs differ, as cached prefixes and earlier answers would make every run faster than the one
    # before.
    asked = {"temperature": 0, "max_tokens": args.max_tokens, "cache_salt": str(users)}
    async with Client(server.url, args.timeout) as client:

        async def user() -> None:
            for number in numbers:
                answers[number] = await client.ask([{"role": "user", "content": questions[number]}], **asked)

        warm = [{"role": "user", "content": "Write the numbers from 1 to 50, in words."}]
        await asyncio.gather(*(client.ask(warm, **asked) for _ in range(users)))
        began, busy = time.perf_counter(), server.busy_elsewhere() - time.process_time()
        await asyncio.gather(*(user() for _ in range(users)))
        seconds = time.perf_counter() - began
        busy = server.busy_elsewhere() - time.process_time() - busy
    good = [answer for answer in answers.values() if not answer.error]
    if not good:
        raise WorkerError(answers[0].error)
    steps = [answer.tokens_per_step for answer in good if answer.tokens_per_step]
    return {
        "seconds": seconds,
        "requests": len(good),
        "failed": len(answers) - len(good),
        "tokens": sum(answer.tokens for answer in good),
        "first": [answer.first_seconds for answer in good],
        "per_token": [answer.token_seconds for answer in good],
        "gaps": [round(gap, 4) for answer in good for gap in answer.gaps],
        "whole": [answer.seconds for answer in good],
        "tokens_per_step": statistics.mean(steps) if steps else None,
        "texts": ["" if answers[n].error else digest(answers[n].text) for n in sorted(answers)],
        "busy_elsewhere": max(busy, 0.0) / seconds,
    }


def page(engines: Sequence[Engine], cells: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Return the settings, a row per number of users and engine, and conditions."""
    draft = f" (draft: {settings['draft']})" if settings["draft"] else ""
    busiest = max((cell["busy_elsewhere"] for cell in cells.values() if "tokens" in cell), default=0.0)
    return [
        f"# {settings['model']}{draft}: servers under load",
        "",
        f"Users with one chat request each at a time, greedy, at most {settings['max_tokens']} tokens; "
        f"{settings['per_user']} prompts a user, at least {LEAST} and at most {settings['limit']}, the same "
        "for every engine; no prompt is asked twice in a run, and runs share no cache where servers know "
        f"`cache_salt`. One server at a time, on {settings['threads']} threads, with the client on the same "
        f"machine; a warm-up before each run; {settings['rounds']} rounds, every second one in reverse. "
        "Median over rounds [least - most]; times no speculation: round by round. Other programs kept at "
        f"most {busiest:.2f} cores busy.",
        *table(
            _HEAD, (_row(engine, cells, settings, users) for users in settings["users"] for engine in engines)
        ),
    ]


def _row(engine: Engine, cells: Mapping[str, Any], settings: Any, users: int) -> Sequence[object]:
    def runs(name: str) -> list[Mapping[str, Any]]:
        return [cells.get(f"{name}|{r}|{users}", {}) for r in range(settings["rounds"])]

    pairs = [(run, plain) for run, plain in zip(runs(engine.name), runs(engine.plain), strict=True) if run]
    done = [run for run, _ in pairs if "tokens" in run]
    if not done:
        reason = pairs[0][0]["error"].replace("|", "/") if pairs else "not run yet"
        return users, engine.name, engine.bits, reason, *[""] * 9

    def both(name: str, unit: float, digits: int) -> str:
        values = [value * unit for run in done for value in run[name]]
        return f"{np.median(values):.{digits}f} / {np.percentile(values, 99):.{digits}f}"

    beside = [(run, plain) for run, plain in pairs if "tokens" in run and "tokens" in plain]
    ratios = [run["tokens"] / run["seconds"] * p["seconds"] / p["tokens"] for run, p in beside]
    texts = [pair for run, p in beside for pair in zip(run["texts"], p["texts"], strict=True) if all(pair)]
    alone = engine.name == engine.plain or not beside
    steps = [run["tokens_per_step"] for run in done if run["tokens_per_step"]]
    return (
        *(users, engine.name, engine.bits, spread([run["tokens"] / run["seconds"] for run in done], 1)),
        "" if alone else f"{statistics.median(ratios):.2f}",
        spread([run["requests"] / run["seconds"] for run in done], 2),
        *(both("first", 1e3, 0), both("per_token", 1e3, 1)),
        f"{1e3 * np.percentile([gap for run in done for gap in run['gaps']] or [0], 99):.0f}",
        *(both("whole", 1, 1), f"{statistics.median(steps):.2f}" if steps else ""),
        sum(run["failed"] for run in done),
        "" if alone else f"{sum(ours == theirs for ours, theirs in texts)}/{len(texts)}",
    )


if __name__ == "__main__":
    run(main)
