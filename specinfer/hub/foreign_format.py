"""Detection of unsupported model formats.

The functions read names and metadata, and open no file. They return the predicate of an error message, with
advice: "an ONNX model, which is not supported; give ...".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatch
from typing import Final

INSTEAD: Final = "give the original model (config.json with *.safetensors), or a GGUF file of it"

# File name patterns of other programs' models -> description.
_OTHER_PROGRAMS: Final = {
    "openvino*.xml": "an OpenVINO model",
    "*.engine": "a TensorRT engine",
    "*.plan": "a TensorRT engine",
    "rank[0-9]*.safetensors": "a TensorRT-LLM checkpoint",
    "*.onnx": "an ONNX model",
    "weights*.npz": "an MLX model",
    "*.mlpackage": "a Core ML model",
    "*.mlmodel": "a Core ML model",
    "*.tflite": "a TensorFlow Lite model",
    "*.pte": "an ExecuTorch model",
    "*.nemo": "a NeMo model",
    "tf_model*.h5": "a TensorFlow model",
    "flax_model*.msgpack": "a Flax model",
    "qmodel.pt": "a model quantized by HQQ",
    "consolidated*.pth": "a model in its author's own format",
    "consolidated*.safetensors": "a model in its author's own format",
}
_MODELOPT: Final = "hf_quant_config.json"  # ModelOpt writes it beside config.json
# Quantization tool -> last parts of tensor names that occur in quantized layers only.
_QUANTIZED_TENSORS: Final = {
    "AWQ and GPTQ": "qweight qzeros g_idx scales",
    "MLX": "biases",
    "compressed-tensors": "weight_packed weight_shape weight_zero_point weight_g_idx weight_global_scale "
    "input_global_scale bitmask compressed row_offsets",
    "FP8 formats": "weight_scale weight_scale_inv weight_scale_2 input_scale output_scale activation_scale "
    "act_scale k_scale v_scale q_scale kv_scale prob_scale pre_quant_scale",
    "bitsandbytes": "absmax quant_map nested_absmax nested_quant_map SCB weight_format",
    "EXL2": "q_weight q_scale_max q_groups q_group_map q_invperm q_perm",
    "EXL3": "trellis suh svh mcg mul1",
    "HQQ": "W_q W_q_packed",
    "torchao": "weight_qdata _weight_qdata weight_zero weight__data",
    "AQLM": "codes codebooks",
}
_BY_END: Final = {end: writer for writer, ends in _QUANTIZED_TENSORS.items() for end in ends.split()}
_QUANT_STATE: Final = re.compile(r"\.quant_state\.")


def foreign_files(names: Iterable[str]) -> str | None:
    """Return a description of a folder that holds no readable language model, or None.

    `names` are the paths of its files, relative to the folder.
    """
    names = {*names}
    own = {name for name in names if "/" not in name}
    whole = any(fnmatch(name, "model*.safetensors*") for name in own)
    if "adapter_config.json" in own:
        return (
            "a model with a separate adapter: merge the adapter into the model, or remove "
            "adapter_config.json if it is merged already"
            if whole
            else "an adapter (LoRA), not a model: merge it into the model it was trained on (in peft "
            "merge_and_unload, then save_pretrained) and give the merged folder"
        )
    if "modules.json" in own or "config_sentence_transformers.json" in own:
        return "a sentence-transformers model, which makes embeddings, not text; give a language model"
    if "model_index.json" in own and not whole:
        return "a diffusers pipeline, which makes pictures, not text; give a language model"
    if _MODELOPT in own:
        return f"quantized by NVIDIA's ModelOpt (it has {_MODELOPT}), which is not supported; {INSTEAD}"
    if whole or any(fnmatch(name, "pytorch_model*.bin") for name in own):
        return None
    for pattern, what in _OTHER_PROGRAMS.items():
        if any(fnmatch(name.rpartition("/")[2], pattern) for name in names):
            return f"{what}, which is not supported; {INSTEAD}"
    return None


def quantized_config(config: Mapping[str, object]) -> str | None:
    """Return the name of the quantization method in a config.json, or None if it names no quantization."""
    for key in ("quantization_config", "compression_config", "quantization"):
        found = config.get(key)
        if not found:
            continue
        if not isinstance(found, dict):
            return f"{str(found)[:40]!r}"
        bits = found.get("bits", found.get("w_bit"))
        shown = f" ({bits} bits)" if isinstance(bits, int) else ""
        method = found.get("quant_method", found.get("quantization_method"))
        if isinstance(method, str):
            return method[:40] + shown
        if "group_size" in found and "bits" in found:
            return "MLX" + shown
        if found.get("load_in_4bit") or found.get("load_in_8bit"):
            return "bitsandbytes"
        return "an unnamed method"
    return None


def quantized_tensor(name: str) -> str | None:
    """Return the quantization tool that writes tensors of this name, or None for ordinary names."""
    if _QUANT_STATE.search(name):
        return "bitsandbytes"
    return _BY_END.get(name.rpartition(".")[2]) if "." in name else None


def foreign_gguf(metadata: Mapping[str, object]) -> str | None:
    """Return a description of a GGUF file that holds no language model, or None."""
    kind, architecture = metadata.get("general.type"), metadata.get("general.architecture")
    if kind == "adapter" or "adapter.type" in metadata:
        return "an adapter (LoRA), not a model: merge it into its model with llama.cpp's export-lora"
    if kind == "mmproj" or architecture == "clip":
        return "the image encoder of a model (mmproj); give the GGUF file of its language model"
    if architecture == "controlvector":
        return "a control vector, not a model; give the GGUF file of a language model"
    if kind == "imatrix" or architecture == "imatrix":
        return "an importance matrix for quantization; give the GGUF file of the model"
    return None


def pickled_weights(names: Collection[str], suffixes: tuple[str, ...]) -> list[str]:
    """Return the files with pickled weights, sorted; leaves out the training state beside them."""
    beside = ("training_args", "optimizer", "scheduler", "rng_state", "scaler", "random_states")
    return sorted(name for name in names if name.endswith(suffixes) and not name.startswith(beside))
