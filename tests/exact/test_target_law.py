"""A target's law at a node of a tree is its law behind the same text, whatever computes its layers.

The other tests here take laws as given; this test checks the laws. Targets of every kind run every tree of up
to four nodes on two tokens, all of its nodes at once. Each node's logits are, to the
bit, those of its path as a text without a tree. Longer texts are in test_row_independence.py, models that run
op by op in test_per_layer.py, and those that transformers runs in test_hosted.py.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from specinfer import LLM
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.runner import ModelRunner
from specinfer.tree.token_tree import TokenTree
from tests.adapters import write_adapter
from tests.engines import ENGINE, runner_of
from tests.kernels import kernels
from tests.loading import load
from tests.parity.families import save_random
from tests.parity.gguf_files import write_gguf
from tests.states import StateRunner
from tests.switched import RECURRENT, SWITCHED, build
from tests.tiny_models import write_pair
from tests.unit.runtime.test_row_independence import differing_chunks

from .enumeration import all_trees

TEXT = [5, 17, 39, 3, 9, 31]  # then the root
ROOT, TOKENS, DEEPEST = 12, (7, 23), 3
TABLE = [2, 0, 3]
# Sizes that blocks of 32 divide.
HYBRIDS: dict[str, dict[str, object]] = {
    "lfm2": {},
    "qwen3.5": {},
    "qwen3-next": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "granite-hybrid": {"mamba_d_head": 32, "shared_intermediate_size": 64},
    "falcon-h1": {"mamba_d_ssm": 64},
    "nemotron-h": {},
}
TREES = [*all_trees(vocab=2, max_nodes=DEEPEST + 1)]
Forward = Callable[[Rows], Tensor]


def differing(forward: Forward, adapter: str | None = None) -> list[TokenTree]:
    """The trees that have a node with other logits than its path."""

    def rows(tokens: list[int], parents: tuple[int, ...]) -> Tensor:
        return forward(Rows(tokens, len(TEXT), TABLE, 0, parents, adapter))

    forward(Rows(TEXT, 0, TABLE, len(TEXT), None, adapter))
    texts: dict[tuple[int, ...], Tensor] = {}
    for length in range(DEEPEST + 1):
        for path in product(range(2), repeat=length):
            chain = [ROOT, *(TOKENS[token] for token in path)]
            texts[path] = forward(Rows(chain, len(TEXT), TABLE, length, None, adapter))[0]
    assert len({tuple(row.tolist()) for row in texts.values()}) == 15, "texts have laws of their own"
    found = []
    for tree in TREES:
        tokens = [ROOT, *(TOKENS[token] for token in tree.token_ids[1:])]
        logits = rows(tokens, tree.parents)
        paths = [path_of(tree, node) for node in range(tree.num_nodes)]
        if not all(torch.equal(row, texts[path]) for row, path in zip(logits, paths, strict=True)):
            found.append(tree)
    return found


def path_of(tree: TokenTree, node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node:
        path.insert(0, tree.token_ids[node])
        node = tree.parents[node]
    return tuple(path)


def of_runner(runner: ModelRunner) -> Forward:
    return lambda rows: runner.forward([rows])


def causal(forward: Forward) -> Forward:
    """The same with a causal mask, or a chain, over the rows of a tree."""
    return lambda rows: forward(Rows(rows.token_ids, rows.start, rows.block_table, rows.logits_from))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", SWITCHED)
def test_decoders_with_every_switch(name: str, quantization: str) -> None:
    model = build(SWITCHED[name], kernels("native"), torch.float32, quantization)
    assert differing(of_runner(StateRunner(model, num_blocks=4, block_size=4))) == []


@pytest.mark.few(2)
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0])
def test_hybrids_in_the_blocks_of_their_files(tmp_path: Path, name: str, kind: GGMLQuantizationType) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, **HYBRIDS[name]}
    write_gguf(save_random(name, tmp_path, tied=False, **sizes), tmp_path / "model.gguf", kind=kind)
    model = load(tmp_path / "model.gguf", quantization="gguf")
    assert differing(of_runner(StateRunner(model, num_blocks=4, block_size=4))) == []
    assert differing_chunks(StateRunner(model, num_blocks=4, block_size=128), (1, 7, 64), 120) == []


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_adapters(tmp_path: Path, own_cache: None, quantization: str) -> None:
    """A tree with an adapter, beside rows that have none."""
    folder = write_pair(tmp_path)
    write_adapter(tmp_path / "one", folder / "target", seed=1)
    options = {**ENGINE, "quantization": quantization, "kernels": "native"}
    with LLM(folder / "target", **options, lora={"one": tmp_path / "one"}) as llm:
        runner = runner_of(llm)
        beside = chain_rows(TEXT, 0, [4, 5, 6], logits=False)

        def forward(rows: Rows) -> Tensor:
            return runner.forward([beside, rows])

        assert differing(forward, "one") == []
        with_it = forward(Rows(TEXT, 0, TABLE, len(TEXT) - 1, None, "one"))
        assert not torch.equal(with_it, forward(Rows(TEXT, 0, TABLE, len(TEXT) - 1))), "it says something"


@pytest.mark.parametrize("name", ["mpt", *RECURRENT])
def test_a_node_that_sees_its_sibling_is_found(name: str) -> None:
    """The mistake that all of this is to find."""
    runner = StateRunner(build(SWITCHED[name], kernels("native")), num_blocks=4, block_size=4)
    wrong = differing(causal(of_runner(runner)))
    assert wrong
    assert all(any(b != a - 1 for a, b in enumerate(tree.parents)) for tree in wrong)
