"""The module of an MTP layer against its oracle, as it is written and read again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from specinfer.heads.mtp import MtpFile
from specinfer.heads.mtp_head import MtpHead, mtp_head, write_mtp
from specinfer.hub.model_files import local_model
from specinfer.models.config import Family
from specinfer.models.open_model import open_model
from specinfer.tune.head_draft import MtpKind
from specinfer.tune.initial_head import new_head
from tests.heads import SIZE, VOCAB
from tests.oracles.mtp import QWEN, MtpOracle

TEXT = [(7 * i + 3) % VOCAB for i in range(9)]
PATH = [5, 40, 17]


def test_the_module_is_what_a_loop_over_rows_makes(target: Path, tmp_path: Path) -> None:
    opened = open_model(target)
    head = new_head(MtpKind(depth=3, vocabulary=48).config(opened.config), opened, list(range(48)), 1)
    assert isinstance(head, MtpHead)
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
    assert isinstance(written, MtpHead)
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
