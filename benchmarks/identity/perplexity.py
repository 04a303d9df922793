"""Measures the quality of quantized weights: perplexity over given answers, relative to bfloat16.

    python -m benchmarks.identity.perplexity --model MODEL --dataset prompts/dolly.jsonl --out RESULT.md

Every row's prompt goes through the chat template, and its reference follows as the answer. The model computes
the probability of each answer token, given all tokens before it. The page also has the mean Kullback-Leibler
divergence from the bfloat16 model's laws, which has much less noise. A JSON file beside the Markdown keeps
finished rows, so an interrupted run continues.

    ... --model MODEL.gguf --quantizations gguf,gguf@float32 --llama-cpp

compares with llama.cpp over the same file and token ids (`make peers-env` installs it). A kind with @float32
has activations in float32, as llama.cpp has; one with /int8, like none/int8, has its KV cache in int8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.engines import Home
from benchmarks.study import Study, in_turn, natural, parser, run, table
from specinfer import EngineConfig
from specinfer.check.difference import PlainTarget
from specinfer.engine.models import Models, load_models
from specinfer.errors import DatasetError
from specinfer.hub import resolve
from specinfer.models.language_model import LanguageModel
from specinfer.progress import ProgressBar
from specinfer.report.dataset import Conversation, read_dataset
from specinfer.tokenizer import ChatEncoder, Tokenizer

BASE = "none"
LLAMA_CPP = "llama.cpp"  # key of its cell
ALLOWED = {"gguf": 0.5, "int8": 1.0, "int4": 6.0}  # allowed increase of perplexity, in percent


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", required=True, help="folder, GGUF file or name")
    options.add_argument("--dataset", action="append", type=Path, required=True, metavar="FILE.jsonl")
    options.add_argument("--limit", type=natural, default=200, help="rows of all data sets (default 200)")
    options.add_argument("--max-tokens", type=natural, default=1024, help="longest row; others are cut off")
    options.add_argument("--quantizations", default="int8,int4", help="compared with bfloat16")
    options.add_argument("--llama-cpp", action="store_true", help="compare with llama.cpp over a GGUF file")
    options.add_argument("--out", type=Path, required=True, metavar="PAGE.md", help="cells are beside it")
    args = options.parse_args()

    kinds = [BASE, *args.quantizations.split(",")]
    settings = {
        "model": Path(args.model).name,
        "dataset": ", ".join(path.name for path in args.dataset),
        "max_tokens": args.max_tokens,
        "quantizations": kinds,
    }
    study = Study(args.out, settings)
    conversations = in_turn([read_dataset(path) for path in args.dataset], args.limit)
    models: dict[str, Models] = {}
    for number, conversation in enumerate(conversations):
        if str(number) in study.cells:
            continue
        # All models at once, so that only one row's bfloat16 laws are in memory.
        models = models or {kind: _load(args.model, kind) for kind in kinds}
        text = answer_ids(models[BASE].tokenizer, conversation, args.max_tokens)
        study.keep(str(number), row_costs({kind: m.target for kind, m in models.items()}, *text))
        if number % 10 == 9 or number + 1 == args.limit:
            print(f"{number + 1} rows", flush=True)
    rows = [study.cells[str(i)] for i in range(len(conversations))]
    lines = page(kinds, rows, settings)
    if args.llama_cpp:
        if len(study.cells.get(LLAMA_CPP, {}).get("nats", ())) != len(rows):
            file = resolve(args.model)
            tokenizer = Tokenizer.load(file)
            texts = [answer_ids(tokenizer, conversation, args.max_tokens) for conversation in conversations]
            costs = Home().call("llama_cpp", "nats", str(file.path), "2", given=json.dumps(texts))
            study.keep(LLAMA_CPP, json.loads(costs))
        lines += beside(kinds, rows, study.cells[LLAMA_CPP])
    print(study.write(lines))


def _load(model: str, kind: str) -> Models:
    weights, _, cache = kind.partition("/")
    quantization, _, dtype = weights.partition("@")
    options = {"dtype": dtype or "bfloat16", "device": "cpu", "quantization": quantization}
    options["kv_cache_dtype"] = cache or "auto"
    return load_models(EngineConfig.from_options(model, options), ProgressBar())


def answer_ids(tokenizer: Tokenizer, conversation: Conversation, most: int) -> tuple[list[int], list[int]]:
    """Return prompt and answer as token ids, at most `most` in all."""
    if conversation.reference is None:
        raise DatasetError(f'row {conversation.name} has no "reference"; give the answer to its prompt')
    prompt = list(ChatEncoder(tokenizer).token_ids([{"role": "user", "content": conversation.turns[0]}]))
    answer = list(tokenizer.encode(conversation.reference))
    return prompt[: most - 1], answer[: most - min(len(prompt), most - 1)]


def row_costs(models: dict[str, LanguageModel], prompt: list[int], answer: list[int]) -> dict[str, Any]:
    """Return the answer's tokens and, by model, their cost in nats and the divergence of its laws."""
    found: dict[str, Any] = {"tokens": len(answer)}
    base: Tensor | None = None
    for kind, model in models.items():
        logits = PlainTarget(model).logits_along([*prompt, *answer[:-1]], len(prompt))
        law = torch.from_numpy(logits).log_softmax(-1)
        base = law if base is None else base
        found[kind] = {
            "nats": -law.gather(1, torch.tensor(answer, dtype=torch.int64)[:, None]).double().sum().item(),
            "divergence": (base.exp() * (base - law)).double().sum().item(),
        }
    return found


