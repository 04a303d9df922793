"""MTP: the layer of a model's files that predicts a further token, as a draft head.

Row t of a text reads token t + 1 and the target's state of token t, and guesses token t + 2:

    x = fc(enorm(embedding of the token), hnorm(state))     Qwen's order; MiMo's puts the state first
    x = layer(x), with keys and values of its own
    guess = output layer of the target (norm(x))

The state is the output of the target's last layer behind the target's last norm. A node of a tree reads the
output of its parent's row behind the head's own norm in its place. So the authors of Qwen3-Next, Qwen3.5 and
MiMo trained it, and vLLM, SGLang and llama.cpp run it.

Shapes: T rows, R rows with a guess, D hidden size, U tokens of the vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor

from specinfer.attention.backend import Attend
from specinfer.errors import ModelFileError
from specinfer.heads.config import MtpConfig, check_target
from specinfer.heads.eagle import RecursiveModel
from specinfer.hub.foreign_format import quantized_tensor
from specinfer.hub.gguf_header import GgufHeader
from specinfer.hub.model_files import ModelFiles, read_json
from specinfer.kernels.file_blocks import StoredRows
from specinfer.models.config import ModelConfig
from specinfer.models.decoder import Decoder
from specinfer.models.decoder_layer import DecoderLayer
from specinfer.models.decoder_shapes import decoder_shapes
from specinfer.models.families.registry import gguf_family, hf_family, other_senses, text_fields
from specinfer.models.gguf import GGUFFile, read_table
from specinfer.models.gguf_config import further_layers
from specinfer.models.layers import RowNorm
from specinfer.models.next_layer import declared_layers, next_config, nextn
from specinfer.models.open_model import check_tensors
from specinfer.models.quantized.checkpoint import quantization_of
from specinfer.models.safetensors import MTP, SafetensorsFolder, files_by_tensor, head_kind, tensor_names
from specinfer.models.weight_memory import Weights
from specinfer.models.weight_sizes import matrix_bytes
from specinfer.speculation_config import Quantization

_LAYER: Final = "model.layers.0"


def is_mtp(files: ModelFiles) -> bool:
    """True for files of an MTP layer without the layers of its target; raises as `tensor_names`."""
    if files.header is None:
        return head_kind(tensor_names(files.weights)) == MTP
    names = [tensor.name for part in (files.header, *files.header.parts) for tensor in part.tensors]
    return any(".nextn." in name for name in names) and not any(name.startswith("blk.0.") for name in names)


class MtpFile:
    """An open MTP layer of a target, beside its layers or in separate files; weights are not read.

    Raises ModelError or a subclass if it cannot be used. Reading raises ModelFileError for a value that is
    not finite.
    """

    part_name, borrowed = "mtp", None

    def __init__(self, files: ModelFiles, target: ModelConfig) -> None:
        self.name, self.path, header = files.name, files.path, files.header
        opened = _Folder(self.path, files.weights, target) if header is None else _GgufFile(header, target)
        check_tensors(opened, mtp_shapes(opened.config))
        assert opened.next_names is not None, "an open layer has names"
        self.parts = opened
        self.ids: Sequence[int] = range(target.vocab_size)
        self.config = MtpConfig(
            body=opened.config,
            taps=(target.num_layers,),
            target_hidden_size=target.hidden_size,
            draft_vocab_size=target.vocab_size,
            own_head=False,
            hidden_first=opened.next_names.hidden_first,
        )
        check_target(self.config, target, files.name)

    def weight_bytes(self, dtype: torch.dtype, quantization: Quantization = "none") -> int:
        """The bytes of its weights in memory; its tables are the target's."""
        floats = sum(math.prod(shape) for shape in self.parts.shapes.values() if len(shape) == 1)
        matrices = [name for name, shape in self.parts.shapes.items() if len(shape) > 1]
        of_matrices = (matrix_bytes(self.parts, name, dtype, quantization) for name in matrices)
        return floats * dtype.itemsize + sum(of_matrices)

    def fitting(self, quantization: Quantization) -> Quantization:
        """Its quantization by default: the target's, or floats if these files do not have its blocks."""
        blocks = quantization == "gguf" and not isinstance(self.parts, GGUFFile)
        return "none" if blocks else quantization


