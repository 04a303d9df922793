"""Initial heads: the target's last layers, least squares, and pair counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specinfer.errors import TuneError
from specinfer.heads.block import BlockHead
from specinfer.heads.checkpoint import target_head
from specinfer.heads.layers import HeadLayer
from specinfer.models.open_model import OpenModel, open_model
from specinfer.tune.dataset import Corpus, TrainingSet, TunedText, first_texts
from specinfer.tune.draft import entries_of
from specinfer.tune.head_draft import BlockHeadDraft, read_initial_head, with_vocabulary
from specinfer.tune.head_kinds import BlockKind, Layout
from specinfer.tune.initial_head import (
    copy_target_layers,
    fit_bigrams,
    likely_tokens,
    new_head,
)
from specinfer.tune.prompts import read_prompts
from specinfer.tune.trainer import loss_of
from specinfer.tune.tuning import Tuning
from tests.unit.tune.conftest import beginning_of, ticking, tuning_of

SHAPE = BlockKind(depth=3, vocabulary=24, markov_rank=24)
SCALE = torch.full((2, 32), 0.5)


@pytest.fixture(scope="module")
def opened(target: Path) -> OpenModel:
    return open_model(target)


def untrained(opened: OpenModel) -> BlockHead:
    return new_head(SHAPE.config(opened.config, (1, 2)), opened, [*range(24)], seed=0)


def text_of(
    tokens: Sequence[int], laws: torch.Tensor, taps: torch.Tensor, *, held_out: bool = False
) -> TunedText:
    """A text whose first token is the prompt; `laws` [V, V] says what follows which token."""
    ids_T = torch.tensor(tokens)
    chances, ids = laws[ids_T[:-1]].sort(dim=1, descending=True)
    return TunedText(ids_T, 1, taps, ids[:, :4], chances[:, :4].log(), tokens[1], held_out)


def test_the_markov_term_is_the_law_of_pairs(opened: OpenModel, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    laws = torch.zeros(64, 64)
    for token in range(24):  # four tokens may follow each; one is the likeliest
        laws[token, torch.randperm(24, generator=generator)[:4]] = torch.tensor([0.6, 0.2, 0.15, 0.05])
    texts = []
    for _ in range(30):
        tokens = [int(torch.randint(24, (1,), generator=generator))]
        while len(tokens) < 40:
            tokens.append(int(torch.multinomial(laws[tokens[-1]], 1, generator=generator)))
        texts.append(text_of(tokens, laws, torch.zeros(39, 2, 32)))
    (tmp_path / "shards").mkdir()
    corpus = Corpus(tmp_path / "shards")
    corpus.add(texts, 1.0)
    head = untrained(opened)
    fit_bigrams(head, TrainingSet(corpus), entries_of(BlockHeadDraft(head, SCALE, 8)))
    seen = torch.cat([text.tokens_T[:-1] for text in texts]).unique()
    with torch.no_grad():
        said = head.pair_logits(seen).softmax(dim=-1)
        unseen = head.pair_logits(torch.tensor([60, 61])).softmax(dim=-1)
    wanted = laws[seen][:, :24]
    assert torch.equal(said.argmax(dim=1), wanted.argmax(dim=1))
    apart = (said - wanted).abs().sum(dim=1) / 2
    assert float(apart.mean()) < 0.15
    # Tokens that never stood before another are followed as tokens are on the whole.
    assert torch.allclose(unseen[0], unseen[1])


def test_the_entry_says_what_can_be_known_of_the_last_tap(opened: OpenModel) -> None:
    generator = torch.Generator().manual_seed(1)
    head = untrained(opened)
    table = head.embed_tokens.weight.detach()
    texts = []
    for _ in range(40):
        tokens_T = torch.randint(64, (30,), generator=generator)
        # The last tap is a sum of the token's and the previous tap's values, which are both known.
        last = torch.randn(32, generator=generator)
        rows = []
        for token in tokens_T[:-1]:
            last = 0.5 * last.roll(1) / last.square().mean().sqrt() + torch.nn.functional.rms_norm(
                table[token], (32,)
            )
            rows.append(torch.stack((torch.randn(32, generator=generator), last)))
        taps = torch.stack(rows)
        texts.append(text_of(tokens_T.tolist(), torch.full((64, 64), 1 / 64), taps))
    copy_target_layers(head, opened, texts, SCALE)
    text, anchors = texts[-1], torch.arange(4, 20)
    with torch.no_grad():
        fused = head.fused(text.taps_TND * SCALE)
        read = torch.cat((fused[anchors - 1], head.entry_norm(table[text.tokens_T[anchors]])), dim=1)
        begun = (read @ head.entry.weight.T).unflatten(-1, (3, 32))
    wanted = text.taps_TND[anchors, 1]
    missed = (begun[:, 0] - wanted).square().mean() / wanted.square().mean()
    later = text.taps_TND[anchors + 2, 1]
    assert float(missed) < 0.05
    assert float((begun[:, 2] - later).square().mean() / later.square().mean()) > 0.3  # unknown tokens decide


def test_a_layer_computes_what_the_targets_last_one_does(opened: OpenModel) -> None:
    head = untrained(opened)
    copy_target_layers(head, opened, [], SCALE)
    (layer,) = head.layers
    assert isinstance(layer, HeadLayer)
    prefix = f"model.layers.{opened.config.num_layers - 1}"

    def read(name: str) -> torch.Tensor:
        full = f"{prefix}.{name}.weight"
        return opened.read_rows(full, 0, opened.shapes[full][0]).float()

    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    eps = opened.config.norm_eps
    normed = torch.nn.functional.rms_norm(x, (32,), read("input_layernorm"), eps)
    with torch.no_grad():
        values = layer.self_attn.values(layer.input_layernorm(x)).flatten(1)
        assert torch.allclose(values, normed @ read("self_attn.v_proj").T, atol=1e-5)
        added = layer.mlp(layer.post_attention_layernorm(x))
    normed = torch.nn.functional.rms_norm(x, (32,), read("post_attention_layernorm"), eps)
    gate = torch.nn.functional.silu(normed @ read("mlp.gate_proj").T)
    plain = (gate * (normed @ read("mlp.up_proj").T)) @ read("mlp.down_proj").T
    assert torch.allclose(added, plain, atol=1e-5)


def test_a_head_that_begins_as_its_target_is_better_than_a_random_one(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    losses = {}
    for init in ("target", "random", None):
        config = replace(tuning_of(target, tmp_path / str(init)), init=init)
        tuning = Tuning(config, clock=ticking())
        tuning._collect(read_prompts([prompts]))
        dataset = TrainingSet(tuning._corpus)
        draft = tuning._training(dataset, []).trainer.draft
        losses[init] = loss_of(draft, first_texts(dataset, 8), config.training)
    assert losses["target"] < 0.8 * losses["random"]
    assert losses[None] == losses["target"], "it is how a block head begins where nothing is said"


@pytest.mark.parametrize("layout", ["specinfer", "dspark"])
def test_an_exported_head_can_name_more_tokens(
    target: Path, prompts: Path, tmp_path: Path, layout: Layout
) -> None:
    kind = replace(SHAPE, layout=layout)
    first = Tuning(tuning_of(target, tmp_path / "first", kind=kind), clock=ticking())
    first.run(read_prompts([prompts]), [prompts.name])
    opened, corpus, said = open_model(target), first._corpus, list[str]()
    taps, begun = kind.taps(opened.config), beginning_of(target, corpus, said.append)
    wanted, scale = kind.config(opened.config, taps), torch.ones(len(taps), 32)
    few = read_initial_head(str(tmp_path / "first"), replace(wanted, draft_vocab_size=8), opened, scale)
    assert isinstance(few, BlockHead)
    assert with_vocabulary(few, None, begun) is with_vocabulary(few, 24, begun) is few
    with pytest.raises(TuneError, match="vocabulary is 23, and the head to resume from has 24 tokens; give"):
        with_vocabulary(few, 23, begun)
    assert not said
    many = with_vocabulary(few, 40, begun)
    assert said == ["the head has 24 tokens; adding 16 more"]
    assert (len(few.ids), len(many.ids)) == (24, 40), "it keeps its own tokens"
    assert len(with_vocabulary(few, 8192, begun).ids) == 64, "a target has no more"
    own = torch.searchsorted(many.ids, few.ids)
    assert torch.equal(many.ids[own], few.ids)
    likely = [token for token in likely_tokens(corpus, 64).tolist() if token not in few.ids]
    assert {*likely[:16]} == {*many.ids.tolist()} - {*few.ids.tolist()}
    h, before = torch.randn(5, 32, generator=torch.Generator().manual_seed(3)), torch.arange(5)
    logits, more = (head.logits(h) + head.pair_logits(before) for head in (few, many))
    assert torch.allclose(more[:, own], logits, atol=1e-5)
    new = torch.isin(torch.arange(40), own, invert=True)
    rows, of_target = many.lm_head.weight.detach(), target_head(opened, many.ids.tolist())
    assert torch.allclose(torch.cosine_similarity(rows[new], of_target[new]), torch.ones(16), atol=1e-5)
    rarest = [token for token in likely_tokens(corpus, 64).tolist() if token in few.ids][-6:]
    pairs, before = many.markov_head.markov_w2.weight, few.markov_head.markov_w2.weight
    expected = before[torch.searchsorted(few.ids, torch.tensor(rarest))].mean(dim=0)
    assert torch.allclose(pairs[new], expected.expand(16, -1), atol=1e-6)
    if layout == "specinfer":
        assert torch.equal(rows, of_target)
    else:
        assert float(rows[new].norm(dim=1).mean()) == pytest.approx(
            float(rows[own].norm(dim=1).mean()), rel=0.3
        )


def test_what_a_head_cannot_begin_as_is_refused(target: Path, prompts: Path, tmp_path: Path) -> None:
    opened = open_model(target)
    config = SHAPE.config(opened.config, (1, 2))
    with pytest.raises(TuneError, match="which is not a draft head"):
        read_initial_head(str(target), config, opened, SCALE)
    first = Tuning(tuning_of(target, tmp_path / "first"), clock=ticking())
    first.run(read_prompts([prompts]), [prompts.name])
    with pytest.raises(TuneError, match="differs in shape"):
        read_initial_head(str(tmp_path / "first"), replace(config, block_size=7), opened, SCALE)
    dspark = tuning_of(target, tmp_path / "x", init="target", kind=replace(SHAPE, layout="dspark"))
    with pytest.raises(TuneError, match="init is target, which is for block heads"):
        Tuning(dspark)
