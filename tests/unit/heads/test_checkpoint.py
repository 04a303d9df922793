"""Heads as folders: written, read again, and refused where they are not what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specinfer.errors import ModelError, ModelFileError
from specinfer.heads import checkpoint
from specinfer.heads.checkpoint import HeadFolder, head_shapes, is_head, open_head
from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.heads.mtp import MtpFile
from specinfer.heads.mtp_head import mtp_head, write_mtp
from specinfer.heads.speculators import write_head
from specinfer.hub.model_files import local_model
from specinfer.models.config import Family
from specinfer.models.fingerprint import fingerprint
from specinfer.models.open_model import open_model
from specinfer.tune.head_draft import MtpKind
from specinfer.tune.initial_head import new_head
from tests import heads
from tests.heads import SIZE, VOCAB, block_config, change_head, eagle_config, tiny_head, write_tiny_head
from tests.oracles.mtp import QWEN, MtpOracle
from tests.tiny_models import write_tiny_llama

CONFIGS = {
    "EAGLE-3": eagle_config(),
    "EAGLE-3.1": eagle_config(fc_norm=True, norm_output=True, own_head=False),
    "gpt-oss": eagle_config(norm_before_fc=True, norm_before_residual=True, own_embedding=True),
    "two layers, biases": eagle_config(body=heads.tiny_body(num_layers=2, bias=True), draft_vocab_size=VOCAB),
    "DSpark": block_config(),
    "behind the last state": block_config(reads_last=True, own_head=False),
    "bidirectional": block_config(causal=False),
    "DFlash": block_config(causal=False, sample_from_anchor=False, markov_rank=0, own_head=False),
}


def test_the_shapes_of_a_head_do_not_need_pytorchs_compiler() -> None:
    code = (
        "import sys\n"
        "from specinfer.heads.checkpoint import head_shapes\n"
        "from tests.heads import block_config, eagle_config\n"
        "shapes = head_shapes(eagle_config(own_embedding=True)) | head_shapes(block_config())\n"
        "print(any('markov_w1' in name for name in shapes), 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_written_head_is_read(config: EagleConfig | BlockConfig, target: Path, tmp_path: Path) -> None:
    opened = open_model(target)
    head = tiny_head(config)
    write_tiny_head(head, tmp_path / "head")
    assert is_head(tmp_path / "head")
    assert not is_head(target)
    folder = HeadFolder(tmp_path / "head", opened.config)
    assert folder.config == config
    assert list(folder.ids) == head.ids.tolist()
    again = folder.module(opened).state_dict()
    borrowed = {
        "embed_tokens.weight": None if config.own_embedding else checkpoint.target_embedding(opened),
        "lm_head.weight": None if config.own_head else checkpoint.target_head(opened, folder.ids),
    }
    for name, tensor in head.state_dict().items():
        expected = borrowed.get(name)
        assert torch.equal(again[name], tensor if expected is None else expected), name


def test_a_config_has_the_librarys_words(tmp_path: Path) -> None:
    write_tiny_head(tiny_head(block_config()), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert {key: value for key, value in config.items() if not isinstance(value, dict)} == {
        **{"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark"},
        **{"speculators_version": "0.7.0", "draft_vocab_size": heads.NAMED, "target_hidden_size": SIZE},
        **{"tie_word_embeddings": False, "dtype": "float32", "aux_hidden_state_layer_ids": [0, 2]},
        **{"block_size": 5, "mask_token_id": 1, "sliding_window_non_causal": False},
        **{"sample_from_anchor": True, "markov_rank": 6, "markov_head_type": "vanilla"},
        "enable_confidence_head": False,
    }
    layers = config["transformer_layer_config"]
    assert layers["model_type"] == "qwen3"
    # A row of the block sees those before it: vLLM reads the first, the library the others.
    assert layers["is_causal"] is True
    assert layers["layer_types"] == ["sliding_attention"] * 2
    assert layers["sliding_window"] == layers["max_position_embeddings"]
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "tiny",
        "architectures": ["LlamaForCausalLM"],
    }


def test_weights_that_are_no_numbers_are_not_written(tmp_path: Path) -> None:
    head = tiny_head(eagle_config())
    with torch.no_grad():
        head.fc.weight[3, 4] = float("nan")
    with pytest.raises(ModelError, match=r"fc\.weight"):
        write_tiny_head(head, tmp_path / "head")
    assert not (tmp_path / "head").exists()


def test_matrices_may_be_int8_with_a_factor_for_each_row(target: Path, tmp_path: Path) -> None:
    opened = open_model(target)
    head = tiny_head(block_config(reads_last=True, own_head=False))
    write_head(head, tmp_path / "head", verifier="tiny", architectures=["x"], dtype=torch.int8)
    written = load_file(tmp_path / "head" / "model.safetensors")
    assert written["fc.weight"].dtype == torch.int8
    assert written["norm.weight"].dtype == torch.float32
    again = HeadFolder(tmp_path / "head", opened.config).module(opened).state_dict()
    for name, tensor in head.state_dict().items():
        if name in ("embed_tokens.weight", "lm_head.weight"):
            continue
        if written[name].dtype == torch.int8:
            step = tensor.abs().amax(dim=1, keepdim=True) / 127
            assert bool(((again[name] - tensor).abs() <= 0.51 * step).all()), name
        else:
            assert torch.equal(again[name], tensor), name


# MTP layers.


TEXT = [(7 * i + 3) % VOCAB for i in range(9)]
PATH = [5, 40, 17]


def test_the_module_is_what_a_loop_over_rows_makes(target: Path, tmp_path: Path) -> None:
    opened = open_model(target)
    head = new_head(MtpKind(depth=3, vocabulary=48).config(opened.config), opened, list(range(48)), 1)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.requires_grad:
                parameter.add_(
                    0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                )
    write_mtp(head, tmp_path / "head")
    again = mtp_head(MtpFile(local_model("head", tmp_path / "head"), opened.config), opened, depth=3)
    assert again.config.depth == 3
    states = torch.randn(len(TEXT) - 1, SIZE, generator=torch.Generator().manual_seed(3))
    tokens = torch.full((1, len(TEXT) - 1, 1 + len(PATH)), 3)
    tokens[0, :, 0] = torch.tensor(TEXT[1:])
    tokens[0, -1, 1:] = torch.tensor(PATH)
    with torch.no_grad():
        logits = again.logits(again(tokens, states[None, :, None]))[0, -1]
    config = json.loads((target / "config.json").read_text())
    tensors = load_file(target / "model.safetensors") | {
        name: tensor.float() for name, tensor in load_file(tmp_path / "head/model.safetensors").items()
    }
    oracle = MtpOracle(replace(QWEN, offset=0.0, gated=False), config, tensors)
    for depth in range(1 + len(PATH)):
        expected = oracle.logits(TEXT, states.double().numpy(), PATH[:depth])
        np.testing.assert_allclose(logits[depth], expected, atol=1e-4 * np.abs(expected).max())


def test_norms_are_written_as_in_files_of_the_family(target: Path, tmp_path: Path) -> None:
    opened = open_model(target)
    written = new_head(MtpKind().config(opened.config), opened, list(range(VOCAB)), 1)
    for family, offset in ((Family.LLAMA, 0.0), (Family.GEMMA, 1.0)):
        written.body = replace(written.body, family=family)
        write_mtp(written, tmp_path / family)
        stored = load_file(tmp_path / family / "model.safetensors")
        file = MtpFile(local_model("head", tmp_path / family), replace(opened.config, family=family))
        found = mtp_head(file, opened, depth=5).state_dict()
        for name, tensor in written.state_dict().items():
            torch.testing.assert_close(found[name], tensor, atol=2**-8, rtol=2**-8)
        expected = written.norm.weight.detach() - offset
        torch.testing.assert_close(stored["mtp.norm.weight"], expected.bfloat16())


# Refusals.


@pytest.mark.parametrize("config", [eagle_config(), block_config()])
def test_heads_of_other_targets(config: EagleConfig | BlockConfig, target: Path, tmp_path: Path) -> None:
    opened = open_model(target)
    others = open_model(write_tiny_llama(tmp_path / "other", num_layers=3, tie_embeddings=False, seed=1))
    named = {"verifier": "tiny", "architectures": []}
    write_head(tiny_head(config), tmp_path / "head", **named, fingerprint=fingerprint(opened))  # type: ignore[arg-type]
    assert open_head(tmp_path / "head", opened).config == config
    with pytest.raises(ModelError, match="for tiny, which has other weights than other"):
        open_head(tmp_path / "head", others)
    assert HeadFolder(tmp_path / "head", others.config).config == config  # to be trained on, for one
    write_tiny_head(tiny_head(config), tmp_path / "anybody")
    assert open_head(tmp_path / "anybody", others).fingerprint is None


Change = Callable[[dict[str, Any]], object]


def _layers(**changes: object) -> Change:
    return lambda c: c["transformer_layer_config"].update(changes)


def _with(**changes: object) -> Change:
    return lambda c: c.update(changes)


def _taps(ids: object) -> Change:
    return _with(eagle_aux_hidden_state_layer_ids=ids)


def _tensor(name: str, value: torch.Tensor) -> Change:
    return _with(**{name: value})


OFFSETS = torch.tensor([token - place for place, token in enumerate(heads.IDS)])
HOSTILE_CONFIGS: list[tuple[Change, str]] = [
    (_with(speculators_model_type="telepathy"), "telepathy"),
    (_with(speculators_version="2.0"), "2.0"),
    (lambda c: c.pop("transformer_layer_config"), "transformer_layer_config"),
    (_layers(num_hidden_layers=10**12), "1000000000000 layers"),
    (_layers(model_type="qwen3_moe"), "qwen3_moe"),
    (_with(fc_norm=True, norm_before_fc=True), "norm_before_fc and fc_norm"),
    (_with(norm_output="yes"), "norm_output is 'yes'"),
    (_with(target_hidden_size=2 * SIZE), "hidden states of 64"),
    (_layers(vocab_size=2 * VOCAB), "a vocabulary of 128"),
    (_with(draft_vocab_size=VOCAB + 1), "draft_vocab_size is 65"),
    (_with(draft_vocab_size=heads.NAMED - 1), r"\[23\]"),  # fewer than its output layer
    (_taps([0, 1, 4]), "reads layer 4"),
    (_taps([-1, 1, 2]), "different layers"),
    (_taps([1, 1, 2]), "different layers"),
    (_taps("all"), "list of layers"),
    (_taps([0, 1, 2, 3]), r"'fc\.weight'.*\[32, 128\]"),
    (
        lambda c: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=10**9),
        "guesses 1000000000",
    ),
]
HOSTILE_TENSORS: list[tuple[Change, str]] = [
    (_tensor("fc.weight", torch.zeros(SIZE, 3 * SIZE + 1)), r"'fc\.weight'"),
    (lambda t: t.pop("norm.weight"), "lacks tensor 'norm.weight'"),
    (_tensor("lora.weight", torch.zeros(3)), "'lora.weight'"),
    (_tensor("norm.weight", torch.zeros(SIZE, dtype=torch.int64)), "int64"),
    (_with(d2t=OFFSETS[:-1]), r"'d2t' has shape \[23\]"),
    (_with(d2t=OFFSETS + VOCAB), "'d2t' is damaged"),
    (_with(d2t=OFFSETS.flip(0)), "'d2t' is damaged"),
    (_with(d2t=OFFSETS + (2**63 - 1 - VOCAB)), "'d2t' is damaged"),
    (_with(d2t=OFFSETS.float()), "float32"),
    (lambda t: t.pop("d2t"), "lacks 'd2t'"),
    (_with(t2d=torch.ones(VOCAB, dtype=torch.bool)), "name different tokens"),
]
HOSTILE_BLOCKS: list[tuple[Change, str]] = [
    (_with(**{field: value}), field)
    for field in ("block_size", "mask_token_id", "markov_rank")
    for value in (-1, 10**9, "7", True)
]


def test_what_cannot_be_is_refused(tmp_path: Path, target: Path) -> None:
    for kind, cases, head in (
        ("config", HOSTILE_CONFIGS, eagle_config()),
        ("tensors", HOSTILE_TENSORS, eagle_config()),
        ("config", HOSTILE_BLOCKS, block_config()),
    ):
        for change, said in cases:
            write_tiny_head(tiny_head(head), tmp_path)
            change_head(tmp_path, **{kind: change})
            with pytest.raises(ModelError, match=said) as caught:
                HeadFolder(tmp_path, open_model(target).config)
            assert "\n" not in str(caught.value), said


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(value: float, target: Path, tmp_path: Path) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    change_head(tmp_path, tensors=lambda t: t["layers.0.mlp.down_proj.weight"].__setitem__((3, 5), value))
    opened = open_model(target)
    with pytest.raises(ModelError, match=r"down_proj\.weight.*not finite"):
        HeadFolder(tmp_path, opened.config).module(opened)


def test_a_pickle_is_refused_with_what_to_do(tmp_path: Path, target: Path) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"convert pytorch_model\.bin to safetensors"):
        HeadFolder(tmp_path, open_model(target).config)


def test_a_head_that_borrows_tables_of_another_size_is_refused(tmp_path: Path, target: Path) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    wider = replace(open_model(target).config, hidden_size=48)
    change_head(
        tmp_path,
        config=lambda c: c.update(target_hidden_size=48),
        tensors=_tensor("fc.weight", torch.zeros(SIZE, 3 * 48)),
    )
    with pytest.raises(ModelError, match="cannot use the target's embeddings"):
        HeadFolder(tmp_path, wider)


def test_factors_that_cannot_be_are_refused(target: Path, tmp_path: Path) -> None:
    opened, folder = open_model(target), tmp_path / "head"
    cases: list[tuple[Change, str]] = [
        (lambda tensors: tensors.pop("fc.weight_scale"), "int8"),
        (_tensor("fc.weight_scale", torch.ones(3)), "int8"),
        (lambda tensors: tensors["fc.weight_scale"].fill_(float("nan")), "not finite"),
        (_tensor("norm.weight_scale", torch.ones(32)), "unexpected tensor"),
    ]
    for change, said in cases:
        write_head(tiny_head(block_config()), folder, verifier="t", architectures=["x"], dtype=torch.int8)
        change_head(folder, tensors=change)
        with pytest.raises(ModelFileError, match=said):
            HeadFolder(folder, opened.config).module(opened)


@pytest.mark.parametrize("size", [1 << 62, 10**30])
def test_sizes_that_no_tensor_has_are_refused(size: int) -> None:
    with pytest.raises(ModelError, match="tensors that are too large"):
        head_shapes(block_config(target_hidden_size=size))
