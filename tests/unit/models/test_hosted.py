"""Models whose layers transformers computes: the same logits as there, and rows that know no neighbours."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specinfer.config import EngineConfig
from specinfer.engine.models import load_models
from specinfer.errors import ConfigError, ModelError, ModelFileError, UnhostedError
from specinfer.kernels.choice import draft_kernels, native_kernels
from specinfer.llm import LLM
from specinfer.models.hosted.attention import PassAttention, transformers, window_of
from specinfer.models.hosted.folder import HostedFolder
from specinfer.models.hosted.native_modules import native_gated_mlp, native_norm, native_self_attention
from specinfer.models.open_model import open_model
from specinfer.models.safetensors import SafetensorsFolder
from specinfer.sampling_params import SamplingParams
from specinfer.speculation_config import Quantization
from tests.hosted import PROMPT, difference, load_hosted, logits_of, same_with_a_tree, save_tiny, tiny_config
from tests.kernels import kernels, plain_tiles
from tests.loading import load
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.thorough

TOLERANCE = 1e-4
# Transposed weights and learned positions; windows in some layers; experts that files have one by one; latent
# attention, whose keys are longer than its values; a block in parallel, with biases.
KINDS = ("gpt2", "cohere2", "mixtral", "deepseek_v3", "phi")
NATIVE = {  # modules with llama's code, which run in kernels
    "llama": {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention"},
    "ministral": {"MinistralRMSNorm", "MinistralMLP", "MinistralAttention"},  # sliding windows
    "glm": {"GlmRMSNorm"},  # rotates a part of each head; gate and up are one layer
    "qwen3": {"Qwen3RMSNorm", "Qwen3MLP"},  # norms of heads
    "gemma": {"GemmaMLP", "GemmaAttention"},  # norms add 1 to their weights
    "arcee": {"ArceeRMSNorm", "ArceeAttention"},  # no gate
}


@pytest.fixture(params=[*NATIVE, *KINDS], scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A model of transformers', and the folder it was saved to."""
    folder = tmp_path_factory.mktemp(request.param)
    return save_tiny(request.param, folder), folder


@pytest.mark.few(5)
def test_logits_are_transformers_own(both: tuple[nn.Module, Path]) -> None:
    theirs, folder = both
    ours = load_hosted(folder, kernels("native"))
    replaced = (native_norm, native_gated_mlp, native_self_attention)
    modules = ours._skeleton.model.modules()
    found = {type(one).__name__ for one in modules if getattr(one.forward, "func", None) in replaced}
    assert found == NATIVE.get(theirs.config.model_type, found)
    assert difference(theirs, ours) < TOLERANCE
    assert same_with_a_tree(ours)


@pytest.mark.few(2)
def test_bfloat16_stays_near(both: tuple[nn.Module, Path]) -> None:
    theirs, folder = both
    ours = load_hosted(folder, kernels("native"), torch.bfloat16)
    with torch.no_grad():
        want = theirs(torch.tensor([PROMPT])).logits[0]
        rounded = copy.deepcopy(theirs).bfloat16()(torch.tensor([PROMPT])).logits[0]
    # Not the largest difference: a token may go to another expert.
    usual = float((rounded.float() - want).abs().mean())
    assert float((logits_of(ours).float() - want).abs().mean()) < 1.5 * usual
    assert same_with_a_tree(ours)


@pytest.mark.few(1)
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("kind", ["apertus", "hunyuan_v1_moe"])  # an activation, and a router, in float32
def test_code_may_compute_in_float32(kind: str, quantization: Quantization, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path / "model")
    opened = open_model(tmp_path / "model", "transformers")
    assert same_with_a_tree(load(opened, dtype=torch.bfloat16, quantization=quantization))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_matrices_are_quantized_only_once(kind: str, quantization: Quantization, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path / "model")
    opened, cache = open_model(tmp_path / "model", "transformers"), tmp_path / "cache"

    def logits() -> Tensor:
        ours = load(opened, quantization=quantization, cache=cache)
        assert same_with_a_tree(ours)
        return logits_of(ours)

    first = logits()
    made = list(cache.glob("*.safetensors"))
    assert len(made) == 1
    before = made[0].stat().st_mtime_ns
    assert torch.equal(logits(), first)
    assert made[0].stat().st_mtime_ns == before
    exact = load_hosted(tmp_path / "model", kernels("native"))
    spread = float(logits_of(exact).std())
    assert float((first - logits_of(exact)).abs().mean()) < (0.8 if quantization == "int4" else 0.1) * spread