def perplexity(kind: str, rows: Sequence[dict[str, Any]]) -> float:
    return math.exp(sum(row[kind]["nats"] for row in rows) / sum(row["tokens"] for row in rows))


def page(kinds: Sequence[str], rows: Sequence[dict[str, Any]], settings: dict[str, Any]) -> list[str]:
    tokens = sum(cell["tokens"] for cell in rows)
    figures = [
        (
            *(_named(kind), f"{perplexity(kind, rows):.4f}"),
            "" if kind == BASE else f"{100 * (perplexity(kind, rows) / perplexity(BASE, rows) - 1):+.2f}%",
            f"+{ALLOWED[kind]:g}%" if kind in ALLOWED else "",
            f"{sum(cell[kind]['divergence'] for cell in rows) / tokens:.5f}",
        )
        for kind in kinds
    ]
    return [
        f"# Perplexity of quantized weights: {settings['model']}",
        "",
        f"{len(rows)} rows of {settings['dataset']}, {tokens} tokens of references after their prompts in "
        "the chat template. Weights of a quantized file count as bfloat16 once they are dequantized.",
        *table("weights | perplexity | against bfloat16 | allowed | divergence, nats a token", figures),
    ]


def _named(kind: str) -> str:
    return "bfloat16" if kind == BASE else kind


def beside(kinds: Sequence[str], rows: Sequence[dict[str, Any]], theirs: dict[str, Any]) -> list[str]:
    """Return the table of differences from llama.cpp, with a standard error over rows."""
    own = math.exp(sum(theirs["nats"]) / sum(cell["tokens"] for cell in rows))
    figures = [
        (_named(kind), f"{perplexity(kind, rows):.4f}", difference(kind, rows, theirs["nats"]))
        for kind in kinds
    ]
    return [
        *("## Beside llama.cpp", ""),
        f"llama.cpp ({theirs['version']}) runs the same file over the same token ids, each row in one batch "
        "and its KV cache in float32. A difference of perplexity has one standard error over rows.",
        *table("weights | perplexity | against llama.cpp", [("llama.cpp", f"{own:.4f}", ""), *figures]),
    ]


def difference(kind: str, rows: Sequence[dict[str, Any]], others: Sequence[float]) -> str:
    """Return the difference of perplexity from a model with these nats of rows, and its standard error."""
    costs = [cell[kind]["nats"] - nats for cell, nats in zip(rows, others, strict=True)]
    tokens = sum(cell["tokens"] for cell in rows)
    mean = sum(costs) / tokens
    spread = math.hypot(*(cost - mean * cell["tokens"] for cost, cell in zip(costs, rows, strict=True)))
    return f"{100 * math.expm1(mean):+.2f}% +- {100 * spread / tokens:.2f}"


if __name__ == "__main__":
    run(main)
