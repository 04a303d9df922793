"""Members on one trunk: what learns, what becomes one head, and what is gone on with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer.config import EngineConfig
from specinfer.engine.drafts import draft_names
from specinfer.engine.pass_costs import PassCosts
from specinfer.errors import TuneError
from specinfer.heads import export
from specinfer.heads.block import BlockHead
from specinfer.heads.checkpoint import HeadFolder
from specinfer.heads.config import BlockConfig
from specinfer.hub.pool import is_pool
from specinfer.llm import LLM
from specinfer.models.weights import open_model
from specinfer.progress import Progress
from specinfer.runtime.cost_curve import CostCurve
from specinfer.sampling_params import SamplingParams
from specinfer.tune.block_kind import BlockKind
from specinfer.tune.boosting import BoostConfig
from specinfer.tune.checkpoint import read_checkpoint
from specinfer.tune.config import TuneConfig
from specinfer.tune.eagle_kind import EagleKind
from specinfer.tune.member_kind import MemberKind
from specinfer.tune.read_draft import read_draft
from specinfer.tune.shards import Corpus
from specinfer.tune.trainer import TrainConfig, Trainer
from tests.heads import IDS, block_config
from tests.unit.tune.conftest import KilledError, beginning_of, dies_at, engine, ticking, tuning_of
from tests.unit.tune.runs import free, run

BLOCK = BlockKind(depth=3, vocabulary=48, markov_rank=8, anchors=8)


def on_trunk(target: Path, out: Path, members: int = 3, **changes: Any) -> TuneConfig:
    more = {"kind": BLOCK, "members": members, "on_trunk": True, **changes}
    return tuning_of(target, out, **({"minutes": 2.5, "collect_minutes": 2.4} | more))


def dear(config: EngineConfig, drafts: Sequence[Path], progress: Progress) -> PassCosts:
    """A trunk's pass costs little, and with members on it as much as many of the target's."""
    first, *others = draft_names(tuple(str(draft) for draft in drafts))
    curve, slow = CostCurve((1, 2), (1e-4, 1e-4)), CostCurve((1, 2), (1.0, 1.0))
    return PassCosts(CostCurve((1, 2), (0.01, 0.01)), {first: curve, **dict.fromkeys(others, slow)})


def config_of(folder: Path, target: Path) -> BlockConfig:
    config = HeadFolder(folder, open_model(target).config).config
    assert isinstance(config, BlockConfig)
    return config


@pytest.fixture(scope="module")
def tuned(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    out = tmp_path_factory.mktemp("trunk") / "head"
    _, lines = run(on_trunk(target, out), prompts, costs=free)
    return out, lines


def test_a_trunk_and_its_members_become_one_head(tuned: tuple[Path, list[str]], target: Path) -> None:
    out, lines = tuned
    assert not is_pool(out)
    dropped = [line for line in lines if "does not pay and is left out" in line]
    config = config_of(out, target)
    assert config.members == 2 - len(dropped)
    card = (out / "README.md").read_text()
    assert "## Members on its trunk" in card
    assert ("in the same pass" in card) is (config.members > 0)
    assert sum("learns from" in line for line in lines) == 3
    trunk = HeadFolder(out / "work" / "member1", open_model(target).config)
    head = HeadFolder(out, open_model(target).config)
    for name in trunk.shapes:
        rows = trunk.shapes[name][0]
        assert torch.equal(trunk.read_rows(name, 0, rows), head.read_rows(name, 0, rows)), name


def test_a_member_learns_with_weights_of_its_own_alone(tuned: tuple[Path, list[str]], target: Path) -> None:
    kind = MemberKind(trunk=tuned[0] / "work" / "member1", kind=BLOCK)
    taps = [*range(len(kind.taps(open_model(target).config)))]
    beginning = beginning_of(target, Corpus(tuned[0] / "work" / "shards", taps))
    draft = kind.new(None, beginning)
    own = {"members.0.vector", "members.0.markov_w1.weight"}
    assert {name for name, p in draft.module.named_parameters() if p.requires_grad} == own
    trainer = Trainer(draft, TrainConfig(rate=5e-3, shortlist=32))
    before = {name: p.detach().clone() for name, p in draft.module.named_parameters()}
    trainer.step(beginning.lessons, 1.0)
    changed = {name for name, p in draft.module.named_parameters() if not torch.equal(p, before[name])}
    assert changed == own
    assert not before["members.0.vector"].any()
    assert torch.equal(before["members.0.markov_w1.weight"], before["markov_head.markov_w1.weight"])
    again = kind.new(str(tuned[0] / "work" / "member2"), beginning).head
    assert again.get_parameter("members.0.vector").any(), "it begins as the member before it"


def test_a_member_s_confidence_reads_its_own_table() -> None:
    head = BlockHead(block_config(members=1, reads_last=True), [*IDS]).eval()
    h, tokens = torch.ones(1, head.config.body.hidden_size), torch.tensor([5])
    own = head.get_parameter("members.0.markov_w1.weight")[5]
    assert torch.equal(head.known(h, tokens, 1)[0, -len(own) :], own)
    assert not torch.equal(head.known(h, tokens, 1), head.known(h, tokens))


def test_a_member_is_measured_as_itself(tuned: tuple[Path, list[str]], target: Path) -> None:
    of = beginning_of(target, Corpus(tuned[0] / "work" / "shards", [0])).target
    drafts = [read_draft(tuned[0] / "work" / "joined", of, 2, member) for member in range(3)]
    h, before = torch.zeros(1, 1, open_model(target).config.hidden_size), torch.tensor([[5]])
    trunk, *members = [draft.logits(h, before) for draft in drafts]
    assert not any(torch.equal(trunk, member) for member in members), (
        "each has its own table of tokens before"
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_text_is_the_same_with_it(
    tuned: tuple[Path, list[str]], target: Path, temperature: float, quantization: str
) -> None:
    whole = tuned[0] / "work" / "joined"
    assert config_of(whole, target).members == 2
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=3)
    drafts = {"drafts": [str(whole)], "draft_quantization": quantization}
    with LLM(engine(target)) as plain, LLM(engine(target), tree_size="fixed", **drafts) as drafted:
        expected = [one.token_ids for one in plain.generate(["2 * 3", "7 * 8"], params)]
        outputs = drafted.generate(["2 * 3", "7 * 8"], params)
    assert [one.token_ids for one in outputs] == expected
    assert sum(one.figures.accepted_by.get("draft", 0) for one in outputs) > 0


def test_members_that_do_not_pay_are_left_out(target: Path, prompts: Path, tmp_path: Path) -> None:
    _, lines = run(on_trunk(target, tmp_path / "head"), prompts, costs=dear)
    for name in ("member2", "member3"):
        assert f"{name} does not pay and is left out of the pool" in lines
    assert config_of(tmp_path / "head", target).members == 0
    assert "Left out, as they do not pay: member2, member3." in (tmp_path / "head/README.md").read_text()


def test_who_is_killed_goes_on_with_the_member_he_was_at(target: Path, prompts: Path, tmp_path: Path) -> None:
    config = on_trunk(target, tmp_path / "head", members=2, minutes=4.0)

    again, seconds = config, list[int]()
    for steps in (110, 90, 60):
        with pytest.raises(KilledError):
            run(again, prompts, dies_at(steps), free)
        again = replace(config, resume=True)
        kept = config.work / "member2.safetensors"
        seconds.append(read_checkpoint(kept).state.steps if kept.exists() else 0)
        assert not (config.out / "config.json").exists()
    run(again, prompts, ticking(2.0), free)
    assert seconds == sorted(seconds)
    assert 0 < seconds[-1] < read_checkpoint(config.work / "member2.safetensors").state.steps
    assert (config.out / "config.json").exists()
    before = [read_checkpoint(config.work / f"member{number}.safetensors").state.steps for number in (1, 2)]
    run(replace(again, minutes=8.0, collect_minutes=2.4), prompts, ticking(10.0), free)
    after = [read_checkpoint(config.work / f"member{number}.safetensors").state.steps for number in (1, 2)]
    assert all(more > less for more, less in zip(after, before, strict=True)), "both learn on"
    trunks = [HeadFolder(config.work / name, open_model(target).config) for name in ("member1", "joined")]
    first, joined = (trunk.read_rows("fc.weight", 0, 4) for trunk in trunks)
    assert torch.equal(first, joined)
    facts = json.loads((config.work / "tuning.json").read_text())
    assert facts["boost"] == {**BoostConfig().facts(), "on_trunk": True}
    with pytest.raises(TuneError, match="is of boost"):
        run(replace(again, on_trunk=False), prompts)


def test_a_head_is_whole_at_any_moment_that_its_members_become_others(
    tuned: tuple[Path, list[str]],
    target: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kill is between its weights and its config."""
    out = tmp_path / "head"
    shutil.copytree(tuned[0], out)
    assert config_of(out, target).members > 0
    write = export._write

    def dies(path: Path, text: str) -> None:
        if path.parent == out:
            raise KilledError
        write(path, text)

    monkeypatch.setattr(export, "_write", dies)
    again = on_trunk(target, out, resume=True)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(KilledError):
        run(again, prompts, costs=dear)
    assert (out / "model.safetensors").read_bytes() != before
    assert not (out / "README.md").exists(), "the card was of the head before"
    assert config_of(out, target).members == 0
    with LLM(engine(target), drafts=[str(out)], tree_size="fixed") as drafted:
        [output] = drafted.generate(["2 * 3"], SamplingParams(max_tokens=20, temperature=0.0))
    assert output.figures.accepted_by.get("draft", 0) > 0
    monkeypatch.setattr(export, "_write", write)
    run(again, prompts, costs=dear)
    assert config_of(out, target).members == 0


