"""Kinds of unsupported models, by model_type or GGUF architecture, and the relatives that run."""

from __future__ import annotations

import re
from typing import Final

_SORTS: Final = (
    (
        r"mamba|rwkv|jamba|bamba|hybrid|_h1?$|recurrent|lfm2|plamo2|next$|qwen3_?5|linear|minimax$|xlstm|delta",
        "a recurrent hybrid, whose layers keep a state that nodes of a tree cannot share",
    ),
    (
        r"vl$|vl_|vision|llava|clip|vit|siglip|idefics|paligemma|pixtral|mllama|vlm|4mm$|3n$|gemma4|llama4|glm4v",
        "a model with a vision tower, and specinfer reads text alone",
    ),
    (r"bert|roberta|electra|embedding|t5_?encoder|xlm", "an encoder, which makes embeddings and no text"),
    (
        r"^m?t5|bart|marian|pegasus|m2m|whisper|wav2vec|speech|audio",
        "an encoder with a decoder, and specinfer runs decoders alone",
    ),
    (r"deepseek_?(?:2|v2|v3)|kimi|plm$", "a model with latent attention, which runs as a folder alone"),
)
# How names of families begin, and releases of them that run.
_RELEASES: Final = (
    "qwen=Qwen 2.5 and Qwen 3|granite=Granite 3|falcon=Falcon 3|gemma=Gemma 3|recurrent_gemma=Gemma 3"
    "|paligemma=Gemma 3|llama=Llama 3|mllama=Llama 3|deepseek=DeepSeek-R1-Distill|mistral=Mistral Small 24B"
    "|pixtral=Mistral Small 24B|phi=Phi 3.5 and Phi 4|glm=GLM-4-0414|chatglm=GLM-4-0414|aya=Command R7B"
    "|cohere=Command R7B|olmo=OLMo 2 and OLMo 3|smol=SmolLM2 and SmolLM3|nemotron=Llama-Nemotron-Nano"
    "|ernie=ERNIE 4.5 0.3B|exaone=EXAONE 4|gpt=gpt-oss"
)
_RUNNING: Final = [pair.split("=") for pair in _RELEASES.split("|")]


def sort_of(kind: object) -> str | None:
    """Return the kind of a model of this model_type or GGUF architecture; None for an unknown name."""
    name = _name(kind)
    return next((what for pattern, what in _SORTS if re.search(pattern, name)), None)


def running_relative(kind: object) -> str:
    """Return a sentence on the releases of the same family that run, and where all are listed."""
    name = _name(kind)
    runs = next((releases for start, releases in _RUNNING if name.startswith(start)), None)
    return (f"of its relatives {runs} run; " if runs else "") + "docs/models.md lists the models that run"


def _name(kind: object) -> str:
    return str(kind).lower().replace("-", "_")
