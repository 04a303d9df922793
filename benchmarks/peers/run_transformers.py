"""transformers as a worker of benchmarks/peers.py: generate(), assisted if asked."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from worker import Arrived, Generate, Setup, serve


class Streamer:
    """What generate() calls with the prompt first, then with each step's tokens."""

    def __init__(self, arrived: Arrived) -> None:
        self._arrived = arrived
        self._prompt_seen = False

    def put(self, tokens: torch.Tensor) -> None:
        if self._prompt_seen:
            self._arrived(tokens.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        pass


def start(setup: Setup) -> tuple[Generate, dict[str, str]]:
    torch.set_num_threads(setup["threads"])
    model = load(setup["model"])
    options: dict[str, Any] = dict(setup["options"])
    if setup["draft"]:
        options["assistant_model"] = load(setup["draft"])

    def generate(prompt: list[int], max_tokens: int, arrived: Arrived) -> None:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                streamer=Streamer(arrived),
                **options,
            )

    return generate, {"transformers": transformers.__version__, "torch": torch.__version__}


def load(folder: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    assistance = {
        name: getattr(model.generation_config, name)
        for name in (
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "assistant_confidence_threshold",
        )
    }
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0, **assistance)
    return model


if __name__ == "__main__":
    serve(start)
