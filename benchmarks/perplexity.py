"""What quantized weights cost in quality: perplexity over given answers, against bfloat16.

    python benchmarks/perplexity.py --model MODEL --dataset prompts/dolly.jsonl --out RESULT.md

Every row's prompt goes through the chat template, and its reference follows as the answer; the model is asked
for the probability of each of the answer's tokens, given all before it. Beside perplexity stands the mean
Kullback-Leibler divergence from the bfloat16 model's laws: how far the laws moved, with much less noise.
Every finished row is kept in a JSON file beside the Markdown, so an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from provenance import provenance_lines
from torch import Tensor

from specinfer import EngineConfig
from specinfer.check.target_alone import TargetAlone
from specinfer.engine.build import Models, load_models
from specinfer.models.decoder import LanguageModel
from specinfer.progress import ProgressBar

BASE = "none"
ALLOWED = {"int8": 1.0, "int4": 6.0}  # percent of perplexity a quantization may cost


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder, GGUF file or name")
    parser.add_argument("--dataset", type=Path, required=True, help='rows with "prompt" and "reference"')
    parser.add_argument("--limit", type=int, default=200, help="rows (default 200)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of a row; what is longer is cut off")
    parser.add_argument("--quantizations", default="int8,int4", help="compared with bfloat16")
    parser.add_argument("--out", type=Path, required=True, help="Markdown; finished rows beside it as .json")
    args = parser.parse_args()

    kinds = [BASE, *args.quantizations.split(",")]
    rows_file = args.out.with_suffix(".json")
    settings = {
        "model": Path(args.model).name,
        "dataset": args.dataset.name,
        "max_tokens": args.max_tokens,
        "quantizations": kinds,
    }
    rows = _read_rows(rows_file, settings)
    if len(rows) < args.limit:
        # All at once, so that a row's bfloat16 laws need not be kept for the others.
        models = {kind: _load(args.model, kind) for kind in kinds}
        texts = _texts(models[BASE], args.dataset, args.limit, args.max_tokens)
        for number, (prompt, answer) in enumerate(texts):
            if number < len(rows):
                continue
            rows.append(_row({kind: m.target for kind, m in models.items()}, prompt, answer))
            _write(rows_file, json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
            if number % 10 == 9 or number + 1 == args.limit:
                print(f"{number + 1} rows: {_summary(kinds, rows)}", flush=True)
    text = _markdown(kinds, rows[: args.limit], settings)
    _write(args.out, text)
    print(text)


def _load(model: str, quantization: str) -> Models:
    options = {"dtype": "bfloat16", "device": "cpu", "quantization": quantization}
    return load_models(EngineConfig.from_options(model, options), ProgressBar())


def _texts(
    models: Models, dataset: Path, limit: int, max_tokens: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts and answers, as token ids."""
    tokenizer = models.tokenizer
    with dataset.open(encoding="utf-8") as file:
        for line in islice(file, limit):
            row = json.loads(line)
            prompt = list(tokenizer.encode_chat([{"role": "user", "content": row["prompt"]}]))
            answer = list(tokenizer.encode(row["reference"]))
            yield prompt[: max_tokens - 1], answer[: max_tokens - min(len(prompt), max_tokens - 1)]


def _row(models: dict[str, LanguageModel], prompt: list[int], answer: list[int]) -> dict[str, Any]:
    """How many tokens the answer has; by model, what they cost in nats and how far its laws are off."""
    found: dict[str, Any] = {"tokens": len(answer)}
    base: Tensor | None = None
    for kind, model in models.items():
        logits = TargetAlone(model).logits_along([*prompt, *answer[:-1]], len(prompt))
        law = torch.from_numpy(logits).log_softmax(-1)
        base = law if base is None else base
        found[kind] = {
            "nats": -law.gather(1, torch.tensor(answer, dtype=torch.int64)[:, None]).double().sum().item(),
            "divergence": (base.exp() * (base - law)).double().sum().item(),
        }
    return found


def _perplexity(kind: str, rows: list[dict[str, Any]]) -> float:
    return math.exp(sum(row[kind]["nats"] for row in rows) / sum(row["tokens"] for row in rows))


def _cost(kind: str, rows: list[dict[str, Any]]) -> float:
    """By how many percent perplexity is above the first model's."""
    return 100 * (_perplexity(kind, rows) / _perplexity(BASE, rows) - 1)


def _summary(kinds: list[str], rows: list[dict[str, Any]]) -> str:
    quantized = [f"{kind} {_cost(kind, rows):+.2f}%" for kind in kinds[1:]]
    return ", ".join([f"perplexity {_perplexity(BASE, rows):.3f}", *quantized])


def _read_rows(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    stored = json.loads(path.read_text())
    if stored["settings"] != settings:
        raise SystemExit(f"{path} holds rows of {stored['settings']}, not {settings}; give another --out")
    rows: list[dict[str, Any]] = stored["rows"]
    return rows


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def _markdown(kinds: list[str], rows: list[dict[str, Any]], settings: dict[str, Any]) -> str:
    tokens = sum(row["tokens"] for row in rows)
    lines = [
        f"# Perplexity of quantized weights: {settings['model']}",
        "",
        f"{len(rows)} rows of {settings['dataset']}, {tokens} tokens of references after their prompts in "
        "the chat template. Weights of a quantized file count as bfloat16 once they are dequantized.",
        "",
        "| weights | perplexity | against bfloat16 | allowed | divergence, nats a token |",
        "|---|---|---|---|---|",
    ]
    for kind in kinds:
        divergence = sum(row[kind]["divergence"] for row in rows) / tokens
        cost = "" if kind == BASE else f"{_cost(kind, rows):+.2f}%"
        allowed = f"+{ALLOWED[kind]:.0f}%" if kind in ALLOWED else ""
        name = "bfloat16" if kind == BASE else kind
        lines.append(f"| {name} | {_perplexity(kind, rows):.4f} | {cost} | {allowed} | {divergence:.5f} |")
    return "\n".join([*lines, "", *provenance_lines(), ""])


if __name__ == "__main__":
    main()
