"""Checks on a card: laws, texts, a server, a hosted model and speed, written to a page.

    make test-gpu                                   on the first CUDA card: under ten minutes
    python -m tests.gpu.run --device cpu --quick    the same checks on the CPU, to test this program

Without a card it says so and ends with status 2. Status 1: a check failed; the page says which.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer import LLM, SamplingParams
from specinfer.check.difference import Verdict
from specinfer.check.identity import check_identity
from specinfer.check.promise import Effort, check_promise
from specinfer.progress import NoProgress
from specinfer.report.provenance import provenance
from tests.hosted import SIZES, save_tiny
from tests.loading import load
from tests.parity.families import save_random
from tests.parity.test_against_transformers import PROMPT, SCATTERED, TREE_PATHS, each_node, logits_of
from tests.real.models import smollm2
from tests.served import Served
from tests.tiny_models import write_byte_tokenizer, write_similar_llama, write_tiny_llama

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "opt")
VERSIONS = ("torch", "triton", "transformers")
PARITY = 2e-4  # largest difference of a float32 logit


@dataclass(frozen=True)
class Setting:
    """Settings of all checks. `quick` makes them short."""

    device: str
    quick: bool
    folder: Path
    target: str
    draft: str


@dataclass(frozen=True)
class Result:
    """A row of the page. `passed` is None where the check only measures."""

    name: str
    passed: bool | None
    words: str


def parity(setting: Setting) -> Iterator[Result]:
    """Compare logits of a prompt and of a tree with transformers' on the CPU, in float32."""
    for family in FAMILIES[: 2 if setting.quick else None]:
        theirs = save_random(family, setting.folder / family, tied=True)
        model = load(setting.folder / family, "torch", device=torch.device(setting.device))
        got = each_node(model, SCATTERED).cpu()
        want = torch.stack([logits_of(theirs, PROMPT + path)[-1] for path in TREE_PATHS])
        gap = float((got - want).abs().max())
        yield Result(f"logits of a tree, {family}", gap < PARITY, f"largest difference {gap:.1e}")


def open_llm(setting: Setting, **options: Any) -> LLM:
    return LLM(
        setting.target,
        **{"device": setting.device, "max_context": 512, "kv_cache_memory": 1 << 28, **options},
    )


def judged(prefix: str, verdicts: Iterable[Verdict]) -> Iterator[Result]:
    for verdict in verdicts:
        yield Result(f"{prefix}: {verdict.name}", verdict.passed if verdict.decided else None, verdict.words)


def compared(prefix: str, llm: LLM, prompts: list[list[int]], length: int) -> Iterator[Result]:
    """Compare texts of an engine with those of its target alone: equal, or different by rounding."""
    plain = llm.variant(drafts=())
    for name, params in (
        ("greedy", SamplingParams(temperature=0, max_tokens=length)),
        ("T=0.8", SamplingParams(temperature=0.8, max_tokens=length)),
    ):
        verdicts = check_identity(name, params, prompts, plain, llm, num_single=2, progress=NoProgress())
        yield from judged(prefix, verdicts)


def laws(setting: Setting) -> Iterator[Result]:
    """Count sampled tokens of a tiny model against its laws, with both verifiers; texts, bookkeeping."""
    target = write_tiny_llama(setting.folder / "tiny", vocab_size=64, tokenizer=True)
    draft = write_similar_llama(target, setting.folder / "tiny-draft", noise=0.1)
    prompts = [[(7 * n + i) % 60 for i in range(12)] for n in range(4)]
    effort = Effort(12, 24) if setting.quick else Effort(32, 96)
    with LLM(
        target,
        device=setting.device,
        dtype="float32",
        drafts=(str(draft),),
        tree_size="fixed",
        kv_cache_memory=1 << 24,
    ) as llm:
        yield from judged("tiny, float32", check_promise(llm, prompts, effort))


def identity(setting: Setting) -> Iterator[Result]:
    """Compare texts with and without speculation, in float32 and in bfloat16."""
    count, length = (2, 12) if setting.quick else (8, 64)
    for dtype in ("float32", "bfloat16"):
        options = {"dtype": dtype, "drafts": (setting.draft,), "lookup": False, "tree_size": "fixed"}
        with open_llm(setting, **options) as llm:
            prompts = [llm.tokenizer.encode(f"{n}. A short story of {n} foxes: ") for n in range(count)]
            yield from compared(dtype, llm, prompts, length)


def server(setting: Setting) -> Iterator[Result]:
    """Compare an answer over HTTP with the library's."""
    flags = ("--device", setting.device, "--dtype", "float32", "--max-context", "512")
    body = {"model": "any", "prompt": "The fox", "max_tokens": 24, "temperature": 0.8, "seed": 3}
    flags += ("--draft", setting.draft, "--kv-cache-memory", "256MB", "--served-model-name", "any")
    with Served(setting.target, *flags) as served:
        answer = served.post("/v1/completions", body)
    text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
    with open_llm(setting, dtype="float32", lookup=False) as llm:
        params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=3)
        [expected] = llm.generate(["The fox"], params)
    yield Result("served answer", text == expected.text, "the library's" if text == expected.text else text)