def test_a_key_that_we_lack_runs_hosted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cases = (
        ("cohere", "use_qk_norm", True),
        ("olmoe", "clip_qkv", 0.5),
        ("opt", "do_layer_norm_before", False),
    )
    for kind, key, value in cases:
        theirs = save_tiny(kind, tmp_path / kind, **{key: value})
        opened = open_model(tmp_path / kind, "auto")
        assert isinstance(opened, HostedFolder), kind
        assert f"config.json sets {key} = {value}, which specinfer does not compute for models" in caplog.text
        assert difference(theirs, load(opened, "torch")) < TOLERANCE, kind
        with pytest.raises(ModelError, match=f"{key} = {value}.*model_impl auto may run it"):
            open_model(tmp_path / kind, "native")
    save_tiny("llama", tmp_path / "llama")
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    (tmp_path / "llama" / "config.json").write_text(json.dumps({**config, "clip_qkv": 0.5}))
    with pytest.raises(ModelError, match=r"clip_qkv = 0\.5, which specinfer does not compute"):
        open_model(tmp_path / "llama", "auto")  # transformers' code would ignore the key


def test_a_family_of_ours_stays_ours_and_others_run_through_transformers(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    kinds = (("auto", SafetensorsFolder), ("native", SafetensorsFolder), ("transformers", HostedFolder))
    for impl, kind in kinds:
        assert isinstance(open_model(tmp_path, impl), kind), impl
    save_tiny("apertus", tmp_path)
    opened = open_model(tmp_path, "auto")
    assert isinstance(opened, HostedFolder)
    assert opened.summary.startswith("ApertusForCausalLM runs through transformers ")
    with pytest.raises(ModelError, match=r"'apertus' is of no family that specinfer has; docs/models\.md"):
        open_model(tmp_path, "native")


def test_what_cannot_run_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    for kind, why in (
        ("mamba", "has layers with a state"),
        ("gpt_neox_japanese", "does not compute attention through transformers' attention interface"),
        ("bart", "has an encoder"),
        ("doge", "has attention with a custom mask or biases"),
        ("llama4_text", "masks tokens by rules other than a sliding window"),
        ("t5", "has no causal language model in transformers"),
    ):
        if kind == "t5":
            (tmp_path / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
        else:
            tiny_config(kind).save_pretrained(tmp_path)
        with pytest.raises(ModelError, match=why):
            open_model(tmp_path, "transformers")


def test_code_of_a_folder_is_not_run_unless_it_is_trusted(tmp_path: Path) -> None:
    own = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}
    config = {"model_type": "made_up", "auto_map": own}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise RuntimeError('it ran')\n")
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="it has custom code, which needs trust_remote_code"):
        open_model(tmp_path, "auto")
    with pytest.raises(ModelError, match="it ran"):
        open_model(tmp_path, "auto", trust_remote_code=True)
    config["auto_map"] = {**own, "AutoModelForCausalLM": "somebody/else--own.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="refers to code in another repository"):
        open_model(tmp_path, "auto", trust_remote_code=True)


def test_rows_that_many_rows_round_otherwise_are_computed_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.activations import NewGELUActivation

    save_tiny("gpt2", tmp_path)
    forward = NewGELUActivation.forward

    def uneven(self: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = forward(self, x)
        return made * (1 + 2**-20) if x[..., 0].numel() > 100 else made

    load_hosted(tmp_path)
    assert not caplog.records
    monkeypatch.setattr(NewGELUActivation, "forward", uneven)
    load_hosted(tmp_path)
    assert "depend on other rows in a pass" in caplog.text


@pytest.mark.slow  # a library is compiled
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_rows_of_a_draft_may_depend_on_others_by_its_loose_products_alone(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On tiles: few rows are multiplied as integers there, and many as bfloat16."""
    save_tiny(kind, tmp_path / "model")
    opened, run = open_model(tmp_path / "model", "transformers"), draft_kernels(native_kernels(plain_tiles()))
    draft = load(opened, run, dtype=torch.bfloat16, quantization="int4")
    assert not caplog.records
    assert not same_with_a_tree(draft), "its products are loose again"


def change(folder: Path, how: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    how(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_tensor_too_many_or_too_few_is_named(tmp_path: Path) -> None:
    name = "transformer.h.0.attn.c_attn.weight"
    save_tiny("gpt2", tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    for how, message in (
        (lambda tensors: tensors.update({name: tensors[name].T.contiguous()}), "c_attn.weight' has shape"),
        (lambda tensors: tensors.pop(name), f"lacks tensor '{name}'"),
        (lambda tensors: tensors.update(stranger=torch.zeros(2)), "unexpected tensor 'stranger'"),
    ):
        save_file(whole, tmp_path / "model.safetensors")
        change(tmp_path, how)
        with pytest.raises(ModelFileError, match=message):
            open_model(tmp_path, "transformers")


def test_names_without_the_models_prefix_are_read(tmp_path: Path) -> None:
    theirs = save_tiny("gpt2", tmp_path)

    def strip(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    change(tmp_path, strip)
    assert difference(theirs, load_hosted(tmp_path, kernels("native"))) < TOLERANCE


def test_options_that_such_a_model_has_no_use_for_are_refused(tmp_path: Path) -> None:
    save_tiny("apertus", tmp_path)
    model = str(tmp_path)
    refused = {"tensor_parallel": 2, "pipeline_parallel": 2, "sum_parts": 4, "offload": "auto"}
    for name, value in refused.items():
        with pytest.raises(ConfigError, match=f"{name} is {value!r}, and .* runs through transformers"):
            load_models(EngineConfig(model=model).with_options({name: value}))


def test_without_transformers_its_name_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("gpt2", tmp_path)
    transformers.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"pip install 'specinfer\[transformers\]'"):
        open_model(tmp_path, "transformers")


def test_texts_are_the_same_with_and_without_guesses_and_as_of_a_family_of_ours(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, tokenizer=True, hidden_size=64, intermediate_size=128)
    prompts = ["ab ab ab ab", "0123 0123 01"]
    params = SamplingParams(max_tokens=12, temperature=0)

    def texts(**options: object) -> list[list[int]]:
        common = {"dtype": "float32", "kv_cache_memory": 1 << 24, "tree_size": "fixed"}
        with LLM(str(tmp_path), **{**common, **options}) as llm:
            return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    plain = texts(model_impl="transformers", lookup=False)
    assert texts(model_impl="transformers", lookup=True, drafts=[str(tmp_path)]) == plain
    assert texts(model_impl="native", lookup=False) == plain


def test_a_mask_is_a_window_or_is_refused() -> None:
    def causal(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q

    def within(size: int) -> Callable[..., Tensor]:
        return lambda batch, head, q, k: (k <= q) & (k > q - size)

    assert window_of(causal, None) is None
    assert window_of(within(5), 5) == 5
    with pytest.raises(UnhostedError, match="attend to later tokens"):
        window_of(lambda batch, head, q, k: k >= 0, None)
    with pytest.raises(UnhostedError, match="rules other than"):
        window_of(lambda batch, head, q, k: (k <= q) & (k // 5 == q // 5), 5)
    with pytest.raises(UnhostedError, match="rules other than"):
        window_of(within(5), 4)


def test_heads_whose_halves_turn_alike_have_a_rotation() -> None:
    attention = PassAttention([Mock(head_dim=4)], [4])
    angles = torch.tensor([[[0.1, 0.2], [0.3, 0.4]]])
    halves, pairs = torch.cat([angles, angles], -1), angles.repeat_interleave(2, -1)
    rotation = attention.rotation_of(halves.cos(), halves.sin())
    assert (rotation.cos.equal(angles[0].cos()), rotation.sin.equal(angles[0].sin())) == (True, True)
    assert attention.rotation_of(pairs.cos(), pairs.sin()) is None
    assert attention.rotation_of(angles.cos(), angles.sin()) is None
