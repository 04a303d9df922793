"""Scaled and partial rotary embeddings against transformers, within the original context and behind it.

transformers' dynamic scaling rotates all tokens of a call by the length of its longest text, and leaves
cached keys unchanged. So its logits depend on how a text was cut into calls. Ours are those of its token by
token run, where every token is rotated as in a text that ends with it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specinfer.models.open_model import open_model
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.runner import ModelRunner
from tests.kernels import NAMES
from tests.loading import load

from .families import save_random
from .gguf_files import write_gguf

TOLERANCE = 1e-4
ORIGINAL, LENGTH = 16, 48  # the context before it was extended, and the text's
TEXT = torch.randint(3, 96, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
TABLE = [6, 2, 9, 1, 5, 0, 3, 11, 4, 8, 7, 10, 13, 12]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
SCALINGS = {
    "yarn": YARN,
    "yarn-attention-factor": {**YARN, "attention_factor": 0.7},
    "yarn-mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.3},
    "yarn-mscale-alone": {**YARN, "mscale": 0.8},
    "yarn-ramp": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5},
    "yarn-not-truncated": {**YARN, "truncate": False, "beta_fast": 4.0, "beta_slow": 0.3},
    "yarn-factor-of-contexts": {**YARN, "factor": None},
    "yarn-small-theta": {**YARN, "rope_theta": 50.0},
    # Layers of Gemma 3 that see everything.
    "gemma3": {
        "full_attention": {**YARN, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


def ours_of(path, run="torch", longest=None):
    """Our model, for texts of this length, and its runner."""
    model = load(open_model(path, max_context=longest), run)
    return model, ModelRunner(model, num_blocks=14, block_size=4)


@torch.no_grad()
def at_once(theirs, text=TEXT):
    return theirs(torch.tensor([text])).logits[0]


@torch.no_grad()
def one_by_one(theirs, text=TEXT):
    from transformers import DynamicCache

    cache, logits = DynamicCache(config=theirs.config), []
    for position, token in enumerate(text):
        out = theirs(torch.tensor([[token]]), past_key_values=cache, position_ids=torch.tensor([[position]]))
        logits.append(out.logits[0, 0])
    return torch.stack(logits)


def check(got, want):
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def check_all_ways(runner, want):
    """The text in one pass, token by token, and its last tokens as the path of a tree."""
    check(runner.forward([Rows(TEXT, 0, TABLE, 0)]), want)
    steps = [runner.forward([chain_rows([t], i, TABLE, logits=True)])[0] for i, t in enumerate(TEXT)]
    check(torch.stack(steps), want)
    before = LENGTH - 4
    runner.forward([chain_rows(TEXT[:before], 0, TABLE, logits=False)])
    tokens, parents = [TEXT[before], 90, *TEXT[before + 1 :]], [-1, 0, 0, 2, 3]
    check(runner.forward([Rows(tokens, before, TABLE, 0, parents)])[[0, 2, 3, 4]], want[before:])


@pytest.mark.few(4)
@pytest.mark.parametrize("run", NAMES)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_yarn(scaling, run, tmp_path):
    family = "gemma3" if scaling == "gemma3" else "llama"
    theirs = save_random(family, tmp_path, tied=True, rope_parameters=dict(SCALINGS[scaling]))
    model, runner = ours_of(tmp_path, run)
    assert model.config.max_context == 128
    check_all_ways(runner, at_once(theirs))


@pytest.mark.few(2)
@pytest.mark.parametrize("run", NAMES)
@pytest.mark.parametrize("family", ["llama", "mistral-full", "qwen2", "qwen3"])
def test_dynamic(family, run, tmp_path):
    theirs = save_random(
        family,
        tmp_path,
        tied=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
        max_position_embeddings=ORIGINAL,
    )
    model, runner = ours_of(tmp_path, run)
    assert model.config.max_context == 48, "three times the original"
    want = one_by_one(theirs)
    check_all_ways(runner, want)
    # Behind a long text theirs goes back to its first rotations for one that is shorter than the original.
    check(want[: ORIGINAL - 1], at_once(theirs, TEXT[: ORIGINAL - 1]))
    behind = (at_once(theirs) - want).abs().max()
    assert behind > 100 * TOLERANCE, "one call of theirs rotates the whole text in another way"


LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.3, 1.6],
        "long_factor": [1.5, 2.0, 4.0, 8.0],
    },
    "original_max_position_embeddings": ORIGINAL,
    "sliding_window": None,
}


@pytest.mark.few(2)
@pytest.mark.parametrize("run", NAMES)
def test_longrope(run, tmp_path):
    """The short factors apply until a text is longer than the original context."""
    theirs = save_random("phi3", tmp_path, tied=True, **LONGROPE)
    model, runner = ours_of(tmp_path, run)
    assert model.config.max_context == ORIGINAL
    short, table = TEXT[:ORIGINAL], TABLE[: ORIGINAL // 4]
    check(runner.forward([Rows(short, 0, table, 0)]), at_once(theirs, short))
    check_all_ways(ours_of(tmp_path, run, ORIGINAL + 1)[1], at_once(theirs))
    long = ours_of(tmp_path, run, LENGTH)[1].forward([Rows(short, 0, table, 0)])
    assert (long - at_once(theirs, short)).abs().max() > 100 * TOLERANCE


def test_gguf_with_longrope(tmp_path):
    theirs = save_random("phi3", tmp_path, tied=True, **LONGROPE)
    factors = theirs.config.rope_parameters
    tensors = {
        f"rope_factors_{kind}.weight": np.array(factors[f"{kind}_factor"], dtype=np.float32)
        for kind in ("long", "short")
    }
    own = {"attn_factor": theirs.model.rotary_emb.attention_scaling, "original_context_length": ORIGINAL}
    write_gguf(theirs, tmp_path / "model.gguf", add=tensors, more=own)
    short = TEXT[:ORIGINAL]
    check(ours_of(tmp_path / "model.gguf")[1].forward([Rows(short, 0, TABLE, 0)]), at_once(theirs, short))
    check_all_ways(ours_of(tmp_path / "model.gguf", longest=LENGTH)[1], at_once(theirs))


def test_gguf_with_divisors(tmp_path):
    """The converter writes Llama 3's rope scaling as a tensor of divisors, one per frequency."""
    theirs = save_random("llama-llama3-rope", tmp_path, tied=True)
    plain = 1.0 / theirs.config.rope_parameters["rope_theta"] ** (np.arange(0, 8, 2) / 8)
    factors = plain / theirs.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > 4
    assert factors.min() == pytest.approx(1)
    write_gguf(theirs, tmp_path / "model.gguf", add={"rope_freqs.weight": factors.astype(np.float32)})
    check_all_ways(ours_of(tmp_path / "model.gguf")[1], at_once(theirs))


@pytest.mark.few(4)
@pytest.mark.parametrize("run", NAMES)
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 0.875])
def test_a_part_of_each_head(share, run, tmp_path):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "sliding_window": None}
    theirs = save_random("phi3", tmp_path, tied=False, rope_parameters=rope, **sizes)
    model, runner = ours_of(tmp_path, run)
    assert model.config.rope.rotated == 16 * share
    check_all_ways(runner, at_once(theirs))
