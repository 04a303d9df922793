"""Models of every family on several ranks, which are threads here: the logits of one process, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specinfer import SamplingParams
from specinfer.errors import CapacityError
from specinfer.kernels.layout import Int4Weight
from specinfer.kernels.product import Product
from specinfer.kernels.quantized import NativeProducts
from specinfer.models.language_model import LanguageModel
from specinfer.models.shard import Shard
from specinfer.models.weights import load_model
from specinfer.plan import StateCheckpoint, StateCounts, StateUse
from specinfer.runtime.batch import Rows
from specinfer.runtime.executor import Executor, Host
from specinfer.runtime.runner import ModelRunner, Move
from specinfer.speculation_config import Quantization
from tests.kernels import kernels
from tests.ranks import CPU, llm_of, ranks_of, whole_model
from tests.tiny_models import write_tiny_llama
from tests.unit.parallel.conftest import Saved

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.thorough]
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [9], [40, 41, 42, 40, 41, 42, 40, 41]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=10),
    SamplingParams(temperature=0.9, seed=5, max_tokens=10),
]
SHAPE: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 32, "intermediate_size": 160}
GROUPED = {
    **{"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32},
    **{"hidden_size": 96, "intermediate_size": 144, "vocab_size": 100},
}
FAMILIES: dict[str, dict[str, object]] = {
    "llama-biases": GROUPED,
    "mistral": GROUPED,
    "qwen2": {**GROUPED, "hidden_size": 192},
    "qwen3": GROUPED,
    "mixtral": {**GROUPED, "num_experts_per_tok": 2},
    "gpt-oss": {**GROUPED, "intermediate_size": 160},
    "qwen2-moe": {**GROUPED, "moe_intermediate_size": 160, "shared_expert_intermediate_size": 100},
    "gemma3": GROUPED,
    "opt": {"hidden_size": 96, "num_attention_heads": 3, "ffn_dim": 144},
    "gemma2": GROUPED,
    "falcon-7b": {"hidden_size": 96, "num_attention_heads": 3, "ffn_hidden_size": 144},
    "mpt": {"d_model": 96, "n_heads": 3},
    "starcoder": {"n_embd": 96, "n_head": 3, "n_inner": 144},
    "lfm2-biases": GROUPED,
    "qwen3.5": {**GROUPED, "linear_num_key_heads": 3, "linear_num_value_heads": 6},
    "nemotron-h": {**GROUPED, "mamba_num_heads": 6, "n_groups": 6},
}
_WIDE = {"hidden_size": 192, "num_attention_heads": 6, "vocab_size": 100}
# Caps, parallel blocks, ALiBi, learned positions, scales, stacks of q, k and v in every order.
THOROUGH: dict[str, dict[str, object]] = {
    "phi3": {**_WIDE, "num_key_value_heads": 3, "intermediate_size": 144},
    "glm4": GROUPED,
    "granite": {**_WIDE, "num_key_value_heads": 3, "intermediate_size": 144},
    "cohere": {**_WIDE, "num_key_value_heads": 3, "intermediate_size": 144},
    "exaone": GROUPED,
    "starcoder2": {**_WIDE, "num_key_value_heads": 3, "intermediate_size": 144},
    "falcon-40b": {**_WIDE, "num_kv_heads": 3, "ffn_hidden_size": 144},
    "falcon-rw": {**_WIDE, "num_attention_heads": 6, "ffn_hidden_size": 144},
    "mpt-heads": {"d_model": 192, "vocab_size": 100},
    "gpt2": {"n_embd": 192, "n_head": 6, "n_inner": 144, "vocab_size": 100},
    "gpt-neox": {**_WIDE, "intermediate_size": 144},
    "granite-hybrid": {
        **{**_WIDE, "num_key_value_heads": 3, "shared_intermediate_size": 144},
        **{"mamba_n_heads": 24, "mamba_n_groups": 6},
    },
    "bamba": {**GROUPED, "head_dim": 32, "mamba_n_heads": 12, "mamba_n_groups": 1},
    "gemma4": {**GROUPED, "global_head_dim": 64},
    "gemma4-large": {**GROUPED, "global_head_dim": 64, "num_global_key_value_heads": 3},
    "llama4": {**GROUPED, "intermediate_size": 96, "interleave_moe_layer_step": 2},
    "gemma4-experts": {**GROUPED, "global_head_dim": 64, "moe_intermediate_size": 96},
    "falcon-h1": {
        **{**GROUPED, "mamba_n_heads": 12, "mamba_n_groups": 6, "mamba_d_ssm": 192, "num_hidden_layers": 3}
    },
}
# A family decides which matrices are cut, and the kind how. Families with experts cut stacks of each kind;
# the others have one kind here, and each kind in test_stages.py.
EXPERTS = ("mixtral", "gpt-oss", "qwen2-moe")
DTYPES = (torch.float32, torch.bfloat16)
KINDS: tuple[Quantization, ...] = ("int8", "int4", "none")
EVERY = [
    *((family, DTYPES[i % 2], kind) for family in EXPERTS for i, kind in enumerate(KINDS)),
    *(
        (family, DTYPES[number % 2], KINDS[number % 3])
        for number, family in enumerate(family for family in FAMILIES | THOROUGH if family not in EXPERTS)
    ),
]


def said(model: LanguageModel, taps: Sequence[int] = (1,)) -> list[Tensor]:
    """Logits of a text and a tree, of nodes behind the cache, and of a path that was moved; and taps."""
    runner = ModelRunner(model, num_blocks=6, block_size=4, states=StateCounts(2, 1, 4))
    first_slot, other = StateUse(0), StateUse(1, None, (StateCheckpoint(2, 4),))
    tree = Rows((3, 1, 4, 1, 5, 9), 0, [4, 0], 2, (-1, 0, 0, 2), states=first_slot)
    beside = Rows((2, 6, 5, 3, 5), 0, [2, 3], 4, states=other)
    flight = runner.launch([tree, beside], taps=taps)
    first = [flight.row(row) for row in range(5)]
    runner.move([Move([4, 0], [4, 5], [3, 4], first_slot)])
    again = StateUse(1, StateCheckpoint(2, 4))
    after = runner.forward(
        [Rows((8, 7), 5, [4, 0], 0, states=first_slot), Rows((5, 7), 4, [2, 3], 1, states=again)]
    )
    return [*map(torch.from_numpy, first), flight.tapped(taps), after]


@pytest.mark.few(6)
@pytest.mark.parametrize(("family", "dtype", "kind"), EVERY)
def test_logits_are_those_of_one_process(
    family: str, dtype: torch.dtype, kind: Quantization, tmp_path: Path, saved: Saved
) -> None:
    path, chosen = saved(family, **(FAMILIES | THOROUGH)[family]), kernels("native")
    want = said(whole_model(path, chosen, tmp_path, dtype, kind))
    for size in (2, 3):
        with ranks_of(path, size, chosen, tmp_path, dtype=dtype, quantization=kind) as model:
            found = said(model)
            assert all(map(torch.equal, found, want)), size


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["int4", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_parts_on_four_ranks(dtype: torch.dtype, kind: Quantization, tmp_path: Path) -> None:
    wide = {**SHAPE, "intermediate_size": 480}
    path, chosen = write_tiny_llama(tmp_path / "model", **wide), kernels("native")
    want = said(whole_model(path, chosen, tmp_path, dtype, kind))
    with ranks_of(path, 4, chosen, tmp_path, dtype=dtype, quantization=kind) as model:
        assert all(map(torch.equal, said(model), want))
    if kind == "none" and dtype is torch.float32:  # the tree of parts is another sum
        usual = load_model(path, dtype=dtype, device=CPU, kernels=chosen)
        assert not all(map(torch.equal, said(usual), want))
        assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(said(usual), want, strict=True))


def test_int4_shares_know_the_whole_largest_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By which a matrix unit rounds weights to bfloat16; other CPUs do not ask."""
    path, make = write_tiny_llama(tmp_path / "model", **SHAPE), NativeProducts.laid_out
    largest: list[float] = []

    def noted(self: NativeProducts, *given: Any, **named: Any) -> Product:
        made = make(self, *given, **named)
        if isinstance(given[0], Int4Weight) and not named:  # with a bound it has the arrays that are filled
            largest.append(made.args.largest)
        return made

    monkeypatch.setattr(NativeProducts, "laid_out", noted)
    whole_model(path, kernels("native"), tmp_path, quantization="int4")
    want = sorted(largest)
    assert len(set(want)) == 8
    largest.clear()
    with ranks_of(path, 2, kernels("native"), tmp_path, quantization="int4"):
        assert sorted(largest) == sorted(2 * want)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model", tokenizer=True, **SHAPE)