def test_a_head_with_members_is_held_against_what_replaces_it(
    tuned: tuple[Path, list[str]], target: Path, prompts: Path, tmp_path: Path
) -> None:
    """It is as good as itself with all of its members, so it stays."""
    old = tuned[0] / "work" / "joined"
    config = tuning_of(target, tmp_path / "new", minutes=2.41, collect_minutes=2.4, kind=BLOCK, replace=old)
    _, lines = run(config, prompts, costs=free)
    assert any(f"{old} stays" in line for line in lines)


def test_no_tuning_begins_as_a_head_with_members(
    tuned: tuple[Path, list[str]], target: Path, prompts: Path, tmp_path: Path
) -> None:
    config = tuning_of(target, tmp_path / "new", kind=BLOCK, init=str(tuned[0] / "work" / "joined"))
    with pytest.raises(TuneError, match=r"has 2 member\(s\) on its trunk"):
        run(config, prompts)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"members": 1}, "members is 1, on one trunk; allowed: 2 to 8"),
        ({"members": 9}, "members is 9, on one trunk; allowed: 2 to 8"),
        ({"kind": EagleKind(depth=3)}, "kind is eagle, and members on one trunk; allowed: block"),
        (
            {"kind": BlockKind(layout="dspark")},
            "layout is dspark, and members on one trunk; allowed: specinfer",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_on_a_trunk_is_refused(
    target: Path, tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(TuneError, match=complaint):
        on_trunk(target, tmp_path / "head", **changes)
