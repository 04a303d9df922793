"""Open a head's folder, check it against its target, and load it.

A matrix may be int8 with a tensor NAME_scale that holds a factor for each row.

The folder is untrusted input: sizes, names, shapes, ids and values are checked before any computation, and an
unusable head is refused with a one-line error.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from specinfer.errors import ModelError, ModelFileError
from specinfer.heads.assistant import AssistantModel
from specinfer.heads.assistant_layout import (
    assistant_config,
    assistant_entries,
    assistant_shapes,
    is_assistant,
    read_order,
)
from specinfer.heads.block import BlockHead, BlockModel
from specinfer.heads.config import (
    AnyHeadConfig,
    AssistantConfig,
    BlockConfig,
    EagleConfig,
    HeadConfig,
    MtpConfig,
    check_target,
)
from specinfer.heads.dflash2 import dflash2_shapes
from specinfer.heads.eagle import EagleHead, EagleModel
from specinfer.heads.layouts import Shapes, head_config, is_head_config, tensor_name
from specinfer.heads.mtp import MtpFile, MtpModel, is_mtp
from specinfer.heads.speculators import FINGERPRINT, SCALE
from specinfer.heads.vocabulary import Entries, HeadVocabulary, own_tensors, read_vocabulary
from specinfer.hub.model_files import ModelFiles, local_model, read_json, weight_files
from specinfer.kernels.choice import TORCH, Kernels
from specinfer.kernels.layout import int4_bytes, int8_bytes
from specinfer.models.config import ModelConfig
from specinfer.models.decoder import Decoder
from specinfer.models.fingerprint import is_of
from specinfer.models.hf_config import check_unquantized
from specinfer.models.open_model import OpenModel
from specinfer.models.quantized.pieces import TensorEntry
from specinfer.models.safetensors import DTYPES, head_kind, read_entries, tensor_names
from specinfer.models.weight_reader import TensorFile
from specinfer.models.weights import load_parts
from specinfer.progress import Progress
from specinfer.speculation_config import Quantization

AnyHeadModel = EagleModel | BlockModel | AssistantModel | MtpModel
_MODELS: Final[Mapping[type, Callable[..., AnyHeadModel]]] = {
    EagleConfig: EagleModel,
    BlockConfig: BlockModel,
    AssistantConfig: AssistantModel,
    MtpConfig: MtpModel,
}
_OUTPUT: Final = "lm_head.weight"
_TABLE: Final = "embed_tokens.weight"
_FORM: Final = re.compile(r"[0-9a-f]{64}|2:[0-9a-f]{32}(:\w{1,16}:[0-9a-f]{32})?")  # of fingerprints
_LOOKED_UP: Final = ("embed_tokens.weight", "markov_w1.weight", "_codebook")  # tables, never quantized
_ROWS: Final = 1 << 8  # rows of a table that are read at a time


def is_head(files: ModelFiles | Path) -> bool:
    """Return whether files hold a head, by config.json or else by the tensors; a path is that of a folder.

    Raises ModelFileError if config.json is invalid or a folder has no tensors.
    """
    if isinstance(files, ModelFiles):
        if is_mtp(files):
            return True
        files = files.path
    file = files / "config.json"
    if not file.is_file():
        return False
    described = read_json(file)
    known = is_head_config(described) or is_assistant(described)
    return known or head_kind(tensor_names(weight_files(files))) is not None


class HeadFolder:
    """An open head whose tensors match its config and whose config fits the target; weights are not read.

    The tensors have the names of the head kind's module.
    """

    part_name = ""  # in the names of prepared files, for a part beside a whole model

    def __init__(self, files: ModelFiles | Path, target: ModelConfig, model: OpenModel | None = None) -> None:
        """Open a head of this target; to load it, `model` is the target's own.

        Raises ModelError or a subclass if the head cannot be used.
        """
        self.target = model
        if isinstance(files, Path):
            files = local_model(str(files), files)
        self.name, self.path = files.name, files.path
        described = read_json(files.path / "config.json")
        check_unquantized(described)
        self.verifier = _verifier(described)  # the target's name, for messages
        # The target's fingerprint, or None if not given.
        self.fingerprint = _fingerprint(files.path, described)
        entries: Entries = _renamed(files.path, read_entries(files.weights, DTYPES))
        shapes = {name: entry.shape for name, entry in entries.items()}
        config: AnyHeadConfig
        if is_assistant(described):
            config = assistant_config(described, target)
        else:
            config = head_config(described, target.num_layers, shapes)
        self.config = config
        check_target(config, target, files.name)
        if isinstance(config, AssistantConfig):
            self.ids = read_order(files.path, config, entries)
            entries = assistant_entries(config, entries)
        else:
            self.ids = read_vocabulary(files.path, config, entries)
        self._entries = _checked(files.path, entries, head_shapes(config))
        self._scales = {
            name: entries[name + SCALE] for name, entry in self._entries.items() if entry.dtype == torch.int8
        }

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors that the head computes with, including an output layer of the target's."""
        config = self.config
        borrowed = {} if config.own_head else {_OUTPUT: (config.draft_vocab_size, config.hidden_size)}
        return {name: entry.shape for name, entry in self._entries.items()} | borrowed

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows start..stop of a tensor to the CPU, in the file's dtype; int8 becomes float32.

        An output layer that the head lacks is read from the target's. Raises ModelFileError if a value is not
        finite.
        """
        if name == _OUTPUT and not self.config.own_head:
            assert self.target is not None, "the head is opened to be loaded"
            return target_head(self.target, self.ids[start:stop])
        rows = self._entries[name].read_rows(start, stop)
        if name in self._scales:
            rows = rows.float() * self._scales[name].read_rows(start, stop).float()[:, None]
        if not bool(torch.isfinite(rows).all()):
            raise ModelFileError(
                f"{self.path}: tensor {name!r} holds values that are not finite; download the head again"
            )
        return rows

    @property
    def parts(self) -> TensorFile:
        """The tensors that it computes with."""
        return self

    @property
    def borrowed(self) -> Path | None:
        """The target's path, if the head has some of the target's tensors."""
        return None if self.config.own_head or self.target is None else self.target.path

    def weight_bytes(self, dtype: torch.dtype, quantization: Quantization = "none") -> int:
        """The bytes of its weights in memory; the output layer is never int4."""
        size = 0
        for name, shape in self.shapes.items():
            if quantization == "none" or len(shape) != 2 or name.endswith(_LOOKED_UP):
                size += math.prod(shape) * dtype.itemsize
            else:
                narrow = quantization == "int4" and not name.startswith("lm_head")
                size += (int4_bytes if narrow else int8_bytes)(*shape)
        return size

    def fitting(self, target: Quantization) -> Quantization:
        """Its quantization by default, beside that of its target."""
        return "none"

    def module(self, target: OpenModel) -> EagleHead | BlockHead:
        """Return the head as a float32 module; the target supplies tables that the head does not have.

        Raises ModelError for an assistant, DFlash 2 and windows, which modules do not compute.
        """
        config = self.config
        if isinstance(config, AssistantConfig) or (isinstance(config, BlockConfig) and config.has_more):
            raise ModelError(f"{self.name} is of a kind that is not trained here; name another head")
        module = _module(config, self.ids)
        fill(module, {name: read_tensor(self, name) for name in self._entries}, target, self.ids)
        return module


def open_head(files: ModelFiles | Path, target: OpenModel) -> HeadFolder:
    """Open the head in a folder for this target, without reading weights.

    Raises ModelError or a subclass if the head cannot be used or was trained for other weights.
    """
    head = HeadFolder(files, target.config, target)
    if head.fingerprint is not None and not is_of(head.fingerprint, target):
        raise ModelError(
            f"the head {head.name} was trained for {head.verifier}, which has other weights than "
            f"{target.path.name}; use that model, or a head that was trained for this one"
        )
    return head


OpenHead = HeadFolder | MtpFile  # with the same properties and methods for its loading


def _verifier(described: Mapping[str, object]) -> str:
    match described.get("speculators_config"):
        case {"verifier": {"name_or_path": str(name)}}:
            return name[:256]
        case _:
            return "another model"


def _fingerprint(path: Path, described: Mapping[str, object]) -> str | None:
    found = described.get(FINGERPRINT)
    if found is not None and not (isinstance(found, str) and _FORM.fullmatch(found)):
        raise ModelFileError(
            f"{path} has {FINGERPRINT} {str(found)[:60]!r}; expected 64 hexadecimal digits, 2: and digits, "
            "or none"
        )
    return found


def read_tensor(file: TensorFile, name: str) -> Tensor:
    """Return a whole tensor of a model, in float32."""
    return file.read_rows(name, 0, file.shapes[name][0]).float()


def target_embedding(target: OpenModel) -> Tensor:
    """Return the target's embeddings, float32 [V, D]."""
    return read_tensor(target, "model.embed_tokens.weight")


