"""Initial heads: the target's last layers, least squares, and pair counts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specinfer.errors import TuneError
from specinfer.heads.block import BlockHead
from specinfer.models.open_model import OpenModel, open_model
from specinfer.tune.dataset import Corpus, TrainingSet, TunedText, first_texts
from specinfer.tune.draft import entries_of
from specinfer.tune.head_draft import BlockHeadDraft, BlockKind, MtpKind
from specinfer.tune.initial_head import copy_target_layers, fit_bigrams, new_head
from specinfer.tune.prompts import read_prompts
from specinfer.tune.trainer import loss_of
from specinfer.tune.tuning import Tuning
from tests.unit.tune.conftest import ticking, tuning_of

SHAPE = BlockKind(depth=3, vocabulary=24, markov_rank=24)
SCALE = torch.full((2, 32), 0.5)


@pytest.fixture(scope="module")
def opened(target: Path) -> OpenModel:
    return open_model(target)


def untrained(opened: OpenModel) -> BlockHead:
    return new_head(replace(SHAPE.config(opened.config), taps=(1, 2)), opened, [*range(24)], seed=0)


def text_of(tokens: Sequence[int], laws: Tensor, taps: Tensor, *, held_out: bool = False) -> TunedText:
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
    fit_bigrams(head, TrainingSet(corpus), entries_of(BlockHeadDraft(head, SCALE)))
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
            ahead = torch.nn.functional.rms_norm(table[token], (32,))
            last = 0.5 * last.roll(1) / last.square().mean().sqrt() + ahead
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


def test_a_head_that_begins_as_its_target_is_better(target: Path, prompts: Path, tmp_path: Path) -> None:
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


def test_options_that_an_mtp_layer_does_not_have_are_refused(opened: OpenModel) -> None:
    for kind, init, message in (
        (MtpKind(layers=2), None, "layers is 2 with kind mtp; allowed: 1"),
        (MtpKind(vocabulary=8), None, "vocabulary is 8 with kind mtp, which guesses any token; leave it out"),
        (MtpKind(), "target", "init is target with kind mtp; allowed: random, or a folder"),
    ):
        with pytest.raises(TuneError, match=message):
            pytest.fail(f"{message}: {kind.check(opened.config, init)}")
