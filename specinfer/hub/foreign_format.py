"""Detection of unsupported model formats.

The functions read names and metadata, and open no file. They return the predicate of an error message, with
advice: "a diffusers pipeline, which makes pictures, not text; give a language model".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

INSTEAD: Final = "give the original model (config.json with *.safetensors), or a GGUF file of it"

_EMBEDDINGS: Final = "a sentence-transformers model, which makes embeddings, not text; give a language model"
_FOLDERS: Final = {  # file of a folder -> description
    "adapter_config.json": "an adapter (LoRA), or a model with one: merge the adapter into the model (in "
    "peft merge_and_unload, then save_pretrained) and give that folder without adapter_config.json",
    "modules.json": _EMBEDDINGS,
    "config_sentence_transformers.json": _EMBEDDINGS,
    "model_index.json": "a diffusers pipeline, which makes pictures, not text; give a language model",
    "hf_quant_config.json": f"quantized by NVIDIA's ModelOpt, which is not supported; {INSTEAD}",
}
_GGUF: Final = {  # general.type or general.architecture -> description
    "adapter": "an adapter (LoRA), not a model: merge it into its model with llama.cpp's export-lora",
    "mmproj": "the image encoder of a model (mmproj); give the GGUF file of its language model",
    "clip": "the image encoder of a model (mmproj); give the GGUF file of its language model",
    "controlvector": "a control vector, not a model; give the GGUF file of a language model",
    "imatrix": "an importance matrix for quantization; give the GGUF file of the model",
}
# Last parts of tensor names in layers that GPTQ, AWQ, MLX, compressed-tensors,
# FP8 formats, bitsandbytes, EXL2, EXL3, HQQ, torchao and AQLM have quantized, and in no others.
_QUANTIZED: Final = """
    qweight qzeros g_idx scales biases
    weight_packed weight_shape weight_zero_point weight_g_idx weight_global_scale input_global_scale
    bitmask compressed row_offsets weight_scale weight_scale_inv weight_scale_2 input_scale output_scale
    activation_scale act_scale k_scale v_scale q_scale kv_scale prob_scale pre_quant_scale
    absmax quant_map nested_absmax nested_quant_map SCB weight_format
    q_weight q_scale_max q_groups q_group_map q_invperm q_perm trellis suh svh mcg mul1
    W_q W_q_packed weight_qdata _weight_qdata weight_zero weight__data codes codebooks
"""


def foreign_files(names: Iterable[str]) -> str | None:
    """Return a description of a folder of another kind, from the names of its files, or None."""
    names = {*names}
    return next((what for file, what in _FOLDERS.items() if file in names), None)


def foreign_gguf(metadata: Mapping[str, object]) -> str | None:
    """Return a description of a GGUF file that holds no language model, or None."""
    kinds = (metadata.get(key) for key in ("general.type", "general.architecture"))
    return next((_GGUF[kind] for kind in kinds if isinstance(kind, str) and kind in _GGUF), None)


def quantized_config(config: Mapping[str, object]) -> str | None:
    """Return the name of the quantization method in a config.json, or None if it names no quantization."""
    keys = ("quantization_config", "compression_config", "quantization")
    found = next((found for key in keys if (found := config.get(key))), None)
    if not isinstance(found, dict):
        return None if found is None else repr(found)[:40]
    method = found.get("quant_method")
    if found.get("load_in_4bit") or found.get("load_in_8bit"):
        method = method or "bitsandbytes"
    bits = found.get("bits")
    return f"{str(method or 'an unnamed method')[:40]}{f' ({bits} bits)' if isinstance(bits, int) else ''}"


def quantized_tensor(name: str) -> bool:
    """Return True if only quantization tools write tensors of this name."""
    return ".quant_state." in name or name.rpartition(".")[2] in _QUANTIZED.split()
