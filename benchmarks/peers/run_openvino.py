"""OpenVINO GenAI as a worker of benchmarks/peers/peers.py; it reads GGUF files itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import openvino_genai
from worker import Arrived, Generate, Setup, serve

CACHE_GB = 1


class Streamer(openvino_genai.StreamerBase):
    """Receives the tokens of each step."""

    def __init__(self, arrived: Arrived) -> None:
        super().__init__()
        self._arrived = arrived

    def write(self, tokens: int | list[int]) -> openvino_genai.StreamingStatus:
        self._arrived([tokens] if isinstance(tokens, int) else tokens)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def start(setup: Setup) -> tuple[Generate, dict[str, str]]:
    options: dict[str, Any] = dict(setup["options"])
    generation = options.pop("generation", {})
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.LLMPipeline(
        setup["model"],
        "CPU",
        scheduler_config=scheduler,
        INFERENCE_NUM_THREADS=setup["threads"],
        **options,
    )

    def generate(prompt: list[int], max_tokens: int, arrived: Arrived) -> None:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, ignore_eos=True, **generation
        )
        pipeline.generate(openvino.Tensor(np.array([prompt], dtype=np.int64)), config, Streamer(arrived))

    return generate, {"openvino-genai": openvino_genai.__version__}


if __name__ == "__main__":
    serve(start)
