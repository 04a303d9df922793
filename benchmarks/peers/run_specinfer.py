"""specinfer as a worker of benchmarks/peers/peers.py."""

from __future__ import annotations

from uuid import uuid4

import torch
from worker import Arrived, Generate, Setup, serve

from specinfer import LLM, SamplingParams
from specinfer.version import VERSION


def start(setup: Setup) -> tuple[Generate, dict[str, str]]:
    torch.set_num_threads(setup["threads"])
    llm = LLM(
        setup["model"],
        drafts=(setup["draft"],) if setup["draft"] else (),
        max_batch_size=1,
        max_context=setup["context"],
        prefix_reuse=False,
        **setup["options"],
    )

    def generate(prompt: list[int], max_tokens: int, arrived: Arrived) -> None:
        done = 0
        # Its own cache salt keeps lookups from finding a repeated prompt's answer.
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, cache_salt=uuid4().hex)
        for output in llm.stream(prompt, params):
            arrived(output.token_ids[done:])
            done = len(output.token_ids)

    return generate, {"specinfer": VERSION, "torch": torch.__version__}


if __name__ == "__main__":
    serve(start)
