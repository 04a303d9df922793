"""MTP layers as drafts: every guess is their oracle's, and the text is that of the target alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file

from specinfer import SamplingParams
from specinfer.engine import drafts
from specinfer.engine.steps import TreeEvent
from specinfer.errors import ConfigError, ModelError
from specinfer.heads.checkpoint import load_head
from specinfer.heads.mtp import MtpFile, is_mtp
from specinfer.hub.model_files import local_model
from specinfer.kernels.choice import draft_kernels
from specinfer.llm import LLM
from specinfer.models.gguf import GGUFFile
from specinfer.models.open_model import open_model
from specinfer.models.weights import load_model
from specinfer.runtime.batch import chain_rows
from specinfer.speculation_config import OWN_HEAD, Quantization
from specinfer.tree.token_tree import draws_by_parent
from tests.engines import CPU, ENGINE, assert_idle
from tests.kernels import kernels
from tests.mtp import LAYOUTS, VOCAB, alone, change, oracle, write_target
from tests.oracles.mtp import MtpOracle
from tests.parity.families import save_random
from tests.parity.gguf_files import write_gguf
from tests.ranks import llm_of
from tests.shown import Lines
from tests.states import StateRunner
from tests.unit.engine.heads.head_engines import PROMPTS, SAMPLED, logits_made, shaped, trees_after

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mtp")
    return {name: write_target(name, folder / name) for name in LAYOUTS}


def gap(
    made_by: MtpOracle,
    llm: LLM,
    states: Any,
    prompt: list[int],
    params: SamplingParams,
    shortlist: int = VOCAB,
    **how: Any,
) -> tuple[float, set[int]]:
    """The largest error of a guess's probability in an engine, and the depths of its trees."""
    events: list[TreeEvent] = []
    llm.on_tree = events.append
    (output,) = llm.generate([prompt], params)
    states_TD, largest, depths = states([*prompt, *output.token_ids]), 0.0, set[int]()
    for text, tree in trees_after(prompt, output, events):
        depths.update(tree.depths())
        for parent, draws in draws_by_parent(tree.draws).items():
            logits = made_by.logits(text, states_TD, list(tree.path_tokens(parent)), **how)
            logits = logits[logits_made(text, shortlist)]
            probs = np.exp(logits - logits.max())
            probs /= probs.sum()
            for one in draws:
                largest = max(largest, abs(float(probs[tree.token_ids[one.node]]) - one.confidence))
    return largest, depths


def last_states(llm: LLM) -> Any:
    """A function that returns the outputs of the target's last layer for a text, [T, D]."""
    target = llm.models.target

    def states(text: list[int]) -> Any:
        runner = StateRunner(target, num_blocks=1, block_size=128)
        layer = target.config.num_layers
        flight = runner.launch([chain_rows(text, 0, [0], logits=True)], taps=[layer])
        return flight.tapped([layer])[:, 0].double().numpy()

    return states


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_guess_is_as_likely_as_the_oracle_says(name: str, targets: dict[str, Path]) -> None:
    made_by = oracle(name, targets[name])
    options = {**ENGINE, "block_size": 4, "max_step_tokens": 20}
    with LLM(str(targets[name]), **options, drafts=OWN_HEAD) as llm:
        states = last_states(llm)
        for prompt in [*PROMPTS, *PROMPTS]:  # the second time its keys and values lie in blocks it finds
            found, depths = gap(made_by, llm, states, prompt, shaped(8))
            assert found < 1e-4
            assert depths == {0, 1, 2, 3}
        wrong, _ = gap(made_by, llm, states, PROMPTS[0], shaped(8), normed=False)
        assert wrong > 1e-3, "a head that reads the state before the target's last norm would not be found"
        assert llm.statistics().prefix_hits > 0


