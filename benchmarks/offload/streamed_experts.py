"""Measures a streamed mixture of experts by its memory: bytes of a pass, and speculation's gain.

    python -m benchmarks.offload.streamed_experts --layers 4

The model is that of experts.py: 8 of 64 experts a layer, and random weights, so a token's experts are nearly
random: the worst case for a cache. Its prepared file is written to --folder and removed.

    memory      share of the experts that have room in memory
    nodes       of a pass: one, or a tree that is a chain
    MB          read in a pass, on average of the passes behind those that fill the memory
    by chance   what the cost curve expects: experts touched by chance, times the share that is not in memory
    whole       what streaming by whole layers reads in a pass, with as much memory
    gain        output tokens/s of an engine with prompt lookup over those without speculation, in turns
    control     the same of a second engine without speculation: the noise of the measurement
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machines.experts import CPU, DTYPE, RandomReader, shape
from benchmarks.study import Study, natural, parser, row, run, settings_of
from specinfer import LLM, EngineConfig, SamplingParams
from specinfer.engine.models import Models
from specinfer.hub import resolve
from specinfer.kernels.choice import Kernels, choose_kernels, streaming_kernels
from specinfer.kernels.disk import StreamSource, measure
from specinfer.kernels.layout import Weight
from specinfer.models.config import ModelConfig
from specinfer.models.decoder import Decoder, decoder_shapes
from specinfer.models.placement import ExpertMemory, ExpertSizes, Placement
from specinfer.models.prepared import NewPreparedFile, PreparedFile
from specinfer.models.streamed import StreamedWeights, expert_records, layer_records
from specinfer.models.weight_memory import PassingWeights
from specinfer.models.weight_sizes import weight_bytes
from specinfer.runtime.batch import chain_rows
from specinfer.runtime.runner import ModelRunner
from specinfer.tokenizer import Tokenizer

SHARES = (0.25, 0.5, 0.75)
NODES = (1, 4)
PASSES = 12  # that count, behind as many that fill the memory
TEXT = 64  # tokens of an answer
ROUNDS = 9
PLAIN: dict[str, Any] = {"lookup": False, "drafts": (), "max_nodes": 1}
TEMPERATURES = (0.0, 1.5)  # texts that repeat themselves, and texts that nothing can guess
MADE_FROM = {"made_by": "benchmarks/offload/streamed_experts.py"}


class WritingReader(RandomReader):
    """Makes random matrices and writes them down."""

    def __init__(self, config: ModelConfig, file: NewPreparedFile) -> None:
        super().__init__(config, "int4")
        self._file_made = file

    def read(self, names: Sequence[str], into: Weight, rows: Sequence[int] | None = None) -> None:
        """As WeightReader says, but for the numbers."""
        super().read(names, into, rows)
        if len(self.shape(names)) > 1:
            self._file_made.write("+".join(names), into)


class PreparedReader(RandomReader):
    """Reads matrices from a prepared file; vectors are ones."""

    def __init__(self, config: ModelConfig, prepared: PreparedFile) -> None:
        super().__init__(config, "int4")
        self._prepared = prepared

    def read(self, names: Sequence[str], into: Weight, rows: Sequence[int] | None = None) -> None:
        """As WeightReader says."""
        if len(self.shape(names)) > 1:
            self._prepared.read("+".join(names), into)
        else:
            super().read(names, into, rows)


def main() -> None:
    options = parser(__doc__, threads=None)
    options.add_argument("--layers", type=natural, default=8, help="(default 8)")
    options.add_argument("--tokenizer", default="smollm2-135m", help="model whose tokenizer is used")
    options.add_argument("--folder", type=Path, default=None, help="folder for the temporary prepared file")
    args = options.parse_args()
    config = shape(args.layers)
    named = {"model": f"qwen3-moe-like-{args.layers}-layers", **settings_of(args)}
    named.pop("folder", None)
    study = Study("streamed_experts", args.out, named)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="experts-") as folder:
        measured(config, Path(folder), study, args)
    print(study.write(page(config, study.cells), args.threads))


def measured(config: ModelConfig, folder: Path, study: Study, args: argparse.Namespace) -> None:
    """Fill the cells that the study lacks."""
    missing = [share for share in SHARES if f"{share}" not in study.cells]
    if not missing:
        return
    chosen, why = choose_kernels("native", CPU)
    assert chosen.library is not None, why
    if args.threads is not None:
        chosen.library.set_threads(args.threads)
    kernels = streaming_kernels(chosen, weight_bytes(config, DTYPE, chosen, "int4"))
    prepared = write(config, folder / "model.safetensors", kernels)
    for share in missing:
        study.keep(f"{share}", streamed(config, prepared, kernels, share, args.tokenizer))


def write(config: ModelConfig, path: Path, kernels: Kernels) -> PreparedFile:
    """The prepared file of a random model."""

    def failed(error: OSError) -> None:
        raise error

    size = weight_bytes(config, DTYPE, kernels, "int4")
    with (
        NewPreparedFile(path, MADE_FROM, list(decoder_shapes(config)), size, failed) as file,
        WritingReader(config, file) as reader,
    ):
        Decoder(config, PassingWeights(reader, CPU, kernels))
        file.finish()
    found = PreparedFile.open(path, MADE_FROM)
    assert found is not None, "a file that was finished is whole"
    return found


def streamed(
    config: ModelConfig, prepared: PreparedFile, kernels: Kernels, share: float, tokenizer: str
) -> dict[str, Any]:
    """Bytes and seconds of passes, and gains, with that share of the experts in memory."""
    names, experts = expert_records(prepared), config.experts
    assert experts is not None
    sizes = ExpertSizes(experts, config.num_layers, max(prepared.records[name].length for name in names))
    room = ExpertMemory(sizes, int(share * sizes.all))
    layers = [prepared.records[name].length for name in layer_records(prepared)]
    placement, disk = Placement(1 << 60, {}, layers, 0, (), room), measure(StreamSource(prepared.path))
    with PreparedReader(config, prepared) as reader:
        weights = StreamedWeights(reader, kernels, prepared, placement, disk, table_in_memory=True)
        model = Decoder(config, weights)
    stream, nodes_of = model.stream, dict[str, Any]()
    assert stream is not None
    random = torch.Generator().manual_seed(2)
    with stream:
        runner = ModelRunner(model, num_blocks=8, block_size=256)
        for nodes in NODES:
            read = began = 0.0
            for number in range(2 * PASSES):
                if number == PASSES:
                    read, began = stream.read_bytes, time.perf_counter()
                tokens = torch.randint(0, config.vocab_size, (nodes,), generator=random).tolist()
                runner.forward([chain_rows(tokens, number * nodes, range(8), logits=True)])
            nodes_of[str(nodes)] = {
                "megabytes": (stream.read_bytes - read) / PASSES / 1e6,
                "milliseconds": (time.perf_counter() - began) / PASSES * 1e3,
                "by_chance": room.read_bytes(nodes) / 1e6,
                "whole": (sizes.all - room.slots) * sizes.record / 1e6,
            }
        gains = gains_of(model, Tokenizer.load(resolve(tokenizer)), random)
    return {
        "nodes": nodes_of,
        "gains": gains,
        "disk": disk.bytes_per_second,
        "expert": sizes.record,
        "slots": room.slots,
    }


def gains_of(model: Decoder, tokenizer: Tokenizer, random: torch.Generator) -> dict[str, Any]:
    """Speeds with and without speculation by temperature: medians of rounds, each with its own prompt."""
    options = {"lookup": True, "max_batch_size": 1, "max_context": 512, "kv_cache_memory": 1 << 26}
    config = EngineConfig.from_options("mixture", {"device": "cpu", "dtype": "bfloat16", **options})
    found = dict[str, Any]()
    with (
        LLM.from_models(config, Models(model, tokenizer, {})) as llm,
        llm.variant(**PLAIN) as plain,
        llm.variant(**PLAIN) as control,
    ):
        engines = [("plain", plain), ("lookup", llm), ("control", control)]
        for temperature in TEMPERATURES:
            speeds = dict[str, list[float]](plain=[], lookup=[], control=[])
            for number in range(ROUNDS + 1):
                prompt = torch.randint(0, model.config.vocab_size, (16,), generator=random).tolist()
                params = SamplingParams(
                    temperature=temperature, max_tokens=TEXT, seed=number, ignore_eos=True
                )
                texts = []
                for name, engine in engines:
                    began = time.perf_counter()
                    [output] = engine.generate([prompt], params)
                    speeds[name].append(len(output.token_ids) / (time.perf_counter() - began))
                    texts.append(output.token_ids)
                assert texts[0] == texts[1] == texts[2], "speculation changes no text"
                engines = engines[1:] + engines[:1]  # the first answer of a round reads more experts
            found[f"{temperature:g}"] = {"plain": statistics.median(speeds["plain"][1:])} | {
                key: statistics.median(
                    fast / slow for fast, slow in zip(speeds[name][1:], speeds["plain"][1:], strict=True)
                )
                for key, name in (("gain", "lookup"), ("control", "control"))
            }  # the first round warms up
    return found


def page(config: ModelConfig, cells: dict[str, Any]) -> list[str]:
    experts = config.experts
    assert experts is not None
    lines = [
        "# Experts from the disk",
        "",
        f"{config.num_layers} layers of {experts.count} experts of {experts.size}, of which a token has "
        f"{experts.per_token}; hidden size {config.hidden_size}, int4. Random weights and random tokens: the "
        "worst case for a cache.",
        f"Means of {PASSES} passes; the last column is the bytes over the disk's measured rate.",
        "",
        "| in memory | nodes | MB read | by chance | whole layers | share of whole | ms | ms of reads |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for share, cell in cells.items():
        for nodes, found in cell["nodes"].items():
            lines.append(
                row(
                    f"{float(share):.0%}",
                    nodes,
                    f"{found['megabytes']:.1f}",
                    f"{found['by_chance']:.1f}",
                    f"{found['whole']:.0f}",
                    f"{found['megabytes'] / found['whole']:.3f}",
                    f"{found['milliseconds']:.1f}",
                    f"{found['megabytes'] * 1e9 / cell['disk']:.1f}",
                )
            )
    lines += [
        "",
        f"Answers of {TEXT} tokens, one at a time, with lookup, without speculation, and without it again as "
        f"a control: medians of {ROUNDS} prompts, which begin with each of the three in turn.",
        "",
        "| in memory | temperature | tokens/s without speculation | gain | control |",
        "|---:|---:|---:|---:|---:|",
    ]
    for share, cell in cells.items():
        for temperature, speeds in cell["gains"].items():
            ratios = [f"{speeds[name]:.3f}" for name in ("gain", "control")]
            lines.append(row(f"{float(share):.0%}", temperature, f"{speeds['plain']:.2f}", *ratios))
    return lines


if __name__ == "__main__":
    run(main)
