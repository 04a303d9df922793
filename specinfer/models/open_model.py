"""Opens models: reads configs, and checks names and shapes of tensors; reads no weights."""

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from specinfer.config import ModelImpl
from specinfer.errors import ConfigKeyError, ModelError, ModelFileError, ModelNotFoundError
from specinfer.hub.model_files import ModelFiles, local_model, read_json
from specinfer.models.decoder_shapes import decoder_shapes
from specinfer.models.families.registry import HF_FAMILIES, text_fields
from specinfer.models.gguf import GGUFFile
from specinfer.models.hosted.folder import HostedFolder, hosted
from specinfer.models.safetensors import SafetensorsFolder, lacking, some_tensors

_LOG = logging.getLogger(__name__)
# With tensors under the decoder's names, or for HostedFolder under those of transformers' modules.
_KEYS_AND_VALUES = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.")
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
    opened = _folder(files, impl, trust_remote_code) if header is None else GGUFFile(header)
    if isinstance(opened, HostedFolder):
        return opened
    if max_context is not None:
        opened.config = opened.config.for_texts_of(max_context)
    check_tensors(opened, decoder_shapes(opened.config))
    return opened


def _folder(files: ModelFiles, impl: ModelImpl, trust_remote_code: bool) -> OpenModel:
    """A native folder; with "auto", one that its family refuses and transformers' code computes is hosted."""
    try:
        return SafetensorsFolder(files.path, files.weights)
    except ModelFileError:
        raise
    except ModelError as error:
        if impl == "native":
            hint = "; model_impl auto may run it through transformers' code"
            raise ModelError(f"{error}{hint if isinstance(error, ConfigKeyError) else ''}") from error
        try:
            found = hosted(files.path, files.weights, trust_remote_code=trust_remote_code)
        except ModelFileError:
            raise
        except ModelError as other:
            more = "" if str(other) == str(error) else f"; through transformers: {other}"
            raise ModelError(f"{error}{more}") from error
        if isinstance(error, ConfigKeyError) and not found.reads(error.key):
            raise
        _LOG.warning("%s: %s; so transformers' code runs it", files.name, error)
        return found


def _is_native(folder: Path) -> bool:
    return text_fields(read_json(folder / "config.json")).get("model_type") in HF_FAMILIES


def check_tensors(file: OpenModel, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelFileError unless the file holds exactly these tensors, with these shapes."""
    found = file.shapes
    missing = [name for name in wanted if name not in found]
    if missing:
        raise lacking(file.path, missing)
    for name, shape in wanted.items():
        if tuple(found[name]) != shape:
            raise ModelFileError(
                f"{file.path}: tensor {name!r} has shape {list(found[name])}, the config asks for "
                f"{list(shape)}; config and weights belong to different models, get both again"
            )
    extra = [
        name
        for name in found
        if name not in wanted
        if not (_is_zero_bias(file, name, wanted) or _is_of_shared_layer(file, name))
    ]
    if extra:
        raise ModelFileError(
            f"{file.path} has unexpected {some_tensors(extra)}; ignoring weights would change the text. "
            f"This is not a plain {file.config.family} model: merge adapters into it, or use another."
        )


def _is_of_shared_layer(file: OpenModel, name: str) -> bool:
    """True for keys and values of a layer that uses another's, which published files have."""
    found = _KEYS_AND_VALUES.match(name)
    return found is not None and file.config.cache_of(int(found[1])) != int(found[1])


def _is_zero_bias(file: OpenModel, name: str, wanted: Collection[str]) -> bool:
    """True for a bias of zeros, which GPTQ's tools write for matrices without a bias."""
    stem, _, end = name.rpartition(".")
    shape = file.shapes[name]
    if end != "bias" or f"{stem}.weight" not in wanted or len(shape) != 1:
        return False
    return not bool(file.read_rows(name, 0, shape[0]).any())
