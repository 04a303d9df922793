"""Heads of every kind, engines with one of them, and the logits of the plain modules."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from specinfer import SamplingParams
from specinfer.config import EngineConfig
from specinfer.engine.models import Models
from specinfer.engine.steps import TreeEvent
from specinfer.heads.block import BlockHead
from specinfer.heads.checkpoint import AnyHeadModel, HeadFolder, load_head
from specinfer.heads.config import HeadConfig
from specinfer.heads.eagle import EagleHead
from specinfer.kernels.choice import Kernels, choose_kernels, draft_kernels
from specinfer.llm import LLM
from specinfer.models.open_model import open_model
from specinfer.request import RequestOutput
from specinfer.runtime.batch import chain_rows
from specinfer.runtime.runner import ModelRunner
from specinfer.sampling_params import SpeculationParams
from specinfer.tree import TokenTree
from specinfer.tree.token_tree import draws_by_parent
from tests.engines import CPU, ENGINE, Tiny
from tests.heads import block_config, eagle_config, tiny_body

PROMPTS = [[9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12], [3] * 37, [50, 2, 61, 7]]
AnyHead = EagleHead | BlockHead
HEADS: dict[str, HeadConfig] = {
    "eagle": eagle_config(own_head=False),
    "eagle 3.1, two layers": eagle_config(
        body=tiny_body(num_layers=2, bias=True), fc_norm=True, norm_output=True, own_embedding=True
    ),
    "block": block_config(own_head=False),
    "block behind the last state": block_config(reads_last=True),
    "block, bidirectional": block_config(causal=False, sample_from_anchor=False, markov_rank=0),
}
SAMPLED = {"temperature": 0.8, "seed": 5}


def load(
    tiny: Tiny, folder: Path, written: Path, kernels: Kernels | None = None, **how: Any
) -> tuple[HeadFolder, AnyHeadModel]:
    """Open a written head of the target in `folder`, and load it."""
    target = open_model(folder / "target")
    head = HeadFolder(written, target.config, target)
    kernels = kernels or draft_kernels(choose_kernels("auto", CPU)[0])
    return head, load_head(head, tiny.target, kernels=kernels, **how)


def logits_made(text: list[int], shortlist: int) -> slice:
    """Return which logits a head makes behind a text, of all or of the first `shortlist` tokens."""
    last = text[-64:]
    return slice(shortlist if sum(token >= shortlist for token in last) <= len(last) / 8 else None)


def engine(tiny: Tiny, head: AnyHeadModel | None, **options: Any) -> LLM:
    drafts = {} if head is None else {"draft": head}
    config = EngineConfig.from_options("tiny", {**ENGINE, "drafts": ("head",) * len(drafts), **options})
    return LLM.from_models(config, Models(tiny.target, tiny.tokenizer, dict(drafts)))


def shaped(max_tokens: int) -> SamplingParams:
    """Return greedy parameters with a fixed shape, so that blocks are drawn level by level."""
    shape = SpeculationParams(expansion=(2, 2, 1))
    return SamplingParams(max_tokens=max_tokens, temperature=0, speculation=shape)


def trees_after(
    prompt: list[int], output: RequestOutput, events: Iterable[TreeEvent]
) -> Iterator[tuple[list[int], TokenTree]]:
    """Yield the trees of a request, each with the text before it."""
    text, end = [*prompt, *output.token_ids], len(prompt)
    for event in events:
        if event.request_id == output.request_id:
            yield text[:end], event.tree
            end += 1 + len(event.acceptance.path)


def hidden_states(tiny: Tiny, text: list[int]) -> torch.Tensor:
    """Return the inputs of all layers and the last output: [T, 1 + layers, D]."""
    runner = ModelRunner(tiny.target, num_blocks=1, block_size=128)
    layers = range(tiny.target.config.num_layers + 1)
    flight = runner.launch([chain_rows(text, 0, [0], logits=True)], taps=layers)
    return torch.stack([flight.tapped([layer])[:, 0] for layer in layers], dim=1)


def answered(
    llm: LLM, tiny: Tiny, prompts: Sequence[list[int]], params: SamplingParams
) -> Iterator[tuple[list[int], torch.Tensor, TokenTree]]:
    """Answer prompts together; yield each tree behind the text before it and the states of the whole text."""
    events: list[TreeEvent] = []
    llm.on_tree = events.append
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        hidden_TND = hidden_states(tiny, [*prompt, *output.token_ids])
        for text, tree in trees_after(prompt, output, events):
            yield text, hidden_TND, tree


@torch.no_grad()
def module_logits(
    head: AnyHead, text: list[int], hidden_TND: torch.Tensor, above: list[int], shift: int = 0
) -> torch.Tensor:
    """Return the module's logits after the text and `above`; `shift` moves the layers that it reads."""
    end = len(text)
    taps_TND = hidden_TND[None, : end - 1, [tap + shift for tap in head.config.taps]]
    if isinstance(head, EagleHead):
        tokens = torch.zeros(1, end - 1, 1 + len(above), dtype=torch.int64)
        tokens[0, :, 0] = torch.tensor(text[1:])
        tokens[0, -1, 1:] = torch.tensor(above)
        return head.logits(head(tokens, taps_TND)[0, -1, len(above)])
    hidden = head(taps_TND, torch.tensor([[text[-1]]]), torch.tensor([[end - 1]]))
    logits = head.logits(hidden[0, 0, len(above)])
    if head.config.markov_rank:
        logits = logits + head.pair_logits(torch.tensor([text[-1], *above][-1]))
    return logits


def likelihoods(
    head: AnyHead, text: list[int], hidden_TND: torch.Tensor, tree: TokenTree, shift: int = 0
) -> torch.Tensor:
    """Return the module's probability of each guess, minus that in the engine.

    The root of `tree` is the text's last token; `shift` moves the layers that the module reads.
    """
    found, ids = [0.0], head.ids.tolist()
    for parent, draws in draws_by_parent(tree.draws).items():
        probs = module_logits(head, text, hidden_TND, list(tree.path_tokens(parent)), shift).softmax(-1)
        found += [float(probs[ids.index(tree.token_ids[draw.node])]) - draw.confidence for draw in draws]
    return torch.tensor(found)


def likelihood_gap(
    head: AnyHead, text: list[int], hidden_TND: torch.Tensor, tree: TokenTree, shift: int = 0
) -> float:
    """Return the largest difference between a guess's probability in the engine and in the module."""
    return float(likelihoods(head, text, hidden_TND, tree, shift).abs().max())


def is_as_likely(head: AnyHead, text: list[int], hidden_TND: torch.Tensor, tree: TokenTree) -> bool:
    """True if the gap is one of float32 rounding, whatever order a machine adds in.

    Random layers without norms magnify rounding, some heads a hundred times. So the bound is 16 times the
    largest change that the module makes if all its weights are rounded otherwise, by half a unit on average.
    """
    found = likelihoods(head, text, hidden_TND, tree)
    if found.abs().max() < 1e-5:
        return True
    generator, change = torch.Generator().manual_seed(0), 0.0
    for _ in range(4):
        other = copy.deepcopy(head)
        with torch.no_grad():
            for weight in other.parameters():
                weight.mul_(1 + 2**-24 * torch.randn(weight.shape, generator=generator))
        moved = likelihoods(other, text, hidden_TND, tree) - found
        change = max(change, float(moved.abs().max()))
    return float(found.abs().max()) < min(16 * change, 1e-3)
