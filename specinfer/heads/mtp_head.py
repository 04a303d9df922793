"""MTP layers as modules, for training; mtp.py has their definition and the engine's passes.

Shapes: B sequences, T rows, N = 1 tap, D hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from specinfer.errors import ModelError
from specinfer.files import write_text
from specinfer.heads.checkpoint import read_tensor, target_embedding, target_head
from specinfer.heads.config import MtpConfig
from specinfer.heads.eagle import RecursiveHead
from specinfer.heads.layers import HeadLayer, HeadNorm
from specinfer.heads.mtp import MtpFile
from specinfer.models.families.registry import hf_family
from specinfer.models.open_model import OpenModel
from specinfer.models.safetensors import write_safetensors

_THEIRS: Final = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
_BORROWED: Final = ("embed_tokens", "lm_head", "last_norm", "d2t", "t2d")


class MtpHead(RecursiveHead):
    """An MTP layer; `last_norm` is the target's last norm, and is not trained."""

    feeds_normed = True

    def __init__(self, config: MtpConfig, ids: Sequence[int] | None = None) -> None:
        """See HeadVocabulary."""
        super().__init__(config, ids)
        size, eps = config.hidden_size, config.body.norm_eps
        self.config, self.body = config, config.body
        self.last_norm, self.enorm, self.hnorm, self.norm = (HeadNorm(size, eps) for _ in range(4))
        self.last_norm.weight.requires_grad_(False)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([HeadLayer(config.body)])

    def fused(self, taps_BTND: Tensor) -> Tensor:
        """See RecursiveHead."""
        out: Tensor = self.last_norm(taps_BTND[..., 0, :])
        return out

    def entered(self, layer: HeadLayer, embedded: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """See RecursiveHead."""
        halves = [self.enorm(embedded), self.hnorm(x)]
        x = self.fc(torch.cat(halves[::-1] if self.config.hidden_first else halves, dim=-1))
        x = x.to(self.fc.weight.dtype)
        return x, layer.input_layernorm(x)


def last_norm(target: OpenModel) -> Tensor:
    """Return the weights of the target's last norm, float32 [D]."""
    return read_tensor(target, "model.norm.weight") + target.config.norm_weight_offset


def mtp_head(file: MtpFile, target: OpenModel, depth: int) -> MtpHead:
    """Return an open MTP layer as a float32 module that learns `depth` levels, over all tokens."""
    head, plus = MtpHead(replace(file.config, depth=depth)), file.config.body.norm_weight_offset
    state = {
        name.removeprefix("model."): read_tensor(file.parts, name) + (plus if "norm" in name else 0.0)
        for name in file.parts.shapes
    }
    state |= {
        "embed_tokens.weight": target_embedding(target),
        "lm_head.weight": target_head(target, file.ids),
        "last_norm.weight": last_norm(target),
    }
    head.load_state_dict(state)
    return head


def write_mtp(head: MtpHead, folder: Path) -> None:
    """Write config.json and model.safetensors of an MTP layer, bfloat16, with Qwen's names; makes the folder.

    Raises OSError, and ModelError if a weight is not finite.
    """
    described = {"model_type": str(head.body.family), "num_nextn_predict_layers": 1}
    plus = hf_family(described).fixed.get("norm_weight_offset", 0.0)  # that readers add to norms
    tensors = {}
    for name, tensor in head.state_dict().items():
        stem, dot, rest = name.partition(".")
        if stem in _BORROWED:
            continue
        there = f"mtp.{_THEIRS.get(stem, stem)}{dot}{rest}"
        stored = tensor.detach().cpu() - plus if "norm" in name else tensor.detach().cpu()
        tensors[there] = stored.to(torch.bfloat16).contiguous()
        if not bool(torch.isfinite(tensors[there]).all()):
            raise ModelError(f"the head's tensor {name!r} holds values that are not finite in bfloat16")
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    write_text(folder / "config.json", json.dumps(described, indent=2))
