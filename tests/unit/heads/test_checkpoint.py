"""Heads as folders: written, read again, and refused where they are not what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specinfer.errors import ModelError, ModelFileError
from specinfer.heads.checkpoint import (
    HeadFolder,
    head_bytes,
    is_head,
    open_head,
    target_embedding,
    target_head,
)
from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.heads.kinds import head_shapes
from specinfer.heads.speculators import write_head
from specinfer.models.config import ModelConfig
from specinfer.models.fingerprint import fingerprint
from specinfer.models.weights import open_model
from tests.heads import (
    IDS,
    NAMED,
    SIZE,
    VOCAB,
    block_config,
    eagle_config,
    medusa_config,
    tiny_body,
    tiny_head,
    write_tiny_head,
)
from tests.tiny_models import write_tiny_llama

CONFIGS = {
    "EAGLE-3": eagle_config(),
    "EAGLE-3.1": eagle_config(fc_norm=True, norm_output=True, own_head=False),
    "gpt-oss": eagle_config(norm_before_fc=True, norm_before_residual=True, own_embedding=True),
    "two layers, biases": eagle_config(body=tiny_body(num_layers=2, bias=True), draft_vocab_size=VOCAB),
    "P-EAGLE": eagle_config(body=tiny_body(num_layers=4), mask_token_id=7, depth=8),
    "DSpark": block_config(),
    "behind the last state": block_config(reads_last=True, own_head=False),
    "bidirectional": block_config(causal=False),
    "DFlash": block_config(
        causal=False,
        sample_from_anchor=False,
        markov_rank=0,
        own_head=False,
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("target"), num_layers=3, tie_embeddings=False)


@pytest.fixture
def target_config(target: Path) -> ModelConfig:
    return open_model(target).config


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_head_that_is_written_is_read_again(
    config: EagleConfig | BlockConfig, target: Path, tmp_path: Path
) -> None:
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
        "embed_tokens.weight": None if config.own_embedding else target_embedding(opened),
        "lm_head.weight": None if config.own_head else target_head(opened, folder.ids),
    }
    for name, tensor in head.state_dict().items():
        expected = borrowed.get(name)
        assert torch.equal(again[name], tensor if expected is None else expected), name


def test_names_of_tensors_are_those_of_checkpoints(tmp_path: Path) -> None:
    write_tiny_head(tiny_head(eagle_config(fc_norm=True)), tmp_path / "eagle")
    layer = {
        *(f"self_attn.{x}_proj" for x in "qkvo"),
        *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
        *("input_layernorm", "post_attention_layernorm"),
    }
    eagle = load_file(tmp_path / "eagle/model.safetensors")
    assert set(eagle) == {
        *(f"layers.0.{name}.weight" for name in {*layer, "hidden_norm"}),
        *(f"fc_norm.{i}.weight" for i in range(3)),
        *("fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"),
    }
    assert eagle["layers.0.self_attn.q_proj.weight"].shape == (32, 2 * SIZE)
    assert eagle["d2t"].tolist() == [token - place for place, token in enumerate(IDS)]
    assert eagle["t2d"].dtype == torch.bool
    write_tiny_head(tiny_head(block_config()), tmp_path / "block")
    assert set(load_file(tmp_path / "block/model.safetensors")) == {
        *(f"layers.{i}.{name}.weight" for i in (0, 1) for name in layer),
        *(f"layers.{i}.self_attn.{x}_norm.weight" for i in (0, 1) for x in "qk"),
        *("fc.weight", "hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"),
        *("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
    }


def test_a_config_has_the_librarys_words(tmp_path: Path) -> None:
    write_tiny_head(tiny_head(block_config()), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert {key: value for key, value in config.items() if not isinstance(value, dict)} == {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.7.0",
        "draft_vocab_size": NAMED,
        "target_hidden_size": SIZE,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "aux_hidden_state_layer_ids": [0, 2],
        "block_size": 5,
        "mask_token_id": 1,
        "sliding_window_non_causal": False,
        "sample_from_anchor": True,
        "markov_rank": 6,
        "markov_head_type": "vanilla",
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


@pytest.mark.parametrize("config", [eagle_config(), block_config()])
def test_a_head_that_says_whose_it_is_is_refused_by_others(
    config: EagleConfig | BlockConfig, target: Path, tmp_path: Path
) -> None:
    opened = open_model(target)
    others = open_model(write_tiny_llama(tmp_path / "other", num_layers=3, tie_embeddings=False, seed=1))
    named = {"verifier": "tiny", "architectures": []}
    write_head(tiny_head(config), tmp_path / "head", **named, fingerprint=fingerprint(opened))  # type: ignore[arg-type]
    assert open_head(tmp_path / "head", opened).config == config
    with pytest.raises(ModelError, match="for tiny, whose weights are others than those of other"):
        open_head(tmp_path / "head", others)
    assert HeadFolder(tmp_path / "head", others.config).config == config  # to be trained on, for one
    write_tiny_head(tiny_head(config), tmp_path / "anybody")
    assert open_head(tmp_path / "anybody", others).fingerprint is None


@pytest.mark.parametrize("value", ["abc", 7, "g" * 64, ["a" * 64]])
def test_a_fingerprint_that_is_none_is_refused(value: object, target: Path, tmp_path: Path) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    _change(tmp_path, config=lambda c: c.update(target_fingerprint=value))
    with pytest.raises(ModelFileError, match="expected 64 hexadecimal digits"):
        open_head(tmp_path, open_model(target))


def test_bfloat16_is_half_as_large(tmp_path: Path, target_config: ModelConfig) -> None:
    head = tiny_head(eagle_config())
    write_head(head, tmp_path, verifier="tiny", architectures=[], dtype=torch.bfloat16)
    rows = HeadFolder(tmp_path, target_config).read_rows("fc.weight", 0, SIZE)
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows, head.fc.weight.detach().to(torch.bfloat16))


def test_what_the_library_leaves_out_is_filled_in(tmp_path: Path, target_config: ModelConfig) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    _change(tmp_path, config=lambda c: c.pop("eagle_aux_hidden_state_layer_ids"))
    assert HeadFolder(
        tmp_path, replace(target_config, num_layers=30, layer_windows=(None,) * 30)
    ).config.taps == (*(2, 15, 27),)


def test_weights_that_are_no_numbers_are_not_written(tmp_path: Path) -> None:
    head = tiny_head(eagle_config())
    with torch.no_grad():
        head.fc.weight[3, 4] = float("nan")
    with pytest.raises(ModelError, match=r"fc\.weight"):
        write_tiny_head(head, tmp_path / "head")
    assert not (tmp_path / "head").exists()


def _change(
    folder: Path,
    *,
    config: Callable[[dict[str, Any]], object] = lambda c: None,
    tensors: Callable[[dict[str, torch.Tensor]], object] = lambda t: None,
) -> None:
    """Change a head's files in place."""
    described = json.loads((folder / "config.json").read_text())
    config(described)
    (folder / "config.json").write_text(json.dumps(described))
    weights = load_file(folder / "model.safetensors")
    tensors(weights)
    save_file(weights, folder / "model.safetensors")


