"""Heads in engines: the text is the same with them and without, and they guess what plain modules would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specinfer import SamplingParams
from specinfer.config import EngineConfig
from specinfer.engine.build import Models
from specinfer.engine.trace import TreeEvent
from specinfer.errors import ConfigError, ModelError
from specinfer.heads.block import BlockHead
from specinfer.heads.checkpoint import HeadFolder
from specinfer.heads.config import AnyHeadConfig
from specinfer.heads.eagle import EagleHead
from specinfer.heads.load import HeadModel, load_head
from specinfer.heads.medusa import MedusaHead
from specinfer.heads.medusa_model import MedusaModel
from specinfer.kernels.choice import choose_kernels, guessing
from specinfer.llm import LLM
from specinfer.models.weights import open_model
from specinfer.plan import StepPlan
from specinfer.replay.recorder import check
from specinfer.runtime.batch import chain_rows
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.features import TappedRows
from specinfer.runtime.head_runner import MedusaRunner
from specinfer.runtime.runner import ModelRunner
from specinfer.speculate.medusa import MedusaDraft
from specinfer.speculation_params import SpeculationParams
from specinfer.tree import TokenTree
from specinfer.tree.distribution import Distribution
from specinfer.tree.token_tree import draws_by_parent
from tests.engines import CPU, ENGINE, Tiny, assert_idle, engine_of, slow_generate, write_tiny
from tests.heads import (
    block_config,
    eagle_config,
    medusa_config,
    tiny_body,
    tiny_head,
    write_any,
    write_tiny_head,
)

PROMPTS = [[9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12], [3] * 37, [50, 2, 61, 7]]
AnyHead = EagleHead | BlockHead | MedusaHead
HEADS: dict[str, AnyHeadConfig] = {
    "eagle": eagle_config(own_head=False),
    "eagle 3.1, two layers": eagle_config(
        body=tiny_body(num_layers=2, bias=True), fc_norm=True, norm_output=True
    ),
    "eagle in one pass": eagle_config(
        body=tiny_body(num_layers=2), mask_token_id=2, norm_before_residual=True
    ),
    "block": block_config(own_head=False),
    "block behind the last state": block_config(reads_last=True),
    "block, bidirectional": block_config(
        causal=False, sample_from_anchor=False, markov_rank=0, confidence=False, confidence_reads_token=False
    ),
    "medusa": medusa_config(num_layers=2),
}
SAMPLED = {"temperature": 0.8, "seed": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Tiny:
    return write_tiny(folder, num_layers=3)


@pytest.fixture(scope="module")
def heads(folder: Path, tiny: Tiny) -> dict[str, HeadModel]:
    target = open_model(folder / "target")
    loaded = {}
    for number, (name, config) in enumerate(HEADS.items()):
        written = write_any(config, folder / f"head{number}", seed=number)
        head = HeadFolder(written, target.config)
        loaded[name] = load_head(head, target, tiny.target, kernels=guessing(choose_kernels("auto", CPU)[0]))
    return loaded


@pytest.fixture(scope="module")
def modules(folder: Path, heads: dict[str, HeadModel]) -> dict[str, AnyHead]:
    """The same heads as plain modules, with the same tables."""
    target = open_model(folder / "target")
    return {
        name: HeadFolder(folder / f"head{number}", target.config).module(target)
        for number, name in enumerate(heads)
    }


def engine(tiny: Tiny, head: HeadModel | None, **options: Any) -> LLM:
    drafts = {} if head is None else {"draft": head}
    config = EngineConfig.from_options("tiny", {**ENGINE, "drafts": ("head",) * len(drafts), **options})
    return LLM.from_models(config, Models(tiny.target, tiny.tokenizer, dict(drafts)))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, SAMPLED, {**SAMPLED, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("reuse", [True, False])
def test_the_text_is_that_of_the_target_alone(
    tiny: Tiny, heads: dict[str, HeadModel], name: str, sampling: dict[str, Any], reuse: bool
) -> None:
    params = SamplingParams(max_tokens=24, **sampling)
    alone = [slow_generate(tiny.target, prompt, params) for prompt in PROMPTS]
    with engine(tiny, heads[name], block_size=4, prefix_reuse=reuse, max_step_tokens=20) as llm:
        for _ in range(2):  # once more behind what the first left in the cache
            outputs = llm.generate(PROMPTS, params)
            assert [list(output.token_ids) for output in outputs] == alone
            assert sum(output.figures.proposed_by.get("draft", 0) for output in outputs) > 0
        assert_idle(llm)


def hidden_states(tiny: Tiny, text: list[int]) -> torch.Tensor:
    """What every layer is given, what the last puts out, and the last norm of that: [T, 2 + layers, D]."""
    runner = ModelRunner(tiny.target, num_blocks=1, block_size=128)
    layers = range(tiny.target.config.num_layers + 1)
    flight = runner.launch([chain_rows(text, 0, [0], logits=True)], taps=layers)
    states_TND = torch.stack([flight.hidden(layer) for layer in layers], dim=1)
    return torch.cat((states_TND, normed(tiny, states_TND[:, -1:])), dim=1)


def normed(tiny: Tiny, x: torch.Tensor) -> torch.Tensor:
    """The last norm of what the last layer puts out."""
    weight_D = tiny.target._final_norm.weight_D  # type: ignore[attr-defined]
    return x / (x.square().mean(-1, keepdim=True) + tiny.target.config.norm_eps).sqrt() * weight_D


@torch.no_grad()
def module_logits(
    head: AnyHead, text: list[int], hidden_TND: torch.Tensor, above: list[int], shift: int = 0
) -> torch.Tensor:
    """The module's logits behind `above`, which follows the text; it reads layers that `shift` moves."""
    end = len(text)
    if isinstance(head, MedusaHead):  # one off is the same state before the last norm
        return head(hidden_TND[end - 2, -1 - shift])[len(above)]
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