def hosted(setting: Setting) -> Iterator[Result]:
    """Run a model through transformers' code, with and without speculation."""
    folder, draft = setting.folder / "hosted", setting.folder / "hosted-draft"
    save_tiny("gpt_neox", folder)
    write_byte_tokenizer(folder, SIZES["vocab_size"])
    write_tiny_llama(draft, vocab_size=160, tokenizer=True)
    options = {"model_impl": "transformers", "device": setting.device, "dtype": "float32"}
    with LLM(folder, drafts=(str(draft),), tree_size="fixed", kv_cache_memory=1 << 24, **options) as llm:
        yield from compared("through transformers", llm, [PROMPT[n:] for n in range(4)], 24)


def speed(setting: Setting) -> Iterator[Result]:
    """Measure tokens a second of one request in bfloat16, without and with speculation."""
    length = 16 if setting.quick else 128
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    with open_llm(setting, dtype="bfloat16", drafts=(setting.draft,), lookup=False) as llm:
        for name, engine in (("without speculation", llm.variant(drafts=())), ("with speculation", llm)):
            rates = []
            for _ in range(2 if setting.quick else 4):
                begun = time.perf_counter()
                [output] = engine.generate(["A list of a hundred animals: "], params)
                rates.append(len(output.token_ids) / (time.perf_counter() - begun))
            steps = output.figures.steps
            yield Result(
                name, None, f"{max(rates[1:]):.1f} tokens/s, {len(output.token_ids) / steps:.2f} a step"
            )


CHECKS: Sequence[Callable[[Setting], Iterator[Result]]] = (parity, laws, identity, server, hosted, speed)


def models(folder: Path) -> tuple[str, str]:
    """Return the target and its draft: SmolLM2 and its head if it is there, else random models."""
    try:
        return smollm2(), "smollm2-135m-head"
    except pytest.skip.Exception:
        sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "num_heads": 8}
        own: dict[str, Any] = {"num_layers": 8, "vocab_size": 256, "max_context": 512, "spread": 0.05}
        target = write_tiny_llama(folder / "target", **sizes, **own, tokenizer=True)
        return str(target), str(write_similar_llama(target, folder / "draft", noise=0.1))


def run_checks(setting: Setting) -> list[Result]:
    """Run every check; one that raises is a failed row."""
    found: list[Result] = []
    for check in CHECKS:
        try:
            for result in check(setting):
                found.append(result)
                print(f"{word(result)}  {result.name}: {result.words}", flush=True)
        except Exception as error:
            traceback.print_exc()
            found.append(
                Result(check.__name__, False, f"{type(error).__name__}: {error}".splitlines()[0][:200])
            )
            print(f"FAIL  {check.__name__}: {found[-1].words}", flush=True)
    return found


def word(result: Result) -> str:
    return {True: "ok", False: "FAIL", None: "open"}[result.passed]


def page(setting: Setting, card: str, results: Sequence[Result], seconds: float) -> str:
    """Return the page of results as Markdown."""
    facts = provenance()
    installed = {one.name: one.version for one in distributions()}
    versions = [f"{name} {installed.get(name, 'is not installed')}" for name in VERSIONS]
    lines = [f"# Checks on {card}", "", "| check | verdict | |", "|---|---|---|"]
    lines += [f"| {r.name} | {word(r)} | {r.words.replace('|', '/')} |" for r in results]
    lines += ["", "- command: `make test-gpu`", f"- card: {card}, device {setting.device}"]
    lines += [f"- versions: Python {facts['versions']['python']}, {', '.join(versions)}"]
    lines += [f"- target: {Path(setting.target).name}, draft: {Path(setting.draft).name}"]
    lines += [f"- commit: {facts['commit']}, {facts['date']}, {seconds:.0f} s"]
    return "\n".join(lines) + "\n"


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    args.add_argument("--device", default="cuda")
    args.add_argument("--quick", action="store_true", help="shorter texts, fewer samples")
    args.add_argument("--random", action="store_true", help="random models, even if SmolLM2 is there")
    args.add_argument("--out", type=Path, help="default: benchmarks/results/gpu_CARD_DATE.md")
    given = args.parse_args()
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        print("make test-gpu: PyTorch finds no CUDA card here, so nothing was tested", file=sys.stderr)
        sys.exit(2)
    card = torch.cuda.get_device_name(given.device) if given.device.startswith("cuda") else "a CPU"
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.random:
            smollm2.__globals__["model_path"] = lambda file: pytest.skip(file)
        setting = Setting(given.device, given.quick, folder, *models(folder))
        results = run_checks(setting)
    slug = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    out = given.out or RESULTS / f"gpu_{slug}_{datetime.now(UTC):%Y-%m-%d}.md"
    out.write_text(page(setting, card, results, time.monotonic() - begun), encoding="utf-8")
    failed = sum(result.passed is False for result in results)
    print(f"{len(results) - failed} of {len(results)} checks are right or open; the page is {out}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