@pytest.mark.parametrize("name", ["qwen3.5", "mimo"])
def test_texts_of_common_tokens_are_guessed_from_the_shortlist(
    name: str, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "_SHORTLIST", 32)
    made_by, found = oracle(name, targets[name]), list[float]()
    with LLM(str(targets[name]), **ENGINE, drafts=OWN_HEAD) as llm:
        found = [
            gap(made_by, llm, last_states(llm), prompt, shaped(8), shortlist)[0]
            for shortlist in (32, VOCAB)
            for prompt in PROMPTS
        ]
        for sampling in (GREEDY, SAMPLED):
            params = SamplingParams(max_tokens=24, **sampling)
            outputs, alone = llm.generate(PROMPTS, params), llm.variant(drafts=()).generate(PROMPTS, params)
            assert [one.token_ids for one in outputs] == [one.token_ids for one in alone]
    assert max(found[: len(PROMPTS)]) < 1e-4
    assert max(found[len(PROMPTS) :]) > 1e-3, "some are of the shortlist alone"


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.usefixtures("own_cache")  # of quantized matrices
def test_the_text_is_that_of_the_target_alone(name: str, targets: dict[str, Path]) -> None:
    cases: list[dict[str, Any]] = [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "float32", "quantization": "int4"},
    ]
    params = [SamplingParams(max_tokens=20, **one) for one in (GREEDY, {**SAMPLED, "ignore_eos": True})]
    for case in cases:
        options = {**ENGINE, **case, "block_size": 4, "max_step_tokens": 20}
        with LLM(str(targets[name]), **options) as llm:
            expected = [[one.token_ids for one in llm.generate(PROMPTS, each)] for each in params]
        for _ in range(2):  # the second time with the matrices that the first one kept
            with LLM(str(targets[name]), **options, drafts=OWN_HEAD) as llm:
                for each, texts in [*zip(params, expected, strict=True)] * 2:
                    outputs = llm.generate(PROMPTS, each)
                    assert [one.token_ids for one in outputs] == texts, case
                    assert sum(one.figures.proposed_by["draft"] for one in outputs) > 0, case
                assert_idle(llm)
                assert [*llm.models.kinds.values()] == [case.get("quantization", "none")]


def test_the_layer_is_used_without_an_option(targets: dict[str, Path]) -> None:
    show, params = Lines(), SamplingParams(max_tokens=8, **GREEDY)
    with LLM(str(targets["qwen3.5"]), **ENGINE, drafts="auto", progress=show) as llm:
        assert llm.config.speculation.drafts == (OWN_HEAD,)
        assert "qwen3.5: its draft is the MTP head in its own files; --no-draft leaves it out" in show.lines
        outputs = llm.generate(PROMPTS, params)
        assert sum(one.figures.proposed_by["draft"] for one in outputs) > 0
        assert llm.variant(drafts=()).models.drafts == {}
    with LLM(str(targets["qwen3.5"]), **ENGINE) as llm:
        assert llm.models.drafts == {}
        assert [one.token_ids for one in llm.generate(PROMPTS, params)] == [one.token_ids for one in outputs]


