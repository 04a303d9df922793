"""Loads models from files; memory never exceeds the weights by more than a few matrices.

file --weight_reader--> one stacked matrix --weight_memory--> a product      (the stacked matrix is freed)
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import torch

from specinfer.config import ModelImpl
from specinfer.errors import DamagedFileError, ModelError, ModelFileError, ModelNotFoundError, UnhostedError
from specinfer.hub.model_files import ModelFiles, local_model, read_json
from specinfer.kernels.choice import TORCH, Kernels, sharing
from specinfer.kernels.disk import DiskRate
from specinfer.kernels.file_blocks import blocks_bytes
from specinfer.kernels.layout import int4_bytes, int8_bytes
from specinfer.kernels.machine import give_back_memory
from specinfer.models.config import ModelConfig
from specinfer.models.decoder import Decoder, decoder_shapes
from specinfer.models.draft_memory import DraftMemory
from specinfer.models.experts import EXPERTS, PRECISE
from specinfer.models.families.registry import HF_FAMILIES
from specinfer.models.gguf import GGUFFile
from specinfer.models.hosted.folder import HostedFolder, hosted
from specinfer.models.hosted.model import HostedModel
from specinfer.models.language_model import LanguageModel
from specinfer.models.placement import ExpertSizes, Placement
from specinfer.models.prepared import (
    NewPreparedFile,
    PreparedFile,
    identity,
    made_once,
    prepared_path,
)
from specinfer.models.safetensors import SafetensorsFolder
from specinfer.models.streamed import StreamedWeights
from specinfer.models.weight_memory import PassingWeights, Shared, Weights
from specinfer.models.weight_reader import TensorFile, WeightReader, blocks_file
from specinfer.parallel.group import Group
from specinfer.progress import NoProgress, Progress
from specinfer.speculation_config import Quantization

_LOG = logging.getLogger(__name__)
_LAYER: Final = re.compile(r"\blayers\.(\d+)\.")
_TABLE: Final = "model.embed_tokens.weight"
_LOOKED_UP: Final = ("embed_tokens.weight", "embed_positions.weight")  # lookup tables, which stay floats
_Part = TypeVar("_Part")


# With tensors under the decoder's names, or for HostedFolder under those of transformers' modules.
OpenModel = SafetensorsFolder | GGUFFile | HostedFolder


def open_model(
    files: ModelFiles | Path,
    impl: ModelImpl = "native",
    *,
    max_context: int | None = None,
    trust_remote_code: bool = False,
) -> OpenModel:
    """Open a model: reads its config and checks the tensors' names and shapes; reads no weights.

    `impl` selects specinfer's own code, transformers' code, or the first of these that supports the model;
    transformers' code may be custom code of the folder if that is trusted. `max_context` is the maximum
    length of a text in tokens; None: the model's default.

    Raises ModelNotFoundError if a path does not exist, ModelFileError if a file is damaged, incomplete or has
    other shapes than its config, ModelError if the model is not supported.
    """
    if isinstance(files, Path):
        if not files.exists():
            raise ModelNotFoundError(f"{files} does not exist; give a model folder or a .gguf file")
        files = local_model(str(files), files)
    header = files.header
    if header is None and (impl == "transformers" or (impl == "auto" and not _is_native(files.path))):
        return hosted(files.path, files.weights, trust_remote_code=trust_remote_code)
    if impl == "transformers":
        raise ModelError(
            f"{files.name} is a GGUF file, which transformers' code cannot run here; give a folder with "
            "config.json and safetensors, or leave model_impl out"
        )
    opened: OpenModel = SafetensorsFolder(files.path, files.weights) if header is None else GGUFFile(header)
    if max_context is not None:
        opened.config = opened.config.for_texts_of(max_context)
    _check(opened)
    return opened


def _is_native(folder: Path) -> bool:
    return read_json(folder / "config.json").get("model_type") in HF_FAMILIES


def load_model(
    model: OpenModel | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    name: str | None = None,
    logit_ids: Sequence[int] | None = None,
    kernels: Kernels = TORCH,
    quantization: Quantization = "none",
    cache: Path | None = None,
    shared: Shared | None = None,
    part: ModelConfig | None = None,
    group: Group | None = None,
) -> LanguageModel:
    """Load a model, given as opened or as a folder or .gguf file, in `dtype` on `device`.

    With `logit_ids` its logits are those of these token ids alone, in order. With `quantization` matrices are
    int8 or int4 (the output layer int8), and kept in the folder `cache`, by default in the user's cache, for
    the next start; activations stay in `dtype`. Unquantized matrices are read from there if they were
    prepared. `shared` holds parts that are elsewhere. With `part` it loads this rank's part
    (parallel/share.py), which runs with the other ranks of `group`, or the whole model with sums of parts.
    `progress` receives the bytes of weights, under `name`, by default the path's. Raises as `open_model`,
    before any weight is read.
    """
    file = open_model(model) if isinstance(model, Path) else model
    config = file.config
    if part is not None and part.part.o is not None:
        kernels = sharing(kernels)
    loaded = load_parts(
        file,
        lambda weights: _built(file, part or config, weights),
        tensors=_tensors(file, part or config),
        dtype=dtype,
        device=device,
        progress=progress,
        name=name,
        logit_ids=logit_ids,
        kernels=kernels,
        quantization=quantization,
        cache=cache,
        size=estimate_bytes(file, dtype, kernels, quantization),
        whole=shared is None and (part is None or part.part.stage is None),
        shared=shared,
        group=group,
    )
    if part is not None:
        give_back_memory()  # memory of the whole matrices before they were cut
    return loaded


def load_streamed(
    model: OpenModel,
    prepared: PreparedFile,
    placement: Placement,
    disk: DiskRate,
    *,
    dtype: torch.dtype,
    kernels: Kernels,
    quantization: Quantization = "none",
    table_in_memory: bool = False,
    draft_memory: DraftMemory | None = None,
    progress: Progress | None = None,
    name: str | None = None,
    part: ModelConfig | None = None,
) -> LanguageModel:
    """Load a model with some layers streamed from its prepared file in every pass; otherwise as `load_model`.

    Some of the streamed layers may use the `draft_memory`.

    Readers start at once, and end when the model is freed. With `table_in_memory` the embeddings are whole,
    as heads need them; with `part` its sums have parts. Reads the whole file once: raises DamagedFileError if
    a checksum does not match.
    """
    show, shapes = progress or NoProgress(), decoder_shapes(model.config)
    elements = sum(math.prod(shape) for shape in shapes.values())
    with (
        show.showing(elements * dtype.itemsize, f"loading {name or model.path.name}"),
        WeightReader(model, dtype, show, quantization, prepared) as reader,
    ):
        weights = StreamedWeights(
            reader,
            kernels,
            prepared,
            placement,
            disk,
            table_in_memory=table_in_memory,
            draft_memory=draft_memory,
        )
        built = Decoder(part or model.config, weights)
        weights.check(show)
    give_back_memory()
    return built


def load_parts(
    file: TensorFile,
    make: Callable[[Weights], _Part],
    *,
    tensors: Collection[str],
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    name: str | None = None,
    logit_ids: Sequence[int] | None = None,
    kernels: Kernels = TORCH,
    quantization: Quantization = "none",
    cache: Path | None = None,
    borrowed: Path | None = None,
    size: int = 0,
    whole: bool = True,
    shared: Shared | None = None,
    group: Group | None = None,
) -> _Part:
    """Build a part of a model with `make` from a file's weights, the given `tensors`; else as `load_model`.

    `borrowed` is the path of another model whose tensors are used as well, so that prepared matrices depend
    on both. Before matrices are kept, the disk must have `size` bytes free; only those of a `whole` model are
    kept.
    """
    show = progress or NoProgress()

    def load(kept: PreparedFile | NewPreparedFile | None) -> _Part:
        elements = sum(math.prod(file.shapes[tensor]) for tensor in tensors)
        with (
            show.showing(elements * dtype.itemsize, f"loading {name or file.path.name}"),
            WeightReader(file, dtype, show, quantization, kept) as reader,
        ):
            return make(Weights(reader, device, kernels, logit_ids, shared, group))

    kind = _kind(kernels, quantization)
    if kind is None:
        return load(None)
    if isinstance(file, HostedFolder):  # its matrices are not stacked as in Decoder
        kind = f"{kind}-hosted-{file.code}"
    path = prepared_path(file.path, kind, dtype, cache)
    made_from = _identity(file, kind, dtype, borrowed)
    try:
        if (prepared := PreparedFile.open(path, made_from)) is not None:
            return load(prepared)
    except DamagedFileError as error:
        _LOG.warning("a damaged prepared model is made again: %s", error)
        try:
            path.unlink(missing_ok=True)
        except OSError:
            return load(None)
    if quantization == "none" or not whole:  # the file of a part could not be reused
        return load(None)
    with made_once(path, made_from, tensors, size, _not_kept) as kept:
        loaded = load(kept)
        if isinstance(kept, NewPreparedFile):
            kept.finish()
    return loaded


def prepare(
    model: OpenModel,
    *,
    dtype: torch.dtype,
    kernels: Kernels,
    quantization: Quantization = "none",
    cache: Path | None = None,
    progress: Progress | None = None,
    name: str | None = None,
) -> PreparedFile:
    """The prepared file of a model on a CPU, created if missing, one matrix at a time.

    Otherwise as `load_model`. Raises ModelError if `cache` has no space or is not writable.
    """
    kind = _kind(kernels, quantization)
    assert kind is not None, "unquantized matrices are prepared for native products alone"
    if isinstance(model, HostedFolder):
        raise ModelError(f"{model.path.name} runs through transformers, and is prepared when it is loaded")
    path, made_from = prepared_path(model.path, kind, dtype, cache), _identity(model, kind, dtype)
    if (prepared := PreparedFile.open(path, made_from)) is not None:
        return prepared
    show, tensors = progress or NoProgress(), decoder_shapes(model.config)
    title = name or model.path.name

    def refuse(error: OSError) -> None:
        raise ModelError(
            f"{title} cannot be prepared in {path.parent}: {error}; make room there, or name another folder "
            "with --offload-folder"
        ) from error

    with made_once(
        path, made_from, tensors, estimate_bytes(model, dtype, kernels, quantization), refuse
    ) as kept:
        if isinstance(kept, PreparedFile):
            return kept
        elements = sum(math.prod(shape) for shape in tensors.values() if len(shape) > 1)
        with (
            show.showing(elements * dtype.itemsize, f"preparing {title}"),
            WeightReader(model, dtype, show, quantization, kept) as reader,
        ):
            Decoder(model.config, PassingWeights(reader, torch.device("cpu"), kernels))
        if _identity(model, kind, dtype) != made_from:
            raise ModelFileError(f"{model.path} was changed while {title} was prepared; start again")
        kept.finish()
    give_back_memory()
    if (prepared := PreparedFile.open(path, made_from)) is None:
        raise ModelFileError(f"{path} was changed while {title} was prepared; start again")
    return prepared


def _built(file: OpenModel, config: ModelConfig, weights: Weights) -> LanguageModel:
    if isinstance(file, HostedFolder):
        try:
            return HostedModel(file, weights)
        except UnhostedError as error:
            raise ModelError(f"{file.path.name} {error}: transformers' code cannot run it here") from error
    return Decoder(config, weights)


def _kind(kernels: Kernels, quantization: Quantization) -> str | None:
    """The kind of matrices in a model's prepared file; None: no file is prepared for it."""
    if quantization == "none":
        return None if kernels.products.library is None else "floats"
    return quantization


