"""Records an engine's output for a few hundred requests, to compare it after a redesign.

    python -m tests.recording OLD.json [--model TARGET] [--pair TARGET SSM] [--tiny]     before
    python -m tests.recording NEW.json ... --against OLD.json                          after

Texts, token ids, log-probabilities (as exact floats) and errors must be equal to the bit. Speculation figures
are compared, too, but listed separately: a change of the policy changes them and no text under the coupled
verifier. The program uses only the public API, so it runs on another commit's code. A recording belongs to
one kind of CPU, as native products of another kind may round differently.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specinfer import LLM, RequestOutput, SamplingParams

from .tiny_models import write_similar_llama, write_tiny_llama

Options = dict[str, Any]
Record = dict[str, Any]

LAWS: Mapping[str, Options] = {
    "greedy": {"temperature": 0},
    "T=1": {"temperature": 1},
    "T=.7 top_p top_k min_p": {"temperature": 0.7, "top_p": 0.9, "top_k": 30, "min_p": 0.02},
    "T=1.5 top_k=3": {"temperature": 1.5, "top_k": 3},
}
PARAMETERS: Mapping[str, Options] = {
    **LAWS,
    "penalties": {
        "temperature": 0.8,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.3,
    },
    "greedy penalties": {"temperature": 0, "frequency_penalty": 0.7, "repetition_penalty": 1.1},
    "bias": {"temperature": 1, "logit_bias": {40: 2.0, 41: -3.5, 50: 1.0}},
    "allowed": {"temperature": 1, "allowed_token_ids": (35, 36, 37, 40, 45, 50, 55)},
    "bad words": {"temperature": 0, "bad_words": ("a", "the")},
    "regex": {"temperature": 1, "regex": "[0-9]{3}-[0-9]{2,5}"},
    "choice": {"temperature": 1, "choice": ("123", "1245", "77")},
    "grammar": {"temperature": 0.9, "grammar": 'start: "(" NUMBER ("," NUMBER)* ")"\nNUMBER: /[0-9]+/'},
    "min_tokens stop": {"temperature": 0.9, "min_tokens": 6, "stop": (".", "2", "e")},
    "stop ids": {"temperature": 1, "stop_token_ids": (36, 45), "ignore_eos": True},
    "logprobs raw": {"temperature": 0.9, "logprobs": 3, "prompt_logprobs": 2},
    "logprobs processed": {
        **{"temperature": 0.9, "top_k": 8, "presence_penalty": 0.6, "regex": "[0-9a-f ]{30,40}"},
        **{"logprobs": 2, "logprobs_mode": "processed"},
    },
    "n=3": {"temperature": 1, "n": 3},
    "prediction": {"temperature": 0, "prediction": "1234567 the same again 1234567"},
    "own speculation": {"temperature": 0.8, "speculation": {"max_nodes": 4}},
    "no speculation": {"temperature": 0.8, "speculation": False},
    "salted": {"temperature": 0.8, "cache_salt": "somebody"},
}
# Few requests run at once, so every tree has its full size, which decides the text under multi-step sampling.
TINY: Options = {
    **{"dtype": "float32", "kv_cache_memory": 1 << 24, "tree_size": "fixed"},
    **{"max_batch_size": 8, "max_nodes": 24, "lookup": False},
}
# draft names: S often agrees with the target, X is unrelated
TINY_ENGINES: Mapping[str, Options] = {
    "plain": {},
    "twins": {"kernels": "torch", "drafts": "S"},
    "n-gram": {"lookup": True},
    "draft": {"drafts": "S"},
    "draft, short steps": {"drafts": "S", "max_step_tokens": 24, "max_batch_size": 8},
    "two drafts, suffix, n-gram": {"drafts": "SX", "lookup": True},
    "by cost": {"drafts": "S", "lookup": True, "tree_size": "cost"},
    "preemption": {"drafts": "S", "kv_cache_memory": 1 << 17},
    "no reuse": {"drafts": "S", "prefix_reuse": False},
    "draft vocabulary": {"drafts": "S", "draft_vocabulary": 40},
    "multistep, iid": {"drafts": "SX", "verifier": "mss", "draw": "iid", "expansion": (2, 2, 1)},
    "multistep, without replacement": {
        **{"drafts": "S", "verifier": "mss", "draw": "without_replacement"},
        **{"expansion": (3, 2), "lookup": True},
    },
    "multistep, preemption": {"drafts": "S", "verifier": "mss", "kv_cache_memory": 1 << 17},
    "int8": {"quantization": "int8", "drafts": "S", "draft_quantization": "int4"},
    "int4": {"quantization": "int4", "lookup": True},
}
TWICE = ("plain", "two drafts, suffix, n-gram", "preemption", "multistep, iid")
TINY_PROMPTS = ("12 34 12 34 12", "the the the", "a", "(1,2,3", "abcabcabcabcabcabcabcabcabcabcabcabcab")
REAL_ENGINES: Mapping[str, Options] = {
    "plain": {},
    "n-gram": {"lookup": True},
    "int8 n-gram": {"quantization": "int8", "lookup": True},
    "int4 suffix": {"quantization": "int4", "lookup": True},
}
DRAFT_ENGINES: Mapping[str, Options] = {
    "draft": {"lookup": True},
    "int8 draft multistep": {"quantization": "int8", "draft_quantization": "int8", "verifier": "mss"},
}
REAL_PROMPTS = (
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that adds two numbers, then call it twice.",
    "List five animals, then list them again in reverse order.",
)


def record_tiny(folder: Path, only: str = "") -> Iterator[Record]:
    """Yield every parameter under every tiny engine: in a batch, with preemption, and twice for prefix
    reuse.
    """
    target = write_tiny_llama(folder / "target", vocab_size=128, tokenizer=True, eos_token_id=10)
    similar = write_similar_llama(target, folder / "similar", noise=0.1)
    stranger = write_tiny_llama(folder / "stranger", vocab_size=128, tokenizer=True, seed=99, eos_token_id=10)
    drafts = {"S": str(similar), "X": str(stranger)}
    for name, given in TINY_ENGINES.items():
        if only not in name:
            continue
        options = {**TINY, **given, "drafts": tuple(drafts[d] for d in given.get("drafts", ""))}
        llm = LLM(str(target), **options)
        common: Options = {"max_tokens": 20}
        for turn in (
            ("first", "again") if name in TWICE else ("first",)
        ):  # the second finds prefixes and earlier texts
            asked = [
                (
                    law,
                    TINY_PROMPTS[(i + j) % len(TINY_PROMPTS)],
                    SamplingParams(seed=7 + i, **common, **given),
                )
                for i, (law, given) in enumerate(PARAMETERS.items())
                for j in (0, 2)
            ]
            outputs = llm.generate([prompt for _, prompt, _ in asked], [params for _, _, params in asked])
            for (law, prompt, _), output in zip(asked, outputs, strict=True):
                yield from _records(f"tiny, {name}, {law}, {prompt!r}, {turn}", output)


def record_real(model: str, draft: str | None) -> Iterator[Record]:
    """Yield sampling settings and text parameters under engines of one real model, alone and batched."""
    engines = REAL_ENGINES
    if draft is not None:
        engines = {name: {**options, "drafts": (draft,)} for name, options in DRAFT_ENGINES.items()}
    chosen = [*LAWS, "penalties", "regex", "min_tokens stop", "logprobs raw"]
    for name, options in engines.items():
        common: Options = {
            **{"max_context": 1024, "tree_size": "fixed", "dtype": "bfloat16", "lookup": False},
            **options,
        }
        llm = LLM(model, **common)
        for law in chosen:
            given: Options = {"seed": 11, "max_tokens": 24, **PARAMETERS[law]}
            params = SamplingParams(**given)
            chats = [[{"role": "user", "content": prompt}] for prompt in REAL_PROMPTS]
            outputs = [*llm.chat(chats, params), llm.chat(chats[0], params)[0]]
            for i, output in enumerate(outputs):
                yield from _records(f"{Path(model).stem}, {name}, {law}, {i}", output)


def _records(name: str, output: RequestOutput) -> Iterator[Record]:
    for one in (output, *output.others):
        figures = one.figures
        yield {
            "name": name if one.index == 0 else f"{name}, completion {one.index}",
            "said": {
                "token_ids": list(one.token_ids),
                "text": one.text,
                "finish": str(one.finish_reason),
                "error": one.error,
                "logprobs": _exact(one.logprobs),
                "prompt_logprobs": _exact(one.prompt_logprobs),
            },
            "figures": [figures.steps, figures.drafted_tokens, figures.accepted_tokens],
        }


def _exact(logprobs: Any) -> Any:
    if logprobs is None:
        return None
    return [
        None if at is None else {str(token): [one.logprob.hex(), one.rank] for token, one in at.items()}
        for at in logprobs
    ]


def compare(old: Mapping[str, Record], new: Mapping[str, Record]) -> list[str]:
    """Return a line for each request whose record differs or is missing."""
    missing = [f"missing: {name}" for name in old if name not in new]
    return missing + [
        f"differs: {name}: {old[name]['said']} -> {new[name]['said']}"
        for name in old
        if name in new and old[name]["said"] != new[name]["said"]
    ]


def _read(file: Path) -> dict[str, Record]:
    return {record["name"]: record for record in map(json.loads, file.read_text().splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the recording, one JSON line per request")
    parser.add_argument("--tiny", action="store_true", help="tiny random models, every parameter")
    parser.add_argument("--only", default="", help="only tiny engines with this in their name")
    parser.add_argument("--model", action="append", default=[], help="a real model; repeatable")
    parser.add_argument("--pair", nargs=2, action="append", default=[], metavar=("TARGET", "SSM"))
    parser.add_argument("--against", type=Path, help="an earlier recording to compare with")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, options.out.open("w") as out:
        ways = [record_tiny(Path(folder), options.only)] if options.tiny else []
        ways += [record_real(model, None) for model in options.model]
        ways += [record_real(target, draft) for target, draft in options.pair]
        for way in ways:
            for record in way:
                out.write(json.dumps(record) + "\n")
                out.flush()
    new = _read(options.out)
    print(f"{len(new)} requests recorded")
    if options.against is not None:
        old = _read(options.against)
        different = compare(old, new)
        other_figures = sum(old[n]["figures"] != new[n]["figures"] for n in old if n in new)
        print("\n".join(different[:20]))
        print(f"{len(old)} compared: {len(different)} differ; {other_figures} with other figures")
        sys.exit(bool(different))


if __name__ == "__main__":
    main()