def test_a_layer_in_a_folder_of_its_own_is_a_draft(targets: dict[str, Path], tmp_path: Path) -> None:
    for name in ("qwen3.5", "mimo"):
        head = alone(targets[name], tmp_path / name)
        options: dict[str, Any] = dict(ENGINE)
        with LLM(str(targets[name]), **options, drafts=OWN_HEAD) as llm:
            beside = llm.generate(PROMPTS, shaped(8))
        with LLM(str(targets[name]), **options, drafts=str(head)) as llm:
            apart = llm.generate(PROMPTS, shaped(8))
        assert [one.token_ids for one in apart] == [one.token_ids for one in beside]
        assert [one.figures.accepted_by for one in apart] == [one.figures.accepted_by for one in beside]
        with pytest.raises(ModelError, match="is a draft head, not a model: name it in drafts"):
            LLM(str(head), **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe", "qwen3-next"])
def test_a_gguf_file_has_the_layer_of_its_folder(name: str, targets: dict[str, Path], tmp_path: Path) -> None:
    file, further = tmp_path / "model.gguf", gguf_layer(name, targets[name])
    theirs = save_random(name, tmp_path / "again", tied=False, vocab_size=64)
    sizes = {"block_count": 5, "nextn_predict_layers": 1}
    write_gguf(theirs, file, add=further, sizes=sizes)
    folder, opened = open_model(targets[name]), open_model(file)
    assert isinstance(opened, GGUFFile)
    ours = MtpFile(local_model("f", targets[name]), folder.config).parts
    found = MtpFile(local_model("g", file), opened.config).parts
    assert found.shapes == ours.shapes
    for tensor, shape in ours.shapes.items():
        plus = 1.0 if "norm" in tensor else 0.0
        expected = ours.read_rows(tensor, 0, shape[0]).float() + plus
        assert torch.equal(found.read_rows(tensor, 0, shape[0]), expected), tensor
    assert opened.shapes.keys() == folder.shapes.keys()
    write_gguf(theirs, tmp_path / "without.gguf", sizes=sizes)  # the layer is announced, and has no tensors
    assert open_model(tmp_path / "without.gguf").next_names is None
    # The layer alone, as llama.cpp's converter writes it with --mtp.
    lone = tmp_path / "mtp.gguf"
    write_lone(name, theirs, lone, further, sizes)
    assert is_mtp(local_model("l", lone))
    assert not is_mtp(local_model("g", file))
    assert (
        MtpFile(local_model("l", lone), opened.config).config
        == MtpFile(local_model("g", file), opened.config).config
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("quantization", ["none", "gguf", "int4"])
@pytest.mark.usefixtures("own_cache")
def test_texts_of_a_gguf_file(quantization: Quantization, targets: dict[str, Path], tmp_path: Path) -> None:
    """Rows have whole blocks of 32."""
    further = {
        tensor: values if values.ndim == 1 else gguf.quants.quantize(values, GGMLQuantizationType.Q8_0)
        for tensor, values in gguf_layer("qwen3.5", targets["qwen3.5"], inner=64).items()
    }
    theirs = save_random("qwen3.5", tmp_path / "again", tied=False, vocab_size=64, intermediate_size=64)
    sizes = {"block_count": 5, "nextn_predict_layers": 1}
    write_gguf(theirs, tmp_path / "m.gguf", add=further, sizes=sizes, kind=GGMLQuantizationType.Q8_0)
    opened = open_model(tmp_path / "m.gguf")
    used = kernels("native")
    how: dict[str, Any] = {
        **{"quantization": quantization, "kernels": used, "dtype": torch.float32, "device": CPU},
    }
    target = load_model(opened, **how)
    head = MtpFile(local_model("g", tmp_path / "m.gguf"), opened.config)
    assert head.fitting(quantization) == quantization
    draft = load_head(head, target, kernels=draft_kernels(used), quantization=quantization)
    texts = []
    for named in ({}, {"draft": draft}):
        with llm_of(target, targets["qwen3.5"], named) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=16, **GREEDY))
            texts.append([one.token_ids for one in outputs])
    assert texts[0] == texts[1]
    assert sum(one.figures.proposed_by["draft"] for one in outputs) > 0


def gguf_layer(name: str, folder: Path, inner: int | None = None) -> dict[str, Any]:
    """A folder's MTP layer under the names of llama.cpp's converter, which adds 1 to norms."""
    tensors = {
        key: one.numpy()
        for key, one in load_file(folder / "model.safetensors").items()
        if key.startswith("mtp.")
    }
    own = {
        **{"mtp.fc": "nextn.eh_proj", "mtp.pre_fc_norm_embedding": "nextn.enorm"},
        **{"mtp.pre_fc_norm_hidden": "nextn.hnorm", "mtp.norm": "nextn.shared_head_norm"},
    }
    inside = {
        **{"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"},
        **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
        **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
        "self_attn.o_proj": "attn_output",
        **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
        **{f"mlp.shared_expert.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")},
        **{"mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp"},
    }
    found: dict[str, Any] = {}
    stacks: dict[str, dict[int, Any]] = {}
    for key, values in tensors.items():
        stem = key.removesuffix(".weight")
        values = values + 1 if "norm" in stem else values
        after = stem.removeprefix("mtp.layers.0.")
        if after.startswith("mlp.experts."):
            _, _, number, part = after.split(".")
            stacks.setdefault(f"ffn_{part.removesuffix('_proj')}_exps", {})[int(number)] = values
            continue
        if inner is not None and values.ndim == 2 and after.startswith("mlp."):
            values = np.resize(
                values, (values.shape[0], inner) if "down" in after else (inner, values.shape[1])
            )
        found[f"blk.4.{own.get(stem) or inside[after]}.weight"] = values
    found |= {f"blk.4.{k}.weight": np.stack([of[i] for i in range(len(of))]) for k, of in stacks.items()}
    return found


