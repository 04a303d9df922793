"""HostedFolder: a model that runs through transformers' code, opened and tried without reading weights."""

import copy
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from specinfer.errors import ModelError, ModelFileError, UnhostedError
from specinfer.hub.foreign_format import quantized_tensor
from specinfer.hub.model_files import read_json
from specinfer.kernels.file_blocks import StoredRows
from specinfer.kernels.layout import int4_bytes, int8_bytes
from specinfer.models.config import Family, ModelConfig
from specinfer.models.families.registry import running_relative, sort_of
from specinfer.models.fields import all_ids
from specinfer.models.hosted.attention import transformers
from specinfer.models.hosted.checkpoint import ParameterFiles
from specinfer.models.hosted.modules import ProductLinear
from specinfer.models.hosted.skeleton import OUTPUT, Skeleton, is_experts
from specinfer.models.quantized.checkpoint import STORED, dequantized, quantization_of
from specinfer.models.quantized.pieces import StoredTensor
from specinfer.models.safetensors import FLOATS, lacking, read_entries, some_tensors
from specinfer.speculation_config import Quantization

_CONTEXTS: Final = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx"),
)
# Tables and masks in files of older versions.
_UNUSED: Final = re.compile(
    r"(?:\.rotary_emb\.(?:inv_freq|cos_cached|sin_cached)|attn\.(?:masked_)?bias|attention\.(?:masked_)?bias"
    r"|embeddings\.(?:position_ids|token_type_ids))$"
)
_KINDS: Final = {**FLOATS, "I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool, "U8": torch.uint8}
_ALL: Final = {**_KINDS, **STORED}
_LIMITED_ROPES: Final = ("dynamic", "longrope")  # their angles depend on the longest row of a pass


@dataclass(frozen=True, slots=True)
class HostedTensor:
    """A tensor as requested by products and modules."""

    parameter: str
    shape: tuple[int, ...]
    expert: int | None = None  # its slice of the parameter
    transposed: bool = False  # files have the transposed matrix
    is_product: bool = False  # a product multiplies with it


class HostedFolder:
    """An open folder: the config, and the tensors of the model's modules; reads no weights.

    Raises ModelError if transformers is missing, UnhostedError if its code cannot run the model here,
    ModelFileError if tensors are missing, unexpected or of other shapes.
    """

    def __init__(self, path: Path, weights: Sequence[Path], *, trust_remote_code: bool = False) -> None:
        """`weights` are the folder's safetensors files; custom code runs only if trusted."""
        self.path = path
        fields = read_json(path / "config.json")
        quantized = quantization_of(fields)
        self.made = self._maker(fields, trust_remote_code)  # makes its skeleton with weights of a dtype
        self.skeleton = skeleton = self.made(torch.float32)
        model = skeleton.model
        stored = read_entries(weights, _KINDS if quantized is None else _ALL)
        entries: Mapping[str, StoredTensor] = stored
        if quantized is not None:
            entries = dequantized(path, quantized, stored)
        for name in entries:
            if quantized_tensor(name) and name not in model.state_dict():
                raise ModelFileError(
                    f"{path} is quantized (tensor {name!r}), which config.json does not declare"
                )
        self._checkpoint = ParameterFiles(path, entries, model)
        self.tied = skeleton.head_is_tied and f"{skeleton.head_path}.weight" not in self._checkpoint.shapes
        self._tensors = dict(_tensors(skeleton, self.tied))
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._check()
        generation = path / "generation_config.json"
        texts = (fields, read_json(generation) if generation.is_file() else {})
        self.config = self._config(texts)

    @property
    def architecture(self) -> str:
        """The name of transformers' class."""
        return type(self.skeleton.model).__name__

    @property
    def summary(self) -> str:
        """The code that runs the model, in one line."""
        return f"{self.architecture} runs through transformers {transformers().__version__}"

    @property
    def code(self) -> str:
        """A digest of the code that runs its matrices, which determines what tensors in files mean."""
        module = type(self.skeleton.model).__module__
        digest = hashlib.sha256(f"{transformers().__version__} {module} {self.architecture}".encode())
        for file in sorted(self.path.glob("*.py")):
            digest.update(file.read_bytes())
        return digest.hexdigest()[:12]

    def reads(self, key: str) -> bool:
        """True if the class of its config has this key; other keys are ignored by its code."""
        try:
            return hasattr(type(self.skeleton.model.config)(), key)
        except Exception:  # a class with required arguments, for example
            return False

    def has(self, name: str) -> bool:
        """True if the files have that tensor."""
        tensor = self._tensors.get(name)
        return tensor is not None and self._source(tensor.parameter) in self._checkpoint.shapes

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a tensor in files; None if it is quantized."""
        return self._checkpoint.dtype(self._source(self._tensors[name].parameter))

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a tensor, on the CPU, in the files' dtype."""
        tensor = self._tensors[name]
        parameter = self._source(tensor.parameter)
        if tensor.expert is None and not tensor.transposed:
            return self._checkpoint.read_rows(parameter, start, stop)
        matrix = self._checkpoint.matrix(parameter, tensor.expert)
        return (matrix.T if tensor.transposed else matrix)[start:stop].contiguous()

    def stored(self, name: str) -> StoredRows | None:
        """The place of a tensor in its file; None if its elements are not those of rows of the file."""
        tensor = self._tensors[name]
        if tensor.expert is not None or tensor.transposed:
            return None
        return self._checkpoint.stored(self._source(tensor.parameter))

    def weight_bytes(self, dtype: torch.dtype, quantization: Quantization) -> int:
        """The bytes of its weights in memory, including a second copy of tied embeddings."""
        size = 0
        for name, tensor in self._tensors.items():
            if quantization == "none" or not tensor.is_product:
                size += math.prod(tensor.shape) * dtype.itemsize
            else:
                int4 = quantization == "int4" and not name.startswith(f"{OUTPUT}.")
                size += (int4_bytes if int4 else int8_bytes)(*tensor.shape)
        if self.tied:
            output = self.skeleton.head.out_features, self.skeleton.head.in_features
            size += int8_bytes(*output) if quantization != "none" else math.prod(output) * dtype.itemsize
        return size

    def _source(self, parameter: str) -> str:
        """The parameter in files with the values of this one."""
        while parameter not in self._checkpoint.shapes and parameter in self.skeleton.ties:
            parameter = self.skeleton.ties[parameter]
        return parameter

    def _maker(self, fields: Mapping[str, object], trust: bool) -> Callable[[torch.dtype], Skeleton]:
        """A function that makes skeletons of the folder's config; raises UnhostedError for unknown models."""
        library = transformers()
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        kind, custom = fields.get("model_type"), fields.get("auto_map")
        own = custom if trust and isinstance(custom, dict) else {}
        for named in own.values():
            if "--" in str(named):  # transformers would download and run it
                raise UnhostedError(
                    f"refers to code in another repository, {named}; only code in the folder is trusted: "
                    "put it there"
                )
        if not own and not (isinstance(kind, str) and kind in library.CONFIG_MAPPING):
            hint = "; it has custom code, which needs trust_remote_code" if custom else ""
            raise UnhostedError(
                f"is of model_type {kind!r}, which transformers {library.__version__} lacks{hint}"
            )
        try:
            made_config = library.AutoConfig.from_pretrained(
                str(self.path), trust_remote_code=bool(own), local_files_only=True
            )
        except Exception as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UnhostedError(f"has a config that its class rejects ({line})") from error
        if "AutoModelForCausalLM" in own:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            model_class = get_class_from_dynamic_module(
                own["AutoModelForCausalLM"], str(self.path), local_files_only=True
            )
        elif type(made_config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(made_config)]
        else:
            raise UnhostedError(
                f"is of model_type {kind!r}, which has no causal language model in transformers"
            )
        return lambda dtype: Skeleton.of(copy.deepcopy(made_config), model_class, dtype)

    def _check(self) -> None:
        """Raise ModelFileError unless files have exactly the modules' tensors, with their shapes."""
        model, found = self.skeleton.model, self._checkpoint
        wanted = {name: tuple(one.shape) for name, one in model.state_dict().items()}
        missing = [
            name
            for name in wanted
            if self._source(name) not in found.shapes
            and not _matches(name, model._keys_to_ignore_on_load_missing)
            and name not in self.skeleton.ties
        ]
        if missing:
            raise lacking(self.path, missing)
        for name, shape in found.shapes.items():
            if shape != wanted.get(name, shape):
                raise ModelFileError(
                    f"{self.path}: {name!r} has shape {list(shape)}, its config requires "
                    f"{list(wanted[name])}; config and weights belong to different models, get both again"
                )
        unused = [
            name
            for name in found.unused
            if not _UNUSED.search(name) and not _matches(name, model._keys_to_ignore_on_load_unexpected)
        ]
        if unused:
            raise ModelFileError(
                f"{self.path} has unexpected {some_tensors(unused)}; ignoring weights would change the text"
            )

    def _config(self, fields: Sequence[Mapping[str, object]]) -> ModelConfig:
        """The config for the engine; each call of attention is a layer of the cache."""
        skeleton = self.skeleton
        text = skeleton.model.config.get_text_config()
        call = skeleton.calls[0]
        inner = getattr(text, "intermediate_size", None)
        nested = fields[0].get("text_config")
        texts = (*([nested] if isinstance(nested, dict) else []), *fields)
        return ModelConfig(
            family=Family.TRANSFORMERS,
            vocab_size=skeleton.head.out_features,
            hidden_size=skeleton.hidden_size,
            intermediate_size=inner if isinstance(inner, int) and inner > 0 else skeleton.hidden_size,
            num_layers=len(skeleton.calls),
            num_heads=max(one.num_heads for one in skeleton.calls),
            num_kv_heads=call.num_kv_heads,
            head_dim=max(max(one.key_size, one.value_size) for one in skeleton.calls),
            norm_eps=0.0,
            rope=None,
            layer_windows=(None,) * len(skeleton.calls),
            tie_embeddings=self.tied,
            attention_scale=call.scale,
            max_context=_context(text),
            eos_ids=all_ids(texts, "eos_token_id"),
        )


def _tensors(skeleton: Skeleton, tied: bool) -> Any:
    """The tensors of the modules, by the names under which they are requested."""
    for path, module in skeleton.model.named_modules():
        if isinstance(module, ProductLinear):
            name = skeleton.product_name(module, path)
            shape = (module.out_features, module.in_features)
            if module is skeleton.head and tied:
                name = skeleton.embedding_path  # the same matrix, whose bias has that name
            else:
                yield (
                    f"{name}.weight",
                    HostedTensor(f"{path}.weight", shape, transposed=module.transposed, is_product=True),
                )
            if module.bias is not None:
                yield f"{name}.bias", HostedTensor(f"{path}.bias", (module.out_features,))
            continue
        products = experts_of(module) if is_experts(module) else {}
        for name, (parameter, bias) in products.items():
            count, *both = getattr(module, parameter).shape
            shape = tuple(reversed(both) if module.is_transposed else both)
            for expert in range(count):
                own = f"{path}.{name}.{expert}"
                transposed = bool(module.is_transposed)
                yield f"{own}.weight", HostedTensor(f"{path}.{parameter}", shape, expert, transposed, True)
                if bias is not None:
                    yield f"{own}.bias", HostedTensor(f"{path}.{bias}", (shape[0],), expert)
        done = {one for pair in products.values() for one in pair}
        for name, tensor in own_tensors(module):
            if name not in done:
                full = f"{path}.{name}" if path else name
                yield full, HostedTensor(full, tuple(tensor.shape))


def experts_of(module: Any) -> dict[str, tuple[str, str | None]]:
    """The products of each expert by name, with the parameters of their weights and biases."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    return {name: (name, f"{name}_bias" if module.has_bias else None) for name in (first, "down_proj")}


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's own parameters and buffers that are in files."""
    buffers = [
        (name, one) for name, one in module._buffers.items() if name not in module._non_persistent_buffers_set
    ]
    return [(name, one) for name, one in (*module._parameters.items(), *buffers) if one is not None]


def _context(text: Any) -> int:
    """The config's maximum length, limited to where rotary embeddings do not depend on other rows."""
    length = next((value for name in _CONTEXTS if isinstance(value := getattr(text, name, None), int)), None)
    if length is None or length < 1:
        raise UnhostedError("has no maximum length of a text in its config")
    ropes = getattr(text, "rope_parameters", None) or {}
    kinds = [ropes, *(one for one in ropes.values() if isinstance(one, dict))]
    if any(one.get("rope_type") in _LIMITED_ROPES for one in kinds):
        original = [one.get("original_max_position_embeddings") for one in kinds]
        lengths = [one for one in (*original, length) if isinstance(one, int)]
        return min(lengths)
    return length


def _matches(name: str, patterns: Any) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def hosted(path: Path, weights: Sequence[Path], *, trust_remote_code: bool) -> HostedFolder:
    """A HostedFolder; raises ModelError, with the folder's name, if the model is not supported."""
    try:
        return HostedFolder(path, weights, trust_remote_code=trust_remote_code)
    except UnhostedError as error:
        kind = read_json(path / "config.json").get("model_type")
        what = f"; it is {found}" if (found := sort_of(kind)) is not None else ""
        raise ModelError(
            f"{path.name} {error}{what}. specinfer has no family for it, and transformers' code cannot run it"
            f" here; {running_relative(kind)}"
        ) from error
