"""MTP layers as modules, for training; mtp.py has their definition and the engine's passes.

Shapes: B sequences, T rows, N = 1 tap, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from specinfer.heads.checkpoint import fill, read_tensor
from specinfer.heads.config import MtpConfig
from specinfer.heads.eagle import RecursiveHead
from specinfer.heads.layers import HeadLayer, HeadNorm
from specinfer.heads.mtp import MtpFile
from specinfer.heads.speculators import finite_tensors, write_folder
from specinfer.models.families.registry import hf_family
from specinfer.models.open_model import OpenModel

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
    fill(head, state | {"last_norm.weight": last_norm(target)}, target, file.ids)
    return head


def write_mtp(head: MtpHead, folder: Path) -> None:
    """Write config.json and model.safetensors of an MTP layer, bfloat16, with Qwen's names; makes the folder.

    Raises OSError, and ModelError if a weight is not finite.
    """
    described = {"model_type": str(head.body.family), "num_nextn_predict_layers": 1}
    plus = hf_family(described).fixed.get("norm_weight_offset", 0.0)  # that readers add to norms
    own = {name: tensor for name, tensor in head.state_dict().items() if name.split(".")[0] not in _BORROWED}
    stored = {name: tensor - plus if "norm" in name else tensor for name, tensor in own.items()}
    tensors = {}
    for name, tensor in finite_tensors(stored, torch.bfloat16).items():
        stem, dot, rest = name.partition(".")
        tensors[f"mtp.{_THEIRS.get(stem, stem)}{dot}{rest}"] = tensor
    write_folder(folder, described, tensors)
