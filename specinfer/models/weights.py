"""Loads models from files; memory never exceeds the weights by more than a few matrices.

file --weight_reader--> one stacked matrix --weight_memory--> a product      (the stacked matrix is freed)
"""

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from specinfer.errors import DamagedFileError, ModelError, ModelFileError, UnhostedError
from specinfer.kernels.choice import TORCH, Kernels
from specinfer.kernels.disk import DiskRate
from specinfer.kernels.machine import release_free_memory
from specinfer.models.altup import AltUpDecoder
from specinfer.models.config import ModelConfig
from specinfer.models.decoder import Decoder
from specinfer.models.decoder_shapes import decoder_shapes
from specinfer.models.draft_memory import DraftMemory
from specinfer.models.gguf import GGUFFile
from specinfer.models.hosted.folder import HostedFolder
from specinfer.models.hosted.model import HostedModel
from specinfer.models.language_model import LanguageModel
from specinfer.models.open_model import OpenModel, open_model
from specinfer.models.placement import Placement
from specinfer.models.prepared import (
    NewPreparedFile,
    PreparedFile,
    identity,
    prepare_once,
    prepared_path,
)
from specinfer.models.safetensors import SafetensorsFolder
from specinfer.models.streamed import StreamedWeights
from specinfer.models.weight_memory import PassingWeights, Shared, Weights
from specinfer.models.weight_reader import TensorFile, WeightReader, file_bytes
from specinfer.models.weight_sizes import estimate_bytes, table_bytes
from specinfer.progress import NoProgress, Progress
from specinfer.speculation_config import Quantization
from specinfer.transport.group import Group

_LOG = logging.getLogger(__name__)
_Part = TypeVar("_Part")


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
    keep: bool = True,
) -> LanguageModel:
    """Load a model, given as opened or as a folder or .gguf file, in `dtype` on `device`.

    With `logit_ids` its logits are those of these token ids alone, in order. With `quantization` matrices are
    int8 or int4 (the output layer int8); with `keep` they are kept in the folder `cache`, by default in the
    user's cache, for the next start. Activations stay in `dtype`. Unquantized matrices are read from there if
    they were prepared. `shared` holds parts that are elsewhere. With `part` it loads this rank's part
    (models/shard.py), which runs with the other ranks of `group`, or the whole model with sums of parts.
    Embeddings of a model in its file's blocks stay in the file.
    `progress` receives the bytes of weights, under `name`, by default the path's. Raises as `open_model`,
    before any weight is read.
    """
    file = open_model(model) if isinstance(model, Path) else model
    config = file.config
    loaded = load_parts(
        file,
        lambda weights: _built(file, part or config, weights),
        tensors=file.shapes if isinstance(file, HostedFolder) else decoder_shapes(part or config),
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
        keep=keep,
    )
    if part is not None:
        release_free_memory()  # memory of the whole matrices before they were cut
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
    with (
        show.showing(file_bytes(model, shapes), f"loading {name or model.path.name}"),
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
        built = native_model(part or model.config, weights)
        weights.check(show)
    release_free_memory()
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
    keep: bool = True,
    part_name: str = "",
) -> _Part:
    """Build a part of a model with `make` from a file's weights, the given `tensors`; else as `load_model`.

    `borrowed` is the path of another model whose tensors are used as well, so that prepared matrices depend
    on both. `part_name` is in the name of the prepared file, for a part beside a whole model. Before matrices
    are kept, the disk must have `size` bytes free; only those of a `whole` model are kept.
    """
    show = progress or NoProgress()

    def load(kept: PreparedFile | NewPreparedFile | None) -> _Part:
        with (
            show.showing(file_bytes(file, tensors), f"loading {name or file.path.name}"),
            WeightReader(file, dtype, show, quantization, kept, kernels.products.library) as reader,
        ):
            return make(Weights(reader, device, kernels, logit_ids, shared, group))

    kind = _kind(kernels, quantization)
    if kind is None or quantization == "gguf":
        return load(None)
    if isinstance(file, HostedFolder):  # its matrices are not stacked as in Decoder
        kind = f"{kind}-hosted-{file.code}"
    kind += part_name and f"-{part_name}"
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
    if quantization == "none" or not whole or not keep:  # the file of a part could not be reused
        return load(None)

    def pass_over(error: OSError) -> None:
        _LOG.warning("the prepared model is not kept for the next start: %s", error)

    with prepare_once(path, made_from, tensors, size, pass_over) as kept:
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

    size = estimate_bytes(model, dtype, kernels, quantization)
    size += table_bytes(model, dtype, "none") - table_bytes(model, dtype, quantization)
    with prepare_once(path, made_from, tensors, size, refuse) as kept:
        if isinstance(kept, PreparedFile):
            return kept
        matrices = [name for name, shape in tensors.items() if len(shape) > 1]
        with (
            show.showing(file_bytes(model, matrices), f"preparing {title}"),
            WeightReader(model, dtype, show, quantization, kept, kernels.products.library) as reader,
        ):
            native_model(model.config, PassingWeights(reader, torch.device("cpu"), kernels))
        if _identity(model, kind, dtype) != made_from:
            raise ModelFileError(f"{model.path} was changed while {title} was prepared; start again")
        kept.finish()
    release_free_memory()
    if (prepared := PreparedFile.open(path, made_from)) is None:
        raise ModelFileError(f"{path} was changed while {title} was prepared; start again")
    return prepared


def _built(file: OpenModel, config: ModelConfig, weights: Weights) -> LanguageModel:
    if isinstance(file, HostedFolder):
        try:
            return HostedModel(file, weights)
        except UnhostedError as error:
            raise ModelError(f"{file.path.name} {error}: transformers' code cannot run it here") from error
    return native_model(config, weights)


def native_model(config: ModelConfig, weights: Weights) -> Decoder:
    """The decoder of a config."""
    return (Decoder if config.altup is None else AltUpDecoder)(config, weights)


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