def _layers(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda c: c["transformer_layer_config"].update(changes)


def _with(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda t: t.update({name: value})


OFFSETS = torch.tensor([token - place for place, token in enumerate(IDS)])
HOSTILE_CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an unknown kind": (lambda c: c.update(speculators_model_type="telepathy"), "telepathy"),
    "a version to come": (lambda c: c.update(speculators_version="2.0"), "2.0"),
    "no layers": (lambda c: c.pop("transformer_layer_config"), "transformer_layer_config"),
    "layers without end": (_layers(num_hidden_layers=10**12), "1000000000000 layers"),
    "experts": (_layers(model_type="qwen3_moe"), "qwen3_moe"),
    "a sliding window": (
        _layers(
            model_type="qwen3", use_sliding_window=True, sliding_window=16, layer_types=["sliding_attention"]
        ),
        "sliding window of 16",
    ),
    "both norms": (lambda c: c.update(fc_norm=True, norm_before_fc=True), "norm_before_fc and fc_norm"),
    "a flag that is none": (lambda c: c.update(norm_output="yes"), "norm_output is 'yes'"),
    "another hidden size": (lambda c: c.update(target_hidden_size=2 * SIZE), "hidden states of 64"),
    "another vocabulary": (_layers(vocab_size=2 * VOCAB), "a vocabulary of 128"),
    "more tokens than there are": (lambda c: c.update(draft_vocab_size=VOCAB + 1), "draft_vocab_size is 65"),
    "fewer than its output layer": (lambda c: c.update(draft_vocab_size=NAMED - 1), r"\[23\]"),
    "a layer the target lacks": (
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 4]),
        "reads layer 4",
    ),
    "a layer below the first": (
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[-1, 1, 2]),
        "different ones",
    ),
    "a layer twice": (lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 1, 2]), "different ones"),
    "layers that are none": (lambda c: c.update(eagle_aux_hidden_state_layer_ids="all"), "list of layers"),
    "more taps than fc reads": (
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 2, 3]),
        r"'fc\.weight'.*\[32, 128\]",
    ),
    "unspeakable depth": (
        lambda c: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=10**9),
        "guesses 1000000000",
    ),
}
HOSTILE_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "fc of another target": (_with("fc.weight", torch.zeros(SIZE, 3 * SIZE + 1)), r"'fc\.weight'"),
    "a missing tensor": (lambda t: t.pop("norm.weight"), "lacks tensor 'norm.weight'"),
    "a tensor too many": (_with("lora.weight", torch.zeros(3)), "'lora.weight'"),
    "integers for numbers": (_with("norm.weight", torch.zeros(SIZE, dtype=torch.int64)), "int64"),
    "fewer ids": (_with("d2t", OFFSETS[:-1]), r"'d2t' has shape \[23\]"),
    "ids out of range": (_with("d2t", OFFSETS + VOCAB), "'d2t' is damaged"),
    "ids that do not ascend": (_with("d2t", OFFSETS.flip(0)), "'d2t' is damaged"),
    "ids that overflow": (_with("d2t", OFFSETS + (2**63 - 1 - VOCAB)), "'d2t' is damaged"),
    "ids that are no numbers": (_with("d2t", OFFSETS.float()), "float32"),
    "no ids": (lambda t: t.pop("d2t"), "lacks 'd2t'"),
    "ids twice told": (_with("t2d", torch.ones(VOCAB, dtype=torch.bool)), "name different tokens"),
}


