"""vLLM's server benchmark, `vllm bench serve`: loads at both endpoints, and their statistics."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from zoo import MODEL, ROOT, TOKENIZER, check

# The command `vllm` does not start: it reads the version of a package with another name than the CPU build.
PROGRAM = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""
PROMPTS, LENGTH = 8, 20


def load(*flags: str) -> dict:
    """Run a load on the server and return its results."""
    at = ("--base-url", ROOT, "--model", MODEL, "--tokenizer", TOKENIZER, "--num-prompts", str(PROMPTS))
    saved = ("--save-result", "--save-detailed", "--result-filename", "result.json", "--disable-tqdm")
    subprocess.run([sys.executable, "-c", PROGRAM, *at, *saved, *flags], check=True)
    return json.loads(Path("result.json").read_text())


def random(*flags: str) -> dict:
    data = ("--dataset-name", "random", "--random-input-len", "40", "--random-output-len", str(LENGTH))
    return load(*data, *flags)


def holds(result: dict) -> bool:
    """Return whether all requests were answered, at full length and token by token."""
    return (
        (result["completed"], result["failed"]) == (PROMPTS, 0)
        and result["total_output_tokens"] == PROMPTS * LENGTH
        and result["output_lens"] == [LENGTH] * PROMPTS
        and all(seconds > 0 for seconds in result["ttfts"])
        and all(result["itls"])
        and result["output_throughput"] > 0
    )


@check
def prompts_are_continued_under_load() -> None:
    assert holds(random("--backend", "openai", "--endpoint", "/v1/completions", "--ignore-eos"))


@check
def conversations_are_answered_under_load() -> None:
    chat = ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--ignore-eos")
    assert holds(random(*chat, "--max-concurrency", "3", "--top-k", "20", "--min-p", "0.1"))