def _identity(
    file: TensorFile, kind: str, dtype: torch.dtype, borrowed: Path | None = None
) -> dict[str, str]:
    """Return the identity of a prepared file's source; mixtures have another kind, with experts apart."""
    mixture = isinstance(file, SafetensorsFolder | GGUFFile) and file.config.experts is not None
    return identity(file.path, f"{kind}, experts apart" if mixture else kind, dtype, borrowed)


def _not_kept(error: OSError) -> None:
    _LOG.warning("the prepared model is not kept for the next start: %s", error)


def estimate_bytes(
    model: OpenModel | Path,
    dtype: torch.dtype,
    kernels: Kernels = TORCH,
    quantization: Quantization = "none",
) -> int:
    """The bytes of a model's weights in `dtype`, without loading them.

    Includes the second copy of tied embeddings for native or quantized products. Raises as `open_model`.
    """
    opened = open_model(model) if isinstance(model, Path) else model
    if isinstance(opened, HostedFolder):
        if quantization == "gguf":
            blocks_file(opened)  # raises ModelError
        return opened.weight_bytes(dtype, quantization)
    if quantization != "gguf":
        return weight_bytes(opened.config, dtype, kernels, quantization)
    size = 0
    for name, shape in opened.shapes.items():
        floats = len(shape) < 2 or name.endswith(_LOOKED_UP)
        size += _matrix_bytes(opened, name, dtype, "none" if floats else quantization)
    if opened.config.tie_embeddings:  # the output layer's blocks, in addition to the float table
        size += _matrix_bytes(opened, _TABLE, dtype, quantization)
    return size