def target_head(target: OpenModel, ids: Sequence[int]) -> Tensor:
    """Return the rows of the target's output layer for `ids`, which ascend, as float32 [U, D]."""
    name = _OUTPUT if _OUTPUT in target.shapes else "model.embed_tokens.weight"
    parts: list[Tensor] = []
    for start in range(0, len(ids), _ROWS):
        wanted = torch.tensor(ids[start : start + _ROWS])
        first = int(wanted[0])
        parts.append(target.read_rows(name, first, int(wanted[-1]) + 1)[wanted - first].float())
    return torch.cat(parts)


def fill(module: HeadVocabulary, own: dict[str, Tensor], target: OpenModel, ids: Sequence[int]) -> None:
    """Load a head's `own` tensors into its module, and those tables of the target that it lacks."""
    if _TABLE not in own:
        own[_TABLE] = target_embedding(target)
    if _OUTPUT not in own:
        own[_OUTPUT] = target_head(target, ids)
    module.load_state_dict(own, strict=False)


def _module(config: HeadConfig, ids: Sequence[int]) -> EagleHead | BlockHead:
    return EagleHead(config, ids) if isinstance(config, EagleConfig) else BlockHead(config, ids)


def head_shapes(config: AnyHeadConfig) -> Shapes:
    """Return the shapes of a head's own tensors; tables of the target are left out.

    Raises ModelError if a size is too large for a tensor.
    """
    if isinstance(config, AssistantConfig):
        return assistant_shapes(config)
    try:
        with torch.device("meta"):  # a module without memory
            module = _module(config, range(config.draft_vocab_size))
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ModelError(f"a head's config asks for tensors that are too large: {error}") from error
    more = dflash2_shapes(config) if isinstance(config, BlockConfig) else {}
    return {name: tuple(tensor.shape) for name, tensor in own_tensors(module).items()} | more