def write_lone(name: str, theirs: Any, path: Path, further: dict[str, Any], sizes: dict[str, int]) -> None:
    """Write the file without the layers of the target."""
    add = gguf.GGUFWriter.add_tensor

    def added(writer: Any, tensor: str, *values: Any, **how: Any) -> None:
        if not tensor.startswith(tuple(f"blk.{layer}." for layer in range(4))):
            add(writer, tensor, *values, **how)

    with patch.object(gguf.GGUFWriter, "add_tensor", added):
        write_gguf(theirs, path, add=further, sizes=sizes)


def test_what_is_no_layer_of_the_target_is_refused(targets: dict[str, Path], tmp_path: Path) -> None:
    def tensor(name: str, value: torch.Tensor | None) -> Any:
        return lambda tensors: tensors.pop(name) if value is None else tensors.__setitem__(name, value)

    matrix, nan = "mtp.layers.0.mlp.down_proj.weight", torch.full((32, 56), float("nan"))
    second = "mtp.layers.1.input_layernorm.weight"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tensors": tensor("mtp.fc.weight", torch.zeros(32, 63))}, r"'fc\.weight' has shape \[32, 63\]"),
        ({"tensors": tensor("mtp.norm.weight", None)}, r"lacks tensor 'model\.norm\.weight'"),
        ({"tensors": tensor("mtp.lm_head.weight", torch.zeros(64, 32))}, "unexpected tensor"),
        ({"tensors": tensor(matrix, nan)}, "values that are not finite"),
        ({"tensors": tensor(second, torch.zeros(32))}, "tensors of 2 layers .* its config says 1"),
        ({"mtp_num_hidden_layers": 2}, "tensors of 1 layers .* its config says 2"),
        (
            {"tensors": tensor(second, torch.zeros(32)), "mtp_num_hidden_layers": 2},
            "has 2 layers that predict further tokens; supported: 1",
        ),
        (
            {"tensors": lambda tensors: [tensors.pop(name) for name in [*tensors] if "mtp" in name]},
            "has no layer that predicts further tokens",
        ),
    ]
    for number, (changes, said) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        for file in targets["qwen3.5"].iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        change(folder, **changes)
        with pytest.raises(ModelError, match=said) as caught:
            LLM(str(folder), **ENGINE, drafts=OWN_HEAD)
        assert "\n" not in str(caught.value)
        ranks = {"pipeline_parallel": 2} if "not finite" in said else {}  # others are found before they load
        show, options = Lines(), {**ENGINE, **ranks}
        with LLM(str(folder), **options, drafts="auto", progress=show) as llm:  # the config does not name it
            assert llm.models.drafts == {}
            llm.generate(PROMPTS, SamplingParams(max_tokens=2, **GREEDY))
        told = [line for line in show.lines if line.startswith("the automatic draft is left out: ")]
        assert len(told) == ("has no layer" not in said), said
        assert all(re.search(said, line) for line in told)
    with pytest.raises(ConfigError, match=r"the draft mtp uses .* which tensor_parallel 2"):
        LLM(str(targets["mimo"]), **ENGINE, drafts=OWN_HEAD, tensor_parallel=2)