def weight_bytes(
    config: ModelConfig, dtype: torch.dtype, kernels: Kernels, quantization: Quantization
) -> int:
    """The same for a model with this config, or a rank's part of one."""
    part, vocab = config.part, config.vocab_size
    output_layer = (vocab if part.vocab is None else len(part.vocab), config.embedding_size)
    begins, floats = config.stage.begins, quantization == "none"
    size = math.prod(output_layer) * dtype.itemsize if floats else int8_bytes(*output_layer)
    if not begins or (floats and config.tie_embeddings and kernels.library is None and part.vocab is None):
        size = 0  # on another stage, or PyTorch multiplies with the embeddings
    for name, shape in decoder_shapes(config).items():
        if name == "lm_head.weight":
            continue
        if name.endswith("embed_tokens.weight") and part.table is not None:
            size += len(part.table) * config.embedding_size * dtype.itemsize
        elif len(shape) < 2 or name.endswith(_LOOKED_UP):
            size += math.prod(shape) * dtype.itemsize
        else:
            size += _shape_bytes(name, shape, dtype, quantization)
    return size


def layer_bytes(model: OpenModel, dtype: torch.dtype, quantization: Quantization) -> list[int]:
    """Approximate bytes of each layer's matrices in a prepared file."""
    found = [0] * model.config.num_layers
    for name, shape in decoder_shapes(model.config).items():
        if len(shape) > 1 and (layer := _LAYER.search(name)) is not None:
            found[int(layer[1])] += _matrix_bytes(model, name, dtype, quantization)
    return found