def likelihood_gap(
    head: AnyHead, text: list[int], hidden_TND: torch.Tensor, tree: TokenTree, shift: int = 0
) -> float:
    """The largest difference between what a head in an engine said of a guess and what the module says.

    `tree` is rooted at the text's last token; `shift` moves the layers that the module reads.
    """
    gap, ids = 0.0, head.ids.tolist()
    for parent, draws in draws_by_parent(tree.draws).items():
        said = module_logits(head, text, hidden_TND, list(tree.path_tokens(parent)), shift).softmax(-1)
        for draw in draws:
            gap = max(gap, abs(float(said[ids.index(tree.token_ids[draw.node])]) - draw.confidence))
    return gap


@pytest.mark.parametrize("name", HEADS)
def test_every_guess_is_as_likely_as_the_module_says(
    tiny: Tiny, heads: dict[str, HeadModel], modules: dict[str, AnyHead], name: str
) -> None:
    gaps: list[float] = []
    depths = set[int]()
    events: list[TreeEvent] = []
    with engine(tiny, heads[name], block_size=4, max_step_tokens=20) as llm:
        engine_of(llm).on_tree = events.append
        for prompt in [*PROMPTS, *PROMPTS]:  # the second time its keys and values lie in blocks it finds
            events.clear()
            (output,) = llm.generate([prompt], shaped(8))
            text, end = [*prompt, *output.token_ids], len(prompt)
            hidden_TND = hidden_states(tiny, text)
            for event in events:
                depths.update(event.tree.depths())
                gaps.append(likelihood_gap(modules[name], text[:end], hidden_TND, event.tree))
                if len(gaps) == 3:
                    wrong = likelihood_gap(modules[name], text[:end], hidden_TND, event.tree, shift=1)
                    assert wrong > 1e-3, "a head whose taps are one layer off would not be found"
                end += 1 + len(event.acceptance.path)
        assert llm.statistics().prefix_hits > 0
    assert len(gaps) > 18
    assert depths == {0, 1, 2, 3}
    assert max(gaps) < 1e-4


