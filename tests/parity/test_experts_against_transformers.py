"""Mixtures of experts: gates are clamped, and experts are read however a file has them."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specinfer.models.fingerprint import fingerprint, is_of
from specinfer.models.open_model import open_model
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner
from tests.kernels import NAMES
from tests.loading import load
from tests.quantized_folders import pack_mxfp4

from .families import save_random
from .gguf_files import write_gguf
from .test_against_transformers import PROMPT, TOLERANCE, logits_of


def ours(model, run):
    """The logits of the prompt."""
    return ModelRunner(load(model, run), num_blocks=3, block_size=4).forward([Rows(PROMPT, 0, [0, 1, 2], 0)])


def gpt_oss(folder, *, gates=1.0):
    """Save a gpt-oss whose gate and up matrices are multiplied by a factor."""
    theirs = save_random("gpt-oss", folder, tied=False)
    with torch.no_grad():
        for layer in theirs.model.layers:
            layer.mlp.experts.gate_up_proj.mul_(gates)
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize("run", NAMES)
def test_gates_and_ups_of_gpt_oss_are_clamped(run, tmp_path):
    theirs = gpt_oss(tmp_path, gates=8.0)
    want = logits_of(theirs, PROMPT)
    torch.testing.assert_close(ours(open_model(tmp_path), run), want, atol=TOLERANCE, rtol=0)
    for layer in theirs.model.layers:
        layer.mlp.experts.limit = 1e9
    assert (logits_of(theirs, PROMPT) - want).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("run", NAMES)
def test_gpt_oss_as_it_is_published(run, tmp_path):
    """Its experts in MXFP4: a folder, and the GGUF file that llama.cpp's converter makes of it."""
    theirs = gpt_oss(tmp_path)
    packed = pack_mxfp4(tmp_path)
    with torch.no_grad():
        for name, (blocks, scales) in packed.items():
            floats = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            theirs.get_parameter(name).copy_(floats)
    want = logits_of(theirs, PROMPT)
    torch.testing.assert_close(ours(open_model(tmp_path), run), want, atol=TOLERANCE, rtol=0)
    file = tmp_path / "model.gguf"
    write_gguf(theirs, file, packed={name: mxfp4_blocks(*pair) for name, pair in packed.items()})
    torch.testing.assert_close(ours(open_model(file), run), want, atol=TOLERANCE, rtol=0)
    assert is_of(fingerprint(open_model(file)), open_model(tmp_path))


def mxfp4_blocks(blocks, scales):
    """The same in ggml's order: a byte has elements i and i + 16 of a group, where it had neighbours."""
    elements = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [experts, rows, groups, 32]
    octets = elements[..., :16] | elements[..., 16:] << 4
    return torch.cat((scales[..., None], octets), -1).flatten(-2)
