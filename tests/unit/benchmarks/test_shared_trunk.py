"""benchmarks/shared_trunk.py: members learn beside a trunk that stays as it is, and are counted with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer.heads.block import BlockHead
from specinfer.heads.layers import initialise
from specinfer.tune.head_draft import BlockHeadDraft
from tests.heads import IDS, SIZE, block_config
from tests.tiny_models import write_tiny_llama

OWN = {
    "vector",
    *(f"entry.parametrizations.weight.0.{part}" for part in "ab"),
    *(
        f"layers.{layer}.{name}.parametrizations.weight.0.{part}"
        for layer in (0, 1)
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
        for part in "ab"
    ),
    "markov_head.markov_w1.weight",
}


def trunk() -> BlockHead:
    head = BlockHead(block_config(reads_last=True, confidence=False, confidence_reads_token=False), IDS)
    initialise(head, torch.Generator().manual_seed(0))
    return head


def test_a_member_begins_as_its_trunk_and_learns_with_weights_of_its_own(script: Any) -> None:
    module, head = script("shared_trunk"), trunk()
    member = module.Member(head, 4, seed=1)
    taps = torch.randn(1, 6, 2, SIZE, generator=torch.Generator().manual_seed(2))
    where = torch.tensor([[3]]), torch.tensor([[4]])
    assert {name for name, p in member.named_parameters() if p.requires_grad} == OWN
    with torch.no_grad():
        assert not torch.equal(member(taps, *where), head(taps, *where)), "the vector tells them apart"
        member.vector.zero_()
        assert torch.equal(member(taps, *where), head(taps, *where))
    copied = module.MemberDraft(member, torch.ones(2, SIZE), 8).copy()
    with torch.no_grad():
        copied.head.vector.add_(1.0)
        assert torch.equal(member(taps, *where), head(taps, *where)), "a copy has weights of its own"
    member(taps, *where).square().sum().backward()
    assert member.vector.grad is not None
    assert all(p.grad is None for name, p in member.named_parameters() if name not in OWN)
    assert isinstance(copied, BlockHeadDraft)


@pytest.mark.thorough
def test_members_are_counted_beside_trees_of_the_trunk(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_tiny_llama(tmp_path / "target", num_layers=3, max_context=1024, tokenizer=True)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n} * {n}"}) + "\n" for n in range(40)))
    work, out = tmp_path / "work", tmp_path / "page.md"

    def run(name: str, *options: object) -> None:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--model", str(target), *map(str, options)])
        threads = torch.get_num_threads()
        try:
            script(name).main()
        finally:
            torch.set_num_threads(threads)

    minutes = ("--minutes", 0.02, "--collect-minutes", 0.01, "--max-answer", 16)
    asked = ("--prompts", prompts, "--work", work, "--out", tmp_path / "boosting.md")
    run("boosting", *asked, *minutes, "--only", "1 block")
    known = ("--head", work / "1-block", "--corpus", work / "corpus" / "work" / "shards")
    run("shared_trunk", *known, "--work", tmp_path / "on", "--minutes", 0.005, "--rank", 2, "--out", out)
    rows = [line.strip("| ").split(" | ") for line in out.read_text().splitlines() if line.startswith("| ")]
    header, _, *forms = rows
    assert header[0] == "boosted by"
    assert [form[0] for form in forms] == ["discount", "residual", "none"]
    for _, _, own, chains, trees, beside, *_ in forms:
        alone, pool, tree, both = ([*map(float, cell.split())] for cell in (own, chains, trees, beside))
        assert len(alone) == len(pool) == len(tree) == len(both) == 3
        assert alone[0] == pool[0] == tree[0] >= 1
        assert both[0] == tree[1], "two first guesses of the trunk"
        for values in (pool, tree, both):
            assert values == sorted(values), "more guesses are no worse"
    assert len({form[2].split()[0] for form in forms}) == 1, "the trunk is the same in all rows"
