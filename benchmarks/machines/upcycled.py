"""Measures what speculation gains on a mixture of experts, made of a dense model by upcycling.

    python -m benchmarks.machines.upcycled --model TARGET --draft DRAFT --dataset gsm8k.jsonl

Each expert of a layer is a copy of the dense model's MLP in its own memory, and the weights of a token's
experts add up to 1. So texts and acceptance are the dense model's, and a pass reads the matrices of every
expert that its rows choose. Routers are random: their rows are orthogonal to the layer's mean input, and
their logits have equal variance, because training balances the use of experts, too. Neighbouring tokens of a
trained model may share more experts, or fewer.

    none, control   two engines without speculation; their ratio is the noise of the measurement
    lookup, draft   prompt lookup alone, and the draft models alone, with trees by cost
    chain           the draft models alone, with a chain of 3 nodes in every step, whatever it costs
    ratio           tokens/s relative to `none`, from the first token on, with a 95% interval over rounds
    expected        distinct experts of a layer if each of n tokens chose independently
    counted         distinct experts of a layer for n adjacent tokens of an answer, averaged over layers

A round is a batch of prompts that all engines answer in turn, in rotating order. The first one is a warm-up.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.machines.experts import CPU, choices_of
from benchmarks.replay.replay import speedup
from benchmarks.study import (
    REQUIRED,
    Study,
    ask,
    natural,
    parser,
    questions_of,
    row,
    run,
    settings_of,
    total_figures,
    without_speculation,
)
from specinfer import LLM, EngineConfig, RequestOutput, SamplingParams, SpeculationParams
from specinfer.engine.models import Models, load_models
from specinfer.hub import resolve
from specinfer.kernels.layout import FloatWeight, Weight, lay_out_floats
from specinfer.models.config import Experts, ModelConfig
from specinfer.models.decoder import Decoder, decoder_shapes
from specinfer.models.layers import MLP
from specinfer.models.open_model import OpenModel, open_model
from specinfer.models.prepared import PreparedFile
from specinfer.models.weight_memory import Shared, Weights
from specinfer.models.weight_reader import TensorFile, WeightReader
from specinfer.models.weights import prepare
from specinfer.progress import NoProgress
from specinfer.runtime.batch import chain_rows
from specinfer.runtime.runner import ModelRunner
from specinfer.speculation_config import Quantization
from specinfer.tree.expansion import Expansion

WAYS: Final = ("none", "lookup", "draft", "chain", "control")
CHAIN: Final = SpeculationParams(expansion=Expansion.parse("1,1,1"))
MODELS: Final = ("mixture", "dense")
TOKENS: Final = (1, 2, 4, 8, 16)  # adjacent tokens whose experts are counted
CALIBRATION: Final = 4  # prompts whose tokens balance the routers
BLOCK: Final = 256  # slots of a KV block in passes of this script
MAX_CONTEXT: Final = 1024
KV_MEMORY: Final = 1 << 28  # bytes of each engine
_EXPERT: Final = re.compile(r"(?<=\.mlp\.)experts\.\d+\.")
_ROUTER: Final = re.compile(r"model\.layers\.(\d+)\.mlp\.gate\.weight")

Rounds = list[list[RequestOutput]]


class UpcyclingReader(WeightReader):
    """Reads the MLP of a dense model's prepared file for each expert, and takes the given routers."""

    def __init__(
        self,
        file: TensorFile,
        prepared: PreparedFile,
        quantization: Quantization,
        dtype: torch.dtype,
        config: ModelConfig,
        routers: Sequence[Tensor],
    ) -> None:
        """`config` is the mixture's; `routers` are float32 [experts, D], one per layer."""
        super().__init__(file, dtype, NoProgress(), quantization, prepared)
        self._shapes = {**file.shapes, **decoder_shapes(config)}
        self._routers = routers

    def read(self, names: Sequence[str], into: Weight, rows: Sequence[int] | None = None) -> None:
        """Fill `into`; see WeightReader."""
        if (router := _ROUTER.fullmatch(names[0])) is None:
            super().read([_EXPERT.sub("", name) for name in names], into, rows)
            return
        assert isinstance(into, FloatWeight), "native products have blocks of rows"
        lay_out_floats(self._routers[int(router[1])], into)


