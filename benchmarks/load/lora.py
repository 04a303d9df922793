"""Measures adapters: tokens per second of a batch with adapters, relative to the same batch without.

    python -m benchmarks.load.lora --model smollm2-135m --out RESULT.md

Random adapters of one rank, on all linear modules or on q_proj and v_proj, are written in PEFT's format.
Requests use them in turn and generate the same number of tokens each. There is no speculation, since random
adapters change texts and so acceptance. Both batches alternate, so that other load on the machine affects
both.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.study import REQUIRED, Study, natural, parser, row, run, settings_of
from specinfer import LLM, LoRARequest, RequestOutput, SamplingParams
from specinfer.hub import resolve
from specinfer.models.open_model import open_model
from specinfer.models.safetensors import write_safetensors

TARGETS: Mapping[str, tuple[str, ...]] = {
    "all linear": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "q and v": ("q_proj", "v_proj"),
}
KINDS = ("none", "int8", "int4")
PROMPT = "Tell a story of a lighthouse keeper, number {}, who found a letter in a bottle."


def main() -> None:
    options = parser(__doc__, model=REQUIRED, max_tokens=64, batch_size=8, rounds=7, threads=None)
    options.add_argument("--adapters", type=natural, default=4, help="in one batch (default 4)")
    options.add_argument("--rank", type=natural, default=16, help="of each (default 16)")
    args = options.parse_args()

    study = Study("lora", args.out, settings_of(args))
    for kind in KINDS:
        for targets, modules in TARGETS.items():
            if (name := f"{kind}, {targets}") not in study.cells:
                study.keep(name, measure(args, kind, modules))
                print(row_of(name, study.cells[name]), flush=True)
    study.write(page(study), args.threads)


def measure(args: Any, kind: str, modules: Sequence[str]) -> dict[str, Any]:
    """Return tokens per second of each round, without adapters and with them."""
    with tempfile.TemporaryDirectory() as folder:
        adapters = [
            LoRARequest(f"adapter-{n}", n + 1, write_adapter(args.model, Path(folder), n, args.rank, modules))
            for n in range(args.adapters)
        ]
        options = {"lookup": False, "prefix_reuse": False, "max_batch_size": args.batch_size}
        with LLM(args.model, quantization=kind, threads=args.threads, **options) as llm:
            mixed = [adapters[n % args.adapters] for n in range(args.batch_size)]
            speeds: dict[str, list[float]] = {"without": [], "with": []}
            for warm in (True, *[False] * args.rounds):
                for how, given in (("without", None), ("with", mixed)):
                    speed = tokens_per_second(llm, args, given)
                    if not warm:
                        speeds[how].append(speed)
            want = [output.token_ids for output in answers(llm, args, mixed)]
            with llm.variant(lookup=True, tree_size="fixed") as guessing:
                found = [output.token_ids for output in answers(guessing, args, mixed)]
    ratios = [one / other for one, other in zip(speeds["with"], speeds["without"], strict=True)]
    identical = sum(one == other for one, other in zip(want, found, strict=True))
    return {
        **speeds,
        "identical": identical,
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


def answers(llm: LLM, args: Any, adapters: Sequence[LoRARequest] | None) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    prompts = [PROMPT.format(n) for n in range(args.batch_size)]
    return llm.generate(prompts, params, lora_request=adapters)


def tokens_per_second(llm: LLM, args: Any, adapters: Sequence[LoRARequest] | None) -> float:
    begun = time.perf_counter()
    tokens = sum(len(output.token_ids) for output in answers(llm, args, adapters))
    return tokens / (time.perf_counter() - begun)


def write_adapter(model: str, folder: Path, number: int, rank: int, modules: Sequence[str]) -> Path:
    """Write a random adapter of these modules of a model."""
    chance, tensors = torch.Generator().manual_seed(number), {}
    for name, shape in sorted(open_model(resolve(model)).shapes.items()):
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.rsplit(".", 1)[-1] in modules:
            for half, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                random = torch.randn(size, generator=chance) * 0.01
                tensors[f"base_model.model.{module}.lora_{half}.weight"] = random.bfloat16()
    own = folder / str(number)
    own.mkdir()
    write_safetensors(own / "adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules)}
    (own / "adapter_config.json").write_text(json.dumps(config))
    return own


def page(study: Study) -> list[str]:
    settings = study.settings
    return [
        f"# Adapters: {settings['model']}",
        "",
        f"{settings['batch_size']} requests with {settings['adapters']} adapters of rank {settings['rank']}, "
        f"{settings['max_tokens']} tokens each, no speculation; medians of {settings['rounds']} rounds.",
        "",
        "| quantization, modules | tokens/s without | tokens/s with | with over without | lowest, highest "
        "| identical with lookups |",
        "|---|---|---|---|---|---|",
        *(row_of(name, cell) for name, cell in study.cells.items()),
    ]


def row_of(name: str, cell: Mapping[str, Any]) -> str:
    speeds = (f"{statistics.median(cell[how]):.1f}" for how in ("without", "with"))
    return row(
        name,
        *speeds,
        f"{cell['ratio']:.3f}",
        f"{cell['lowest']:.3f}, {cell['highest']:.3f}",
        cell["identical"],
    )


if __name__ == "__main__":
    run(main)
