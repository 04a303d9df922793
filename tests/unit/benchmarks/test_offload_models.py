"""benchmarks/offload/models.py: dithered and inflated models of tiny ones, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from specinfer import LLM, SamplingParams
from specinfer.errors import UserError
from specinfer.models.open_model import open_model
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_models import write_tiny_llama

PROMPT = [5, 3, 8, 1]


@pytest.fixture(scope="module")
def models(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("models")


def quantized_gguf(path: Path, *, output: str | None = None) -> Path:
    """A tiny model with matrices in Q4_1; `output` adds an output layer, of the "same" matrix or another."""
    plain = gguf.GGUFReader(write_tiny_gguf(path.with_name("plain.gguf")))
    writer = gguf.GGUFWriter(path, "llama")
    for field in plain.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    tensors = {tensor.name: np.array(tensor.data) for tensor in plain.tensors}
    kinds = dict.fromkeys(tensors, gguf.GGMLQuantizationType.Q4_1)
    if output is not None:
        embeddings = tensors["token_embd.weight"]
        tensors["output.weight"] = embeddings if output == "same" else embeddings[::-1].copy()
        kinds["output.weight"] = gguf.GGMLQuantizationType.Q8_0
    for name, values in tensors.items():
        if values.ndim > 1 and values.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(values, kinds[name]), raw_dtype=kinds[name])
        elif values.ndim > 1:  # an inner size of 48 is not whole blocks
            part = np.ascontiguousarray(values[:, :32])
            writer.add_tensor(name, gguf.quants.quantize(part, kinds[name]), raw_dtype=kinds[name])
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_a_step_is_from_one_level_to_the_next(models: ModuleType, kind: str) -> None:
    """Levels of a group are whole multiples of its step, apart from where it begins."""
    quantization = gguf.GGMLQuantizationType[kind]
    size, block = gguf.GGML_QUANT_SIZES[quantization]
    random = np.random.default_rng(0)
    rows = random.integers(0, 256, (3, 2 * block), dtype=np.uint8)
    halves = rows.reshape(6, block)
    for place in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}.get(
        kind, (0,)
    ):
        halves[:, place : place + 2] = np.array([0.01], dtype=np.float16).view(np.uint8)
    values, steps = models.values_and_steps(rows, quantization)
    assert values.shape == steps.shape == (3, 2 * size)
    for i in range(0, 2 * size, 16):
        group, step = values[:, i : i + 16], steps[:, i : i + 16]
        assert np.ptp(step, axis=1).max() < 1e-6, "a group has one step"
        used = step[:, 0] > 0
        levels = (group - group[:, :1])[used] / step[used]
        assert np.abs(levels - levels.round()).max() < 1e-2
        assert np.gcd.reduce(levels.round().astype(int).ravel()) == 1, "and no step is a part of it"


def test_a_dithered_model_lies_within_half_a_step_of_the_file(models: ModuleType, tmp_path: Path) -> None:
    source = quantized_gguf(tmp_path / "tiny.gguf")
    file = tmp_path / "out" / "dithered.gguf"
    file.parent.mkdir()
    models.write_dithered_gguf(source, file, seed=0)
    before, after = (gguf.GGUFReader(path) for path in (source, file))
    assert [tensor.name for tensor in after.tensors] == [tensor.name for tensor in before.tensors]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        if len(old.shape) == 1:
            assert np.array_equal(old.data, new.data)
            continue
        values, steps = models.values_and_steps(np.array(old.data), old.tensor_type)
        moved = torch.from_numpy(np.array(new.data)).view(torch.bfloat16).float().numpy()
        parts = (moved - values) / steps
        rounding = np.abs(moved) * 2**-8 / steps  # of bfloat16
        assert (np.abs(parts) <= 0.5 + rounding).all()
        assert np.abs(parts).mean() == pytest.approx(0.25, abs=0.03), "evenly"
        assert abs(parts.mean()) < 0.03
    for name in before.fields.keys() - {"general.file_type"}:
        if not name.startswith("GGUF."):
            assert before.fields[name].contents() == after.fields[name].contents(), name
    again = tmp_path / "again.gguf"
    models.write_dithered_gguf(source, again, seed=0)
    assert again.read_bytes() == file.read_bytes()
    models.write_dithered_gguf(source, again, seed=1)
    assert again.read_bytes() != file.read_bytes()


@pytest.mark.parametrize(("output", "tied"), [("same", True), ("other", False)])
def test_two_quantizations_of_one_matrix_become_one(
    models: ModuleType, tmp_path: Path, output: str, tied: bool
) -> None:
    source = quantized_gguf(tmp_path / "tiny.gguf", output=output)
    models.write_dithered_gguf(source, tmp_path / "dithered.gguf", seed=0)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "dithered.gguf").tensors}
    assert ("output.weight" not in found) is tied
    finer = next(t for t in gguf.GGUFReader(source).tensors if t.name == "output.weight")
    _, steps = models.values_and_steps(np.array(finer.data), finer.tensor_type)
    new = torch.from_numpy(np.array(found["token_embd.weight"].data)).view(torch.bfloat16).float().numpy()
    distance = np.abs(new - gguf.quants.dequantize(finer.data, finer.tensor_type))
    near = distance <= 0.5 * steps + np.abs(new) * 2**-8
    assert bool(near.all()) is tied


def test_what_is_not_quantized_is_refused(models: ModuleType, tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "plain.gguf")
    with pytest.raises(
        UserError, match=r"token_embd.weight of plain.gguf is F32, which has no grid of steps"
    ):
        models.write_dithered_gguf(source, tmp_path / "dithered.gguf", seed=0)


def answers(folder: Path, **options: Any) -> str:
    """Tokens and log-probabilities of an answer, in full."""
    with LLM(folder, max_batch_size=1, kv_cache_memory=1 << 20, lookup=False, **options) as llm:
        [output] = llm.generate([PROMPT], SamplingParams(max_tokens=12, temperature=0, logprobs=3))
    return f"{output.token_ids} {output.logprobs}"


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}]
)
def test_an_inflated_model_says_the_same_to_the_bit(
    models: ModuleType, tmp_path: Path, own_cache: Path, options: dict[str, str]
) -> None:
    source = write_tiny_llama(tmp_path / "small", hidden_size=64, intermediate_size=96, tokenizer=True)
    same = models.inflated(source, tmp_path, 2)  # in bfloat16
    larger = models.inflated(same, tmp_path, 7)
    assert open_model(larger).config.num_layers == 7
    assert answers(larger, **options) == answers(same, **options)


def test_an_inflated_model_is_copies_with_zeros_of_both_signs(models: ModuleType, tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "small", num_layers=2)
    opened, larger = open_model(source), open_model(models.inflated(source, tmp_path, 5))
    for layer, (original, idle) in enumerate([(0, False), (0, True), (0, True), (1, False), (1, True)]):
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
            ours, theirs = f"model.layers.{layer}.{name}.weight", f"model.layers.{original}.{name}.weight"
            new = larger.read_rows(ours, 0, larger.shapes[ours][0])
            if idle and name != "self_attn.q_proj":
                assert bool((new == 0).all())
                assert 0.3 < float(torch.signbit(new).float().mean()) < 0.7
            else:
                assert torch.equal(new, opened.read_rows(theirs, 0, len(new)).bfloat16())
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".partial"]
    with pytest.raises(UserError, match="got 1 layers; allowed: 2 and more"):
        models.inflated(source, tmp_path, 1)


def test_no_room_is_said_before_anything_is_written(
    models: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny_llama(tmp_path / "small")
    monkeypatch.setattr(models.shutil, "disk_usage", lambda _: type("Disk", (), {"free": 1000}))
    with pytest.raises(UserError, match=r"needs 0\.0 GB and 1 GB to spare, 0\.0 GB are free; make room"):
        models.inflated(source, tmp_path, 5)
    assert not list((tmp_path / "inflated-5-small").iterdir())