def expert_sizes(model: OpenModel, dtype: torch.dtype, quantization: Quantization) -> ExpertSizes | None:
    """The experts of a model and their bytes, about; None: it has none."""
    experts = model.config.experts
    if experts is None or isinstance(model, HostedFolder):
        return None
    layers = model.config.num_layers - len(experts.dense_layers)
    each = -(-expert_bytes(model, dtype, quantization) // (layers * experts.count))
    return ExpertSizes(experts, layers, each)


def expert_bytes(model: OpenModel, dtype: torch.dtype, quantization: Quantization) -> int:
    """The bytes of all routed experts, which are included in `estimate_bytes`."""
    return sum(_matrix_bytes(model, name, dtype, quantization) for name in model.shapes if EXPERTS in name)


def _matrix_bytes(model: OpenModel, name: str, dtype: torch.dtype, quantization: Quantization) -> int:
    """The bytes of a single matrix; stacked with other blocks it may take more."""
    shape = model.shapes[name]
    if quantization == "gguf" and not name.endswith(PRECISE):
        channels, inner = math.prod(shape[:-1]), shape[-1]
        return blocks_bytes(channels, inner, blocks_file(model).block_form(name))
    return _shape_bytes(name, shape, dtype, quantization)


def _shape_bytes(name: str, shape: tuple[int, ...], dtype: torch.dtype, quantization: Quantization) -> int:
    """The bytes of a matrix after specinfer's quantization, if any."""
    if name.endswith(PRECISE):
        return math.prod(shape) * 4
    if quantization == "none":
        return math.prod(shape) * dtype.itemsize
    return (int4_bytes if quantization == "int4" else int8_bytes)(math.prod(shape[:-1]), shape[-1])


def _tensors(file: OpenModel, config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """The tensors required for a model of that file."""
    return file.shapes if isinstance(file, HostedFolder) else decoder_shapes(config)


def _check(file: OpenModel) -> None:
    """Raise ModelFileError unless the file holds exactly the tensors of its config, with their shapes."""
    wanted, found = decoder_shapes(file.config), file.shapes
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelFileError(f"{file.path} lacks {_some(missing)}; the model is incomplete, get it again")
    for name, shape in wanted.items():
        if tuple(found[name]) != shape:
            raise ModelFileError(
                f"{file.path}: tensor {name!r} has shape {list(found[name])}, the config asks for "
                f"{list(shape)}; config and weights belong to different models, get both again"
            )
    extra = [name for name in found if name not in wanted and not _is_zero_bias(file, name, wanted)]
    if extra:
        raise ModelFileError(
            f"{file.path} has unexpected {_some(extra)}; ignoring weights would change the text. "
            f"This is not a plain {file.config.family} model: merge adapters into it, or use another."
        )


def _is_zero_bias(file: OpenModel, name: str, wanted: Collection[str]) -> bool:
    """True for a bias of zeros, which GPTQ's tools write for matrices without a bias."""
    stem, _, end = name.rpartition(".")
    shape = file.shapes[name]
    if end != "bias" or f"{stem}.weight" not in wanted or len(shape) != 1:
        return False
    return not bool(file.read_rows(name, 0, shape[0]).any())


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"