def test_a_medusa_head_reads_one_state_and_no_other(
    tiny: Tiny, heads: dict[str, HeadModel], modules: dict[str, AnyHead]
) -> None:
    events: list[TreeEvent] = []
    with engine(tiny, heads["medusa"]) as llm:
        engine_of(llm).on_tree = events.append
        (output,) = llm.generate([PROMPTS[0]], shaped(8))
    text, end, module = [*PROMPTS[0], *output.token_ids], len(PROMPTS[0]), modules["medusa"]
    right_TND = hidden_states(tiny, text)
    wrong = {
        "before the norm": right_TND[:, :-1],
        "a layer off": normed(tiny, right_TND[:, :-2]),
        "a token late": right_TND.roll(-1, 0),
        "a token early": right_TND.roll(1, 0),
    }
    seen = 0
    for event in events:
        if event.tree.num_nodes > 1:
            seen += 1
            assert likelihood_gap(module, text[:end], right_TND, event.tree) < 1e-4
            for name, states_TND in wrong.items():
                assert likelihood_gap(module, text[:end], states_TND, event.tree) > 1e-3, name
        end += 1 + len(event.acceptance.path)
    assert seen > 3


def test_a_medusa_step_is_priced_by_a_pass_for_as_many_texts(
    tiny: Tiny, heads: dict[str, HeadModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    unread: list[list[int]] = []
    passes: list[tuple[int, int]] = []  # rows that are asked the price of, and texts that are run
    begin, run = MedusaDraft.begin, MedusaRunner.run

    def noted_begin(draft: MedusaDraft, plan: StepPlan) -> list[int]:
        unread.append(begin(draft, plan))
        return unread[-1]

    def noted_run(runner: MedusaRunner, states: Sequence[TappedRows], levels: int) -> Any:
        passes.append((sum(unread[-1]), len(states)))
        return run(runner, states, levels)

    monkeypatch.setattr(MedusaDraft, "begin", noted_begin)
    monkeypatch.setattr(MedusaRunner, "run", noted_run)
    with engine(tiny, heads["medusa"]) as llm:
        llm.generate(PROMPTS[2:], shaped(12))
        llm.generate(PROMPTS[:2], shaped(12))
    assert {count for step in unread for count in step} == {0, 2}
    assert {(2, 1), (4, 2)} <= {*passes}
    model = heads["medusa"]
    assert isinstance(model, MedusaModel)
    passes.clear()
    for rows in (1, 2, 3, 4):
        MedusaRunner(model).probe(rows, every_row=True)
    assert [texts for _, texts in passes] == [1, 1, 2, 2]


@pytest.mark.parametrize("name", HEADS)
def test_a_text_whose_beginning_nobody_read_is_seen_from_the_next_block_on(
    tiny: Tiny, heads: dict[str, HeadModel], modules: dict[str, AnyHead], name: str
) -> None:
    prompt, seen_from = PROMPTS[0], 8  # of 12 tokens two blocks of four are found
    events: list[TreeEvent] = []
    with engine(tiny, heads[name], block_size=4) as llm:
        unseen = SpeculationParams(enabled=False)
        llm.generate([prompt], SamplingParams(max_tokens=2, temperature=0, speculation=unseen))
        engine_of(llm).on_tree = events.append
        (output,) = llm.generate([prompt], shaped(8))
        assert output.cached_tokens == seen_from
    text, end = [*prompt, *output.token_ids], len(prompt)
    hidden_TND = hidden_states(tiny, text)[seen_from:]
    trees = 0
    for event in events:
        trees += event.tree.num_nodes > 1
        assert likelihood_gap(modules[name], text[seen_from:end], hidden_TND, event.tree) < 1e-4
        end += 1 + len(event.acceptance.path)
    assert trees > 0


def shaped(max_tokens: int) -> SamplingParams:
    """Greedy, with trees of a given shape: a block is then drawn level by level, from whole rows."""
    shape = SpeculationParams(expansion=(2, 2, 1))
    return SamplingParams(max_tokens=max_tokens, temperature=0, speculation=shape)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("options", [{}, {"ngram": True}], ids=str)
def test_requests_that_come_and_go_change_nothing(
    tiny: Tiny, heads: dict[str, HeadModel], name: str, options: dict[str, Any]
) -> None:
    # 26 blocks of 4 for 6 requests of up to 40 tokens and their trees: they push each other out.
    prompts = [[(7 * i + j) % 64 for j in range(5 + 3 * i)] for i in range(6)]
    params = [
        SamplingParams(max_tokens=20, temperature=0.0 if i % 2 else 0.8, seed=i, stop_token_ids=(33,))
        for i in range(6)
    ]
    with engine(tiny, None, block_size=4) as llm:
        alone = [tuple(llm.generate([p], q)[0].token_ids) for p, q in zip(prompts, params, strict=True)]
    cached = [tiny.target.config, *([] if name == "medusa" else [heads[name].config])]
    slots = 4 * sum(2 * c.num_layers * c.num_kv_heads * c.head_dim for c in cached)
    with engine(
        tiny, heads[name], max_context=48, block_size=4, kv_cache_memory=26 * 4 * slots, **options
    ) as llm:
        outputs = llm.generate(prompts, params)
        assert [output.token_ids for output in outputs] == alone
        assert llm.statistics().preemptions > 0
        assert sum(output.figures.proposed_by.get("draft", 0) for output in outputs) > 0
        assert_idle(llm)


@pytest.mark.parametrize("name", HEADS)
def test_a_form_is_kept(tiny: Tiny, heads: dict[str, HeadModel], name: str) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=3, allowed_token_ids=(4, 5, 6, 7, 40))
    with engine(tiny, None) as llm:
        (alone,) = llm.generate([PROMPTS[0]], params)
    with engine(tiny, heads[name]) as llm:
        (output,) = llm.generate([PROMPTS[0]], params)
    assert output.token_ids == alone.token_ids
    assert output.figures.proposed_by["draft"] > 0


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("draw", ["iid", "without_replacement", "top_k"])
def test_samples_are_drawn_from_the_law_that_is_told(
    tiny: Tiny, heads: dict[str, HeadModel], modules: dict[str, AnyHead], name: str, draw: str
) -> None:
    events: list[TreeEvent] = []
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=11)
    with engine(tiny, heads[name], verifier="mss", draw=draw, expansion=(2, 2, 1)) as llm:
        engine_of(llm).on_tree = events.append
        (output,) = llm.generate([PROMPTS[0]], params)
    assert output.figures.proposed_by["draft"] > 0
    if draw == "top_k":
        return
    head, text, end = modules[name], [*PROMPTS[0], *output.token_ids], len(PROMPTS[0])
    hidden_TND = hidden_states(tiny, text)
    seen = 0
    for event in events:
        for parent, draws in draws_by_parent(event.tree.draws).items():
            law = module_logits(head, text[:end], hidden_TND, list(event.tree.path_tokens(parent)))
            expected = (law / 0.9).softmax(-1).double().numpy()
            for one in draws:
                assert isinstance(one.law, Distribution)
                told = np.zeros(64)
                told[one.law.ids if one.law.ids is not None else slice(None)] = one.law.probabilities
                np.testing.assert_allclose(told[head.ids.numpy()], expected, atol=1e-4)
                seen += 1
        end += 1 + len(event.acceptance.path)
    assert seen > 6