def main() -> None:
    options = parser(
        __doc__,
        model=REQUIRED,
        draft=REQUIRED,
        dataset=REQUIRED,
        quantization="int4",
        limit=5,
        max_tokens=64,
        batch_size=1,
        threads=None,
    )
    options.add_argument("--experts", type=natural, default=8, help="of each layer (default 8)")
    options.add_argument("--per-token", type=natural, default=2, help="experts of a token (default 2)")
    args = options.parse_args()
    study = Study("upcycled", args.out, settings_of(args))
    missing = [file for file in args.dataset if file.stem not in study.cells]
    if missing:
        with ExitStack() as stack:
            engines = made(args, stack)
            for file in missing:
                questions = questions_of([file], (1 + args.limit) * args.batch_size)
                study.keep(file.stem, measured(engines, questions, args.batch_size, args.max_tokens))
                print("\n".join(page(study.settings, study.cells)), flush=True)
    print(study.write(page(study.settings, study.cells), args.threads))


def made(args: argparse.Namespace, stack: ExitStack) -> dict[str, dict[str, LLM]]:
    """Return the engines of each model by way; the stack closes them."""
    config = EngineConfig.from_options(
        args.model,
        {
            "device": "cpu",
            "kernels": "native",
            "quantization": args.quantization,
            "draft_quantization": args.quantization,
            "drafts": tuple(args.draft),
            "lookup": False,
            "max_batch_size": args.batch_size,
            "max_context": MAX_CONTEXT,
            "kv_cache_memory": KV_MEMORY,
            "threads": args.threads,
        },
    )
    models = load_models(config)
    dense = models.target
    if not isinstance(dense, Decoder) or not dense.config.gated_mlp or dense.config.mlp_bias:
        sys.exit(
            f"error: {args.model} has no gated MLP without biases; use a model with one, such as Qwen2.5"
        )
    calibrating = questions_of(args.dataset, CALIBRATION)
    routers = random_routers(dense, [models.tokenizer.encode(text) for text in calibrating], args.experts)
    file = open_model(resolve(args.model))
    mixture = upcycled(dense, file, args.quantization, routers, args.per_token)
    config = replace(config, model=f"upcycled {Path(args.model).stem}")  # names what policies learn here
    other = replace(models, target=mixture, origin={}, adapters=None)
    return {"mixture": engines_of(config, other, stack), "dense": engines_of(config, models, stack)}


def engines_of(config: EngineConfig, models: Models, stack: ExitStack) -> dict[str, LLM]:
    """Return an engine for each way; the stack closes them."""
    drafted = stack.enter_context(LLM.from_models(config, models))
    return {
        "none": stack.enter_context(without_speculation(drafted)),
        "lookup": stack.enter_context(drafted.variant(drafts=(), lookup=True)),
        "draft": drafted,
        "chain": stack.enter_context(drafted.variant()),
        "control": stack.enter_context(without_speculation(drafted)),
    }


def random_routers(dense: Decoder, texts: Sequence[Sequence[int]], count: int) -> list[Tensor]:
    """Return a router for each layer, balanced over the tokens of these texts."""
    each = [mlp_inputs(dense, text) for text in texts]
    random, found = torch.Generator().manual_seed(1), list[Tensor]()
    for of_texts in zip(*each, strict=True):
        x_TD = torch.cat(of_texts)
        mean_D = x_TD.mean(0)
        router_ED = torch.randn(count, len(mean_D), generator=random)
        router_ED -= torch.outer(router_ED @ mean_D, mean_D) / mean_D.dot(mean_D)
        found.append(router_ED / (x_TD @ router_ED.T).std(0)[:, None])
    return found


