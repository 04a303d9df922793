"""transformers as a worker of peers/peers.py and offload.py: generate(), optionally assisted.

The option `memory` is the process's memory in bytes: accelerate keeps layers that do not fit on disk.
`assistance` has options of the assistant.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from worker import Arrived, Generate, Setup, serve

ROOM = (
    384 << 20
)  # bytes beside the resident weights: a layer or an output layer that is read, KV, activations


class Streamer:
    """Receives from generate() the prompt first, then each step's tokens."""

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
    options: dict[str, Any] = dict(setup["options"])
    memory, assistance = options.pop("memory", None), options.pop("assistance", {})
    if setup["draft"]:
        draft = options["assistant_model"] = load(setup["draft"])
        for name, value in assistance.items():
            setattr(draft.generation_config, name, value)
    model = load(setup["model"], memory)

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


def load(folder: str, memory: int | None = None) -> Any:
    placed: dict[str, Any] = {}
    if memory is not None:
        stays = max(memory - resident() - ROOM, 0)
        placed = {
            "device_map": "auto",
            "max_memory": {"cpu": stays},
            "offload_folder": tempfile.mkdtemp(),  # stays empty: weights are read from their files
        }
        atexit.register(shutil.rmtree, placed["offload_folder"], ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **placed).eval()
    # A model wholly on disk reports no device, and the assistant's tokens are sent to that device.
    type(model).device = property(lambda self: torch.device("cpu"))
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


def resident() -> int:
    """Return the bytes of this process that cannot be read again from a file."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


if __name__ == "__main__":
    serve(start)
