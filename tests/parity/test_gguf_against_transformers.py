"""Rope factors and quantized weights of a GGUF file give transformers' logits.

test_gguf_against_folders has the families, whose folders have transformers' logits.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from specinfer.models.fingerprint import fingerprint, is_of
from specinfer.models.open_model import open_model
from specinfer.models.weights import load_model
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner

from .families import save_random
from .gguf_files import gguf_name, write_gguf

PROMPT = [5, 17, 40, 3, 88, 61, 12, 12, 70, 29, 9, 54]


def logits_of(path, dtype=torch.float32):
    model = load_model(path, dtype=dtype, device=torch.device("cpu"))
    runner = ModelRunner(model, num_blocks=4, block_size=4)
    return runner.forward([Rows(PROMPT, 0, [0, 1, 2, 3], 0)])


def check(theirs, path, tolerance=1e-4):
    with torch.no_grad():
        want = theirs(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(path), want, atol=tolerance, rtol=0)


def test_rope_factors_are_honoured(tmp_path):
    """The converter writes Llama 3's rope scaling as a tensor of divisors, one per frequency."""
    theirs = save_random("llama-llama3-rope", tmp_path, tied=True)
    head_dim, theta = 8, theirs.config.rope_parameters["rope_theta"]
    plain = 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    factors = plain / theirs.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > 4
    assert factors.min() == pytest.approx(1)
    write_gguf(theirs, tmp_path / "model.gguf", rope_factors=factors.tolist())
    check(theirs, tmp_path / "model.gguf")


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_quantized_weights_are_the_dequantized_ones(kind, tmp_path):
    import transformers  # seconds, which only this test should wait

    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    written = write_gguf(theirs, tmp_path / "model.gguf", kind=kind)
    write_gguf(theirs, tmp_path / "floats.gguf")
    own, floats = (open_model(tmp_path / f"{name}.gguf") for name in ("model", "floats"))
    assert is_of(fingerprint(own), floats)
    assert is_of(fingerprint(floats), own)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.ndim != 2:
                continue
            values = gguf.quants.dequantize(written[gguf_name(name, "llama")], kind)
            if ".q_proj." in name or ".k_proj." in name:
                values = values.reshape(-1, 8, 2, 64).swapaxes(1, 2).reshape(values.shape)
            parameter.copy_(torch.from_numpy(values))
    check(theirs, tmp_path / "model.gguf")
