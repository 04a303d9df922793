"""The check finds identical texts for every kind of checkpoint, through transformers and with adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer import LLM, LoRARequest, SamplingParams
from specinfer.check.difference import Verdict
from specinfer.check.identity import check_identity
from specinfer.check.promise import Effort, check_promise
from specinfer.config import EngineConfig
from specinfer.engine.models import Models
from specinfer.models.open_model import open_model
from specinfer.models.weights import load_model
from specinfer.progress import NoProgress
from specinfer.request import RequestOutput
from specinfer.speculation_config import NO_SPECULATION, Quantization
from specinfer.tokenizer import Tokenizer
from tests.adapters import write_adapter
from tests.engines import ENGINE
from tests.gguf_blocks import write_blocks
from tests.hosted import save_tiny
from tests.kernels import kernels
from tests.quantized_folders import FORMATS, pack_mxfp4, write_quantized
from tests.tiny_models import write_byte_tokenizer, write_pair, write_tiny_mixture

pytestmark = pytest.mark.usefixtures("own_cache")  # of quantized weights

PROMPTS = [[7, 8, 9, 7] * 5, [*range(30, 40)], [1, 2, 1, 2, 1]]  # the first is longer than a block
EFFORT = Effort(max_tokens=10, samples=1, num_single=1)
# One model per packing: GPTQ, AWQ, compressed-tensors, FP8 and bitsandbytes.
PACKED = (
    *("gptq-desc-act", "awq", "w4a16-asymmetric", "w8a8", "float-channel"),
    *("fp8-block", "nf4-nested", "llm-int8"),
)


def identities(llm: LLM) -> Iterator[Verdict]:
    """The verdicts on identical texts, which come before those on laws."""
    return takewhile(lambda one: not one.name.startswith("law"), check_promise(llm, PROMPTS, EFFORT))


def passes(path: Path, quantization: Quantization, impl: Any = "auto") -> None:
    """Check a model that drafts for itself, so that guesses are accepted."""
    model = load_model(
        open_model(path, impl),
        dtype=torch.float32,
        device=torch.device("cpu"),
        kernels=kernels("native"),
        quantization=quantization,
        cache=path.parent / "kept",
    )
    folder = path.parent / "tokenizer"
    folder.mkdir()
    write_byte_tokenizer(folder, 64)
    options = {**ENGINE, "quantization": quantization, "drafts": ("itself",)}
    config = EngineConfig.from_options("tiny", options)
    with LLM.from_models(config, Models(model, Tokenizer.load(folder), {"draft": model})) as llm:
        found = [*identities(llm)]
    assert len(found) == 8
    for verdict in found:
        assert verdict.passed, verdict.words


@pytest.mark.parametrize("quantization", ["none", "int4"])
@pytest.mark.parametrize("form", PACKED)
def test_quantized_folders(form: str, quantization: Quantization, tmp_path: Path) -> None:
    write_quantized(tmp_path / "model", FORMATS[form])
    passes(tmp_path / "model", quantization)


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_tiny_mixture(folder),
        lambda folder: write_quantized(folder, FORMATS["awq"], experts=4),
    ],
    ids=["floats", "awq"],
)
def test_mixtures(write: Callable[[Path], object], tmp_path: Path) -> None:
    write(tmp_path / "model")
    passes(tmp_path / "model", "int8")


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_stacks_of_experts_in_mxfp4(quantization: Quantization, tmp_path: Path) -> None:
    save_tiny("gpt_oss", tmp_path / "model", vocab_size=64)
    pack_mxfp4(tmp_path / "model")
    passes(tmp_path / "model", quantization)


def test_blocks_of_a_gguf_file(tmp_path: Path) -> None:
    passes(write_blocks(tmp_path / "m.gguf", {"blk.0.ffn_down.weight": "Q6_K"}, "Q4_K"), "gguf")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_models_through_transformers(kind: str, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path / "model")
    passes(tmp_path / "model", "int8", "transformers")


class WithAdapter:
    """An engine, each of whose requests names an adapter."""

    def __init__(self, llm: LLM, adapter: LoRARequest) -> None:
        self.models, self._llm, self._adapter = llm.models, llm, adapter

    def generate(self, prompts: Any, params: Any, **more: Any) -> list[RequestOutput]:
        return self._llm.generate(prompts, params, lora_request=self._adapter, **more)


def test_requests_and_drafts_with_adapters(tmp_path: Path) -> None:
    folder = write_pair(tmp_path)
    for number, name in enumerate(("target", "draft")):
        write_adapter(tmp_path / f"of-{name}", folder / name, seed=number)
    asked = LoRARequest("one", 1, tmp_path / "of-target")
    drafts = {"drafts": folder / "draft", "draft_lora": tmp_path / "of-draft"}
    plainly = {name: getattr(NO_SPECULATION, name) for name in ("drafts", "lookup", "max_nodes")}
    with (
        LLM(folder / "target", **ENGINE, **drafts, kernels="native") as llm,
        llm.variant(**plainly) as plain,
    ):
        engines: Any = [WithAdapter(one, asked) for one in (plain, llm)]
        for temperature in (0, 1):
            params = SamplingParams(temperature=temperature, max_tokens=10)
            found = check_identity("n", params, PROMPTS, *engines, num_single=2, progress=NoProgress())
            assert all(verdict.passed for verdict in found), [verdict.words for verdict in found]