@pytest.mark.parametrize(("change", "said"), HOSTILE_CONFIGS.values(), ids=HOSTILE_CONFIGS)
def test_a_config_that_cannot_be_is_refused(
    change: Callable[[dict[str, Any]], object], said: str, tmp_path: Path, target_config: ModelConfig
) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    _change(tmp_path, config=change)
    with pytest.raises(ModelError, match=said) as caught:
        HeadFolder(tmp_path, target_config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("change", "said"), HOSTILE_TENSORS.values(), ids=HOSTILE_TENSORS)
def test_tensors_that_cannot_be_are_refused(
    change: Callable[[dict[str, torch.Tensor]], object],
    said: str,
    tmp_path: Path,
    target_config: ModelConfig,
) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    _change(tmp_path, tensors=change)
    with pytest.raises(ModelError, match=said) as caught:
        HeadFolder(tmp_path, target_config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(value: float, target: Path, tmp_path: Path) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    _change(tmp_path, tensors=lambda t: t["layers.0.mlp.down_proj.weight"].__setitem__((3, 5), value))
    opened = open_model(target)
    with pytest.raises(ModelError, match=r"down_proj\.weight.*no finite"):
        HeadFolder(tmp_path, opened.config).module(opened)


@pytest.mark.parametrize("field", ["block_size", "mask_token_id", "markov_rank"])
@pytest.mark.parametrize("value", [-1, 10**9, "7", True])
def test_blocks_that_cannot_be_are_refused(
    field: str, value: object, tmp_path: Path, target_config: ModelConfig
) -> None:
    write_tiny_head(tiny_head(block_config()), tmp_path)
    _change(tmp_path, config=lambda c: c.update({field: value}))
    with pytest.raises(ModelError, match=field):
        HeadFolder(tmp_path, target_config)


def test_layers_that_see_a_block_differently_are_refused(tmp_path: Path, target_config: ModelConfig) -> None:
    write_tiny_head(tiny_head(block_config(causal=False)), tmp_path)
    mixed = ["sliding_attention", "full_attention"]
    _change(tmp_path, config=_layers(layer_types=mixed, sliding_window=256, use_sliding_window=True))
    with pytest.raises(ModelError, match="in different ways"):
        HeadFolder(tmp_path, target_config)


def test_a_file_that_was_cut_is_refused(tmp_path: Path, target_config: ModelConfig) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(ModelError, match="truncated"):
        HeadFolder(tmp_path, target_config)


def test_a_pickle_is_refused_with_what_to_do(tmp_path: Path, target_config: ModelConfig) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"convert pytorch_model\.bin to safetensors"):
        HeadFolder(tmp_path, target_config)