def test_a_request_that_is_aborted_is_forgotten(tiny: Tiny, heads: dict[str, HeadModel]) -> None:
    for name, head in heads.items():
        with engine(tiny, head) as llm:
            stream = llm.stream(PROMPTS[1], SamplingParams(max_tokens=40, temperature=0))
            next(stream)
            stream.close()
            llm.generate([PROMPTS[0]], SamplingParams(max_tokens=3))
            drafts = [s for s in engine_of(llm)._speculators._speculators if s.name == "draft"]
            kept = [draft._last if name == "medusa" else draft._texts._texts for draft in drafts]  # type: ignore[union-attr]
            assert kept == [{}], name


@pytest.mark.parametrize(
    ("quantization", "dtype", "kernels"),
    [
        ("none", "bfloat16", "auto"),
        ("none", "float32", "torch"),
        ("int8", "float32", "auto"),
        ("int4", "bfloat16", "auto"),
    ],
)
@pytest.mark.usefixtures("own_cache")  # of quantized matrices
def test_a_folder_is_a_draft(
    folder: Path,
    modules: dict[str, AnyHead],
    quantization: str,
    dtype: str,
    kernels: str,
) -> None:
    heads = [str(folder / f"head{number}") for number in range(len(modules))]
    options: dict[str, Any] = {**ENGINE, "dtype": dtype, "kernels": kernels}
    params = SamplingParams(max_tokens=10, temperature=0)
    with LLM(str(folder / "target"), **options) as llm:
        (alone,) = llm.generate([PROMPTS[0]], params)
    for _ in range(2):  # made, then read where they were kept
        with LLM(str(folder / "target"), **options, drafts=heads, draft_quantization=quantization) as llm:
            (output,) = llm.generate([PROMPTS[0]], params)
        assert output.token_ids == alone.token_ids
        assert set(output.figures.proposed_by) == {f"draft{i}" for i in range(1, 1 + len(heads))}