def mlp_inputs(dense: Decoder, text: Sequence[int]) -> list[Tensor]:
    """Return the inputs of each layer's MLP for the tokens of a text, float32 [T, D]."""
    compute, native, found = MLP.__call__, dense._native, list[Tensor]()

    def noted(self: MLP, x_TD: Tensor, *others: Any) -> Tensor:
        found.append(x_TD.float())
        return compute(self, x_TD, *others)

    dense._native = None
    try:
        with patch.object(MLP, "__call__", noted):
            read(dense, text)
    finally:
        dense._native = native
    return found


def read(model: Decoder, text: Sequence[int]) -> None:
    """Run one pass over a text."""
    blocks = -(-len(text) // BLOCK)
    runner = ModelRunner(model, num_blocks=blocks, block_size=BLOCK)
    runner.forward([chain_rows(text, 0, range(blocks), logits=True)])


def upcycled(
    dense: Decoder, file: OpenModel, quantization: Quantization, routers: Sequence[Tensor], per_token: int
) -> Decoder:
    """Return the mixture; it shares the embeddings and the output layer of the dense model."""
    experts = Experts(len(routers[0]), per_token, dense.config.intermediate_size, normalized=True)
    config = replace(dense.config, experts=experts)
    prepared = prepare(file, dtype=dense.dtype, kernels=dense.kernels, quantization=quantization)
    shared = Shared(table=dense.table, output=dense.output)
    with UpcyclingReader(file, prepared, quantization, dense.dtype, config, routers) as reader:
        return Decoder(config, Weights(reader, CPU, dense.kernels, None, shared))


def measured(
    engines: Mapping[str, Mapping[str, LLM]], questions: Sequence[str], batch: int, max_tokens: int
) -> dict[str, Any]:
    """Return the speeds of all engines on these questions, and the experts of the mixture's answers."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    turns = [(model, way) for model in engines for way in engines[model]]
    answers: dict[tuple[str, str], Rounds] = {turn: [] for turn in turns}
    for number, start in enumerate(range(0, len(questions) // batch * batch, batch)):
        for model, way in turns[number % len(turns) :] + turns[: number % len(turns)]:
            asked = replace(params, speculation=CHAIN) if way == "chain" else params
            outputs = ask(engines[model][way], questions[start : start + batch], asked)
            if number:
                answers[model, way].append(outputs)
    plain = texts_of(answers["mixture", "none"])
    target = engines["mixture"]["none"].models.target
    assert isinstance(target, Decoder)
    return {
        "speeds": {
            model: {way: figures_of(answers[model, way]) for way in engines[model]} for model in engines
        },
        "texts": len(plain),
        "equal": {
            model: sum(
                len({*found}) == 1
                for found in zip(*(texts_of(answers[model, way]) for way in engines[model]), strict=True)
            )
            for model in engines
        },
        "as_dense": sum(map(tuple.__eq__, plain, texts_of(answers["dense", "none"]))),
        "experts": experts_of(
            target, [output for outputs in answers["mixture", "none"] for output in outputs]
        ),
    }


def texts_of(rounds: Rounds) -> list[tuple[int, ...]]:
    return [output.token_ids for outputs in rounds for output in outputs]


def figures_of(rounds: Rounds) -> dict[str, Any]:
    """Return seconds of each round from its first token on, tokens after that one, and tokens per step."""
    seconds, tokens = list[float](), 0
    for outputs in rounds:
        times = [(one.timing.first_token, one.timing.finished) for one in outputs]
        seconds.append(max(end or 0.0 for _, end in times) - min(first or 0.0 for first, _ in times))
        tokens += sum(len(one.token_ids) - 1 for one in outputs)
    figures = total_figures(output for outputs in rounds for output in outputs)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_step": figures.tokens_per_step,
        "nodes": figures.drafted_tokens / max(1, figures.steps),
    }


def experts_of(mixture: Decoder, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the distinct experts of adjacent tokens of these answers, and the share of the most used one."""
    experts, layers = mixture.config.experts, mixture.config.num_layers
    assert experts is not None
    counts: dict[int, list[int]] = {tokens: [] for tokens in TOKENS}
    used = torch.zeros(layers, experts.count)
    for output in outputs:
        prompt, text = len(output.prompt_token_ids), [*output.prompt_token_ids, *output.token_ids]
        for layer, numbers_TK in enumerate(choices_of(mixture, partial(read, mixture, text))):
            chosen = numbers_TK[prompt:].tolist()
            used[layer] += torch.bincount(numbers_TK[prompt:].flatten(), minlength=experts.count)
            for tokens, found in counts.items():
                found += [
                    len({number for numbers in chosen[at : at + tokens] for number in numbers})
                    for at in range(0, len(chosen) - tokens + 1, tokens)
                ]
    counted = {tokens: sum(found) / len(found) for tokens, found in counts.items() if found}
    return {
        "expected": {f"{tokens}": experts.active(tokens) for tokens in counted},
        "counted": {f"{tokens}": found for tokens, found in counted.items()},
        "most_used": float((used / used.sum(1, keepdim=True)).amax(1).mean()),
    }


def page(settings: Mapping[str, Any], cells: Mapping[str, Any]) -> list[str]:
    count, each = settings["experts"], settings["per_token"]
    lines = [
        f"# What speculation gains on a mixture: {Path(settings['model']).stem}, {each} of {count} experts",
        "",
        f"{settings['quantization']}, each expert a copy of the dense model's MLP, random balanced routers; "
        f"draft {', '.join(Path(one).stem for one in settings['draft'])}. Greedy answers of "
        f"{settings['max_tokens']} tokens, batch {settings['batch_size']}, {settings['limit']} rounds behind "
        "one that warms up; all engines answer in turns. Ratios to no speculation with 95% intervals over "
        "rounds, then tokens per step and the nodes of a tree.",
        "",
        row("prompts", "model", "tokens/s without", "control", "lookup", "draft", "chain"),
        "|---|---|---:|---|---|---|---|",
    ]
    for name, cell in cells.items():
        for model in MODELS:
            speeds = cell["speeds"][model]
            plain = speeds["none"]
            ratios = [ratio_of(plain, speeds[way]) for way in ("control", "lookup", "draft", "chain")]
            lines.append(row(name, model, f"{plain['tokens'] / sum(plain['seconds']):.1f}", *ratios))
    for name, cell in cells.items():
        experts = cell["experts"]
        lines += [
            "",
            f"## {name}",
            "",
            f"Texts of the mixture that are the same in all engines: {cell['equal']['mixture']} of "
            f"{cell['texts']}; of the dense model: {cell['equal']['dense']}. Texts of the mixture that are "
            f"the dense model's: {cell['as_dense']}. The most used expert of a layer has "
            f"{experts['most_used']:.1%} of the choices on average (balanced: {1 / count:.1%}).",
            "",
            row("adjacent tokens", *experts["counted"]),
            "|---|" + "---:|" * len(experts["counted"]),
            row("expected experts", *(f"{found:.2f}" for found in experts["expected"].values())),
            row("counted", *(f"{found:.2f}" for found in experts["counted"].values())),
        ]
    return lines


def ratio_of(plain: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return a ratio of speeds with its interval, tokens per step and nodes, as text."""
    found = speedup(plain["seconds"], other["seconds"])
    text = f"{found.ratio:.2f} [{found.low:.2f}, {found.high:.2f}]"
    if other["nodes"]:
        text += f", {other['tokens_per_step']:.2f}, {other['nodes']:.1f}"
    return text


if __name__ == "__main__":
    run(main)