def mtp_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of an MTP layer, by name, with their shapes; `config` is that of next_layer.py."""
    size = config.hidden_size
    shapes = decoder_shapes(config)
    del shapes["model.embed_tokens.weight"]
    return shapes | {"fc.weight": (size, 2 * size), "enorm.weight": (size,), "hnorm.weight": (size,)}


class _Checked:
    """An MTP layer's file.

    Its rows are checked, so none are read past `read_rows`. Scales of blocks are checked wherever they are
    read.
    """

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        rows = cast("GGUFFile", super()).read_rows(name, start, stop)
        if not bool(torch.isfinite(rows).all()):
            path = cast("GGUFFile", self).path
            raise ModelFileError(
                f"{path}: tensor {name!r} of its MTP layer holds values that are not finite; get it again"
            )
        return rows

    def stored(self, name: str) -> StoredRows | None:
        floats = cast("GGUFFile", self).dtype(name) is not None
        return None if floats else cast("GGUFFile", super()).stored(name)


class _Folder(_Checked, SafetensorsFolder):
    """That of a folder. Whether the layer is complete is not checked."""

    def __init__(self, path: Path, weights: Sequence[Path], target: ModelConfig) -> None:
        """See SafetensorsFolder."""
        described = read_json(path / "config.json")
        files = files_by_tensor(path, weights, indexed=bool(other_senses(described)))
        quantized, family = quantization_of(described), hf_family(described)
        self.next_names = family.next_names
        further = {} if family.next_names is None else family.next_names.of(files)
        offset = family.fixed.get("norm_weight_offset", 0.0)
        declared = declared_layers(text_fields(described))
        config = next_config(path, target, further.values(), offset=offset, declared=declared)
        if not any(map(quantized_tensor, further)):
            quantized = None
        used = dict.fromkeys(files[name] for name in further)
        self._open(path, [*used], further, quantized, family.names, config)


class _GgufFile(_Checked, GGUFFile):
    """That of a GGUF file."""

    def __init__(self, header: GgufHeader, target: ModelConfig) -> None:
        """See GGUFFile."""
        tensors, family = read_table(header), gguf_family(header.metadata)
        behind = further_layers(family.architecture, header.metadata)
        self.next_names = nextn(behind) if behind and family.reads_next else None
        further = {} if self.next_names is None else self.next_names.of(tensors)
        head = self._open(header, family, {ours: tensors[theirs] for theirs, ours in further.items()})
        offset, declared = family.fixed.get("norm_weight_offset", 0.0), len(behind)
        config = next_config(self.path, target, head.shapes, offset=offset, declared=declared)
        self._name(family, head, head.shapes, config)


class MtpModel(RecursiveModel[MtpConfig]):
    """An MTP layer computed with the kernels."""

    def __init__(self, head: MtpConfig, weights: Weights, target: Decoder, ids: range) -> None:
        """See HeadModel."""
        super().__init__(head, weights, target, ids)
        body = head.body
        self._of_token = RowNorm.of("enorm", body, weights)
        self._of_hidden = RowNorm.of("hnorm", body, weights)
        self._fc = weights.linear("fc")
        self._layer = DecoderLayer(0, body, weights, _LAYER)
        self._norm = RowNorm.of("model.norm", body, weights)

    def run(
        self, token_ids_T: Tensor, feature_TD: Tensor, positions_T: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """See RecursiveModel."""
        halves = [self._of_token(self.embedded(token_ids_T, positions_T)), self._of_hidden(feature_TD)]
        x_TD = self._fc(torch.cat(halves[::-1] if self.head.hidden_first else halves, dim=-1))
        y_TD = self._layer(x_TD, None, self._ropes[0].at(positions_T), attend)
        read_TD = self._norm(x_TD, y_TD)
        return read_TD, read_TD

    def logits(self, h_RD: Tensor) -> Tensor:
        """See HeadModel."""
        return self._target.logits(h_RD)

    def first_logits(self, count: int) -> Callable[[Tensor], Tensor] | None:
        """See HeadModel."""
        return self._target.first_logits(count)