@pytest.mark.usefixtures("own_cache")  # of cost curves
def test_trees_are_sized_by_what_passes_cost(folder: Path) -> None:
    heads = [str(folder / f"head{number}") for number in (0, 2, 3, 6)]
    params = SamplingParams(max_tokens=30, temperature=0)
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": 1 << 24, "ngram": True}
    with LLM(str(folder / "target"), **options) as llm:
        alone = llm.generate(PROMPTS, params)
    with LLM(str(folder / "target"), **options, drafts=heads) as llm:
        outputs = llm.generate(PROMPTS, params)
        assert set(llm.statistics().cost_factors) == {"target", *(f"draft{i}" for i in range(1, 5))}
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]


def test_what_heads_do_not_heed_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="all drafts are heads"):
        LLM(str(folder / "target"), **ENGINE, drafts=[str(folder / "head0")], draft_vocabulary=20)
    with pytest.raises(ModelError, match="name it in drafts"):
        LLM(str(folder / "head0"), **ENGINE)


def test_traces_of_heads_are_refused(tiny: Tiny, heads: dict[str, HeadModel]) -> None:
    with engine(tiny, heads["block"]) as llm, pytest.raises(ConfigError, match="draft is a head"):
        check(llm, [])


def test_guesses_are_the_likeliest_with_what_the_token_before_adds(tiny: Tiny, folder: Path) -> None:
    head = tiny_head(block_config(reads_last=True, confidence=False, confidence_reads_token=False), seed=9)
    with torch.no_grad():
        head.markov_head.markov_w2.weight.mul_(15)  # what stands before decides, more than hidden states
    written = HeadFolder(write_tiny_head(head, folder / "pairs"), open_model(folder / "target").config)
    kernels = guessing(choose_kernels("auto", CPU)[0])
    loaded = load_head(written, open_model(folder / "target"), tiny.target, kernels=kernels)
    module = written.module(open_model(folder / "target"))
    events: list[TreeEvent] = []
    with engine(tiny, loaded) as llm:
        engine_of(llm).on_tree = events.append
        (output,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=12, temperature=0))
    text, end = [*PROMPTS[0], *output.token_ids], len(PROMPTS[0])
    hidden_TND = hidden_states(tiny, text)
    roots, deeper = 0, []
    for event in events:
        tree = event.tree
        for node in range(tree.num_nodes):
            below = [tree.token_ids[i] for i in range(tree.num_nodes) if tree.parents[i] == node]
            if not below:
                continue
            said = module_logits(module, text[:end], hidden_TND, list(tree.path_tokens(node)))
            likeliest = module.ids[said.argsort(descending=True)[: len(below)]].tolist()
            if node == 0:  # what stands before is known: all children are the likeliest, in order
                assert below == likeliest
                roots += 1
            else:  # candidates are chosen behind the mean of what may stand there
                deeper.append(below[0] == likeliest[0])
        end += 1 + len(event.acceptance.path)
    assert roots > 3
    assert sum(deeper) > 0.7 * len(deeper) > 0


def test_a_heads_pass_is_timed_behind_its_targets(
    tiny: Tiny, heads: dict[str, HeadModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: dict[object, object] = {}

    def curve(runner: Any, *, behind: Any, **_: object) -> CostCurve:
        timed[runner.model] = behind and behind.model
        return CostCurve((1, 8), (1.0, 2.0))

    monkeypatch.setattr("specinfer.engine.pass_costs.cost_curve", curve)
    named = {"a model": tiny.similar, "eagle": heads["eagle"], "block": heads["block"]}
    config = EngineConfig.from_options("tiny", {**ENGINE, "drafts": tuple(named), "tree_size": "cost"})
    LLM.from_models(config, Models(tiny.target, tiny.tokenizer, named)).close()
    assert timed == {
        tiny.target: None,
        tiny.similar: None,
        heads["eagle"]: tiny.target,
        heads["block"]: tiny.target,
    }