def _renamed(path: Path, entries: Entries) -> dict[str, TensorEntry]:
    renamed = dict[str, TensorEntry]()
    for name, entry in entries.items():
        here = tensor_name(name)
        if here is None:
            continue
        if here in renamed:
            raise ModelFileError(
                f"{path} has tensor {here!r} twice, also as {name!r}; download the head again"
            )
        renamed[here] = entry
    return renamed


def _checked(path: Path, entries: Entries, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, TensorEntry]:
    """Return the tensors named in `wanted`. Raises ModelFileError unless exactly these have these shapes."""
    missing = [name for name in wanted if name not in entries]
    if missing:
        raise ModelFileError(f"{path} lacks tensor {missing[0]!r}: the head is incomplete; download it again")
    for name, shape in wanted.items():
        entry = entries[name]
        scaled = (
            entry.dtype == torch.int8 and len(shape) == 2 and _scales_rows(entries.get(name + SCALE), entry)
        )
        if entry.shape != shape or not (entry.dtype.is_floating_point or scaled):
            raise ModelFileError(
                f"{path}: tensor {name!r} is {entry.dtype} of {list(entry.shape)}, but the config "
                f"requires numbers of {list(shape)}: config and weights belong to different heads"
            )
    scales = {name + SCALE for name in wanted if entries[name].dtype == torch.int8}
    extra = [name for name in entries if name not in wanted and name not in {"d2t", "t2d", *scales}]
    if extra:
        raise ModelFileError(
            f"{path} has an unexpected tensor {extra[0]!r}; ignoring it would change the guesses"
        )
    return {name: entries[name] for name in wanted}


def _scales_rows(scale: TensorEntry | None, matrix: TensorEntry) -> bool:
    """Return whether a tensor holds one factor for each row of a matrix."""
    return scale is not None and scale.dtype.is_floating_point and scale.shape == matrix.shape[:1]


def load_head(
    head: OpenHead,
    target: Decoder,
    *,
    progress: Progress | None = None,
    name: str | None = None,
    kernels: Kernels = TORCH,
    quantization: Quantization = "none",
    keep: bool = True,
) -> AnyHeadModel:
    """Load the head for a loaded target, in the target's dtype and on its device.

    The other arguments are those of models.weights.load_model. Raises ModelFileError if a weight is not
    finite.
    """
    return load_parts(
        head.parts,
        lambda weights: _MODELS[type(head.config)](head.config, weights, target, head.ids),
        tensors=head.parts.shapes,
        dtype=target.dtype,
        device=target.device,
        progress=progress,
        name=name,
        kernels=kernels,
        quantization=quantization,
        keep=keep,
        borrowed=head.borrowed,
        part_name=head.part_name,
    )
