"""AirLLM on the CPU as a worker of offload/offload.py; it reads every layer for every token.

At the first start it splits the model into a file per layer, in the folder of the option `layers`.
"""

from __future__ import annotations

from importlib.metadata import version

import torch
from airllm import AutoModel
from run_transformers import Streamer
from transformers import GenerationConfig
from worker import Arrived, Generate, Setup, serve


def start(setup: Setup) -> tuple[Generate, dict[str, str]]:
    torch.set_num_threads(setup["threads"])
    model = AutoModel.from_pretrained(
        setup["model"], device="cpu", layer_shards_saving_path=setup["options"]["layers"]
    )
    config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    model.generation_config = model.model.generation_config = config

    def generate(prompt: list[int], max_tokens: int, arrived: Arrived) -> None:
        ids = torch.tensor([prompt])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            use_cache=True,
            streamer=Streamer(arrived),
        )

    return generate, {"airllm": version("airllm"), "torch": torch.__version__}


if __name__ == "__main__":
    serve(start)
