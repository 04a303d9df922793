"""Compares greedy tokens with those of transformers on real files, both in float32.

    python -m benchmarks.identity.parity_transformers --model FILE.gguf --dataset alpaca.jsonl --out RESULT.md

Our engine continues each prompt greedily; transformers then reads prompt and continuation in one pass and
gives its argmax at every position. If all agree, greedy decoding with transformers gives the same tokens. A
difference is a tie if transformers' two logits differ by less than --tie. Texts are compared up to the first
difference, as they diverge after it.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.study import REQUIRED, Study, ask, parser, questions_of, run, settings_of
from specinfer import LLM, SamplingParams
from specinfer.kernels.machine import thread_count

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def main() -> None:
    options = parser(__doc__, model=REQUIRED, dataset=REQUIRED, limit=20, max_tokens=64)
    options.add_argument("--tie", type=float, default=1e-2, help="logits closer than this may swap")
    args = options.parse_args()

    study = Study("parity", args.out, settings_of(args))
    texts = _our_texts(args.model, questions_of(args.dataset, args.limit), args.max_tokens)
    gc.collect()  # both models in float32 at once would not fit on a small machine
    torch.set_num_threads(thread_count())  # our engine left PyTorch one thread
    model = _theirs(Path(args.model))
    ties: list[str] = []
    wrong: list[str] = []
    compared = 0
    for number, (prompt, tokens) in enumerate(texts):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        for step, token in enumerate(tokens):
            compared += 1
            best = int(logits[step].argmax())
            if best != token:
                gap = float(logits[step, best] - logits[step, token])
                line = f"prompt {number}, token {step}: {token} here, {best} there, logits {gap:.1e} apart"
                (ties if gap < args.tie else wrong).append(line)
                break
        print(f"prompt {number}: {len(tokens)} tokens", flush=True)
    lines = [
        f"# {study.settings['model']}: greedy tokens against transformers {version('transformers')}, float32",
        "",
        f"- prompts: {len(texts)} of {', '.join(study.settings['dataset'])}, {args.max_tokens} tokens each "
        "at most",
        f"- tokens compared: {compared}",
        f"- differences where transformers' logits are less than {args.tie} apart: {len(ties)}",
        *(f"  - {line}" for line in ties),
        f"- other differences: {len(wrong)}",
        *(f"  - {line}" for line in wrong),
    ]
    print(study.write(lines))
    raise SystemExit(1 if wrong else 0)


def _our_texts(
    model: str, prompts: Sequence[str], max_tokens: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    llm = LLM(
        model,
        dtype="float32",
        quantization="none",
        max_batch_size=len(prompts),
        max_context=2048,
        lookup=True,
    )
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [(output.prompt_token_ids, output.token_ids) for output in ask(llm, prompts, params)]


def _theirs(model: Path) -> PreTrainedModel:
    import transformers  # takes seconds, and --help does not need it

    if model.is_dir():
        return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return transformers.AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32
    )


if __name__ == "__main__":
    run(main)