def overflow_at(path: Path, layer: int) -> None:
    """Make token 63 overflow in the last row of a layer's MLP, and in no layer before.

    The row alone reads 32 elements of the hidden state, which are zero in all other tokens. Kernels rotate 32
    elements together.
    """
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, :32] = 0.0
    tensors["model.embed_tokens.weight"][63, 0] = 1.0
    for number in range(layer + 1):
        tensors[f"model.layers.{number}.self_attn.o_proj.weight"][:32] = 0.0
        if number < layer:
            tensors[f"model.layers.{number}.mlp.down_proj.weight"][:32] = 0.0
    tensors[f"model.layers.{layer}.post_attention_layernorm.weight"][:32] = 1e30
    for name in ("gate", "up"):
        weight = tensors[f"model.layers.{layer}.mlp.{name}_proj.weight"]
        weight[:, :32] = 0.0
        weight[-1, 0] = 1.0
    save_file(tensors, path / "model.safetensors")


def ends_of(target: LanguageModel, path: Path) -> list[tuple[object, ...]]:
    """Return the tokens, finish reasons and errors of requests, the first one with token 63."""
    params = SamplingParams(temperature=0, max_tokens=6)
    outputs = llm_of(target, path).generate([[5, 63], *PROMPTS], params)
    return [(tuple(out.token_ids), out.finish_reason, out.error) for out in outputs]


