"""Do we say what transformers says? Greedy tokens on real files, both in float32.

    python benchmarks/parity_transformers.py --model FILE.gguf --dataset prompts/alpaca.jsonl --out RESULT.md

Our engine continues each prompt greedily; transformers then reads prompt and continuation in one pass and
states its own argmax at every position. Where all agree, greedy decoding with transformers gives the same
tokens. A disagreement is a tie when transformers' two logits differ by less than --tie; the text is not
compared after the first one, since from there on the two would write different texts.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path

import torch
import transformers
from provenance import provenance_lines

from specinfer import LLM, SamplingParams
from specinfer.kernels.machine import thread_count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file, or a folder")
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=20, help="prompts (default 20)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--tie", type=float, default=1e-2, help="logits closer than this may swap")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    texts = _our_texts(args.model, args.dataset, args.limit, args.max_tokens)
    gc.collect()  # both models in float32 at once would not fit on a small machine
    torch.set_num_threads(thread_count())  # of which ours had left PyTorch one
    model = _theirs(args.model)
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
        f"# {args.model.name}: greedy tokens against transformers {transformers.__version__}, float32",
        "",
        f"- prompts: {len(texts)} of {args.dataset.name}, {args.max_tokens} tokens each at most",
        f"- tokens compared: {compared}",
        f"- differences where transformers' logits are less than {args.tie} apart: {len(ties)}",
        *(f"  - {line}" for line in ties),
        f"- other differences: {len(wrong)}",
        *(f"  - {line}" for line in wrong),
        *provenance_lines(),
        "",
    ]
    args.out.write_text("\n".join(lines))
    print("\n".join(lines))
    raise SystemExit(1 if wrong else 0)


def _our_texts(
    model: Path, dataset: Path, limit: int, max_tokens: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    llm = LLM(str(model), dtype="float32", max_batch_size=limit, max_context=2048, ngram=True)
    with dataset.open(encoding="utf-8") as file:
        prompts = [json.loads(next(file))["prompt"] for _ in range(limit)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
    return [(output.prompt_token_ids, output.token_ids) for output in outputs]


def _theirs(model: Path) -> transformers.PreTrainedModel:
    if model.is_dir():
        return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return transformers.AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32
    )


if __name__ == "__main__":
    main()