def test_a_config_of_unusual_size_is_not_read(tmp_path: Path, target_config: ModelConfig) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    with (tmp_path / "config.json").open("r+b") as file:
        file.truncate(1 << 30)  # a hole: it takes no room on the disk
    with pytest.raises(ModelError, match="1073741824 bytes"):
        HeadFolder(tmp_path, target_config)


def test_a_head_that_borrows_tables_of_another_size_is_refused(
    tmp_path: Path, target_config: ModelConfig
) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    wider = replace(target_config, hidden_size=48, embedding_size=48)
    _change(
        tmp_path,
        config=lambda c: c.update(target_hidden_size=48),
        tensors=_with("fc.weight", torch.zeros(SIZE, 3 * 48)),
    )
    with pytest.raises(ModelError, match="cannot use the target's embeddings"):
        HeadFolder(tmp_path, wider)


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("fc.weight_scale"), "int8"),
        (lambda tensors: tensors.update({"fc.weight_scale": torch.ones(3)}), "int8"),
        (lambda tensors: tensors["fc.weight_scale"].fill_(float("nan")), "no finite numbers"),
        (lambda tensors: tensors.update({"norm.weight_scale": torch.ones(32)}), "unexpected tensor"),
    ],
    ids=["no factors", "too few", "no numbers", "factors of floats"],
)
def test_factors_that_cannot_be_are_refused(
    change: Callable[[dict[str, torch.Tensor]], object], said: str, target: Path, tmp_path: Path
) -> None:
    opened = open_model(target)
    write_head(
        tiny_head(block_config()), tmp_path / "head", verifier="t", architectures=["x"], dtype=torch.int8
    )
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ModelFileError, match=said):
        HeadFolder(tmp_path / "head", opened.config).module(opened)


def test_a_quantized_head_takes_less_and_its_tables_do_not(
    target_config: ModelConfig, tmp_path: Path
) -> None:
    write_tiny_head(tiny_head(block_config(reads_last=True)), tmp_path / "head")
    folder = HeadFolder(tmp_path / "head", target_config)
    floats, int8, int4 = (head_bytes(folder, torch.float32, kind) for kind in ("none", "int8", "int4"))
    tables = VOCAB * 6 * 4  # the Markov term's, of rank 6
    assert tables < int4 < int8 < floats / 2


def test_a_head_with_members_on_it_is_refused(target_config: ModelConfig, tmp_path: Path) -> None:
    """A format that was dropped: its tensors would be ignored, and guess something else."""
    write_tiny_head(tiny_head(block_config(reads_last=True)), tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    save_file(found | {"members.0.vector": torch.zeros(5, SIZE)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"has an unexpected tensor 'members\.0\.vector'"):
        HeadFolder(tmp_path, target_config)


@pytest.mark.parametrize("size", [1 << 62, 10**30])
def test_sizes_that_no_tensor_has_are_refused(size: int) -> None:
    for config in (block_config(target_hidden_size=size), medusa_config(target_hidden_size=size)):
        with pytest.raises(ModelError, match="tensors that are too large"):
            head_shapes(config)