def test_an_overflow_in_the_columns_of_one_rank_ends_its_own_request_alone(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "model", tokenizer=True, tie_embeddings=False, **SHAPE)
    overflow_at(path, 0)
    for kind in KINDS:
        want = ends_of(whole_model(path, kernels("native"), tmp_path, quantization=kind), path)
        assert [end[1] for end in want] == ["error", *["length"] * len(PROMPTS)], kind
        with ranks_of(path, 2, kernels("native"), tmp_path, quantization=kind) as target:
            assert ends_of(target, path) == want, kind


def test_memory_is_for_the_caches_of_all_ranks(llama: Path, tmp_path: Path) -> None:
    wanted: dict[str, Any] = {"block_size": 16, "wanted_positions": 1 << 20, "needed_positions": 16}
    whole = whole_model(llama, kernels("native"), tmp_path)
    blocks = Executor.within_memory(whole, [], limit=1 << 20, **wanted).num_blocks
    parts = [Shard(rank, 2).of(whole.config) for rank in (0, 1)]
    with ranks_of(llama, 2, kernels("native"), tmp_path) as target:
        executor = Executor.within_memory(target, [], limit=1 << 20, hosts=[Host("", parts[1:])], **wanted)
        there = Host("10.0.0.2", parts[1:], free=1 << 19)  # its caches may have half of it
        shared = Executor.within_memory(target, [], limit=None, hosts=[Host("", ()), there], **wanted)
        with pytest.raises(CapacityError, match=r"kv_cache_memory is 1.00 MiB, but .* free on 10\.0\.0\.2"):
            Executor.within_memory(target, [], limit=1 << 20, hosts=[Host("", ()), there], **wanted)
    assert executor.num_blocks == blocks
    # K and V of 2 layers, 4 bytes per element, 16 positions.
    block = len(parts[1].part.keys) * 2 * 2 * 4 * 16
    assert shared.num_blocks == (1 << 18) // block
    assert there.free == (1 << 19) - shared.num_blocks * block
    del shared
    assert there.free == 1 << 19
