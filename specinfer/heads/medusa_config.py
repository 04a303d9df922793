"""Medusa's checkpoints: config.json -> MedusaConfig, and tensors under the names that vLLM gives them.

Medusa    {medusa_num_heads, medusa_num_layers}; tensors I.J.linear.weight and I.J.linear.bias of layer J
          of head I, and I.LAST.weight, its output layer; medusa_lm_head.safetensors; no sizes
vLLM      {model_type: medusa, num_heads, num_hidden_layers, hidden_size, vocab_size}; tensors
          blocks.I.layers.J.weight, lm_heads.I.weight; truncated_vocab_size and token_map: which tokens
          output layers have rows of, in any order, unless they have all;
          original_lm_head: all heads share one
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from specinfer.errors import ModelError
from specinfer.heads.config import MedusaConfig
from specinfer.heads.speculators_config import flag
from specinfer.models.fields import count, integer

TOKEN_MAP: Final = "token_map"
_COUNTS: Final = {"num_heads": "medusa_num_heads", "num_hidden_layers": "medusa_num_layers"}
_PREFIX: Final = re.compile(r"^medusa_heads?\.")
_LAYER: Final = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
_OUTPUT: Final = re.compile(r"^(\d+)\.(\d+)\.weight$")


def is_medusa(c: Mapping[str, object]) -> bool:
    """Whether a config.json describes Medusa's heads, and not a model that has them inside."""
    kind = c.get("model_type")
    return kind == "medusa" or (not kind and "medusa_num_heads" in c)


def medusa_name(c: Mapping[str, object], name: str) -> str:
    """A tensor's name in vLLM's layout; a name that is of no layout stays as it is."""
    name = _PREFIX.sub("", name)
    if layer := _LAYER.match(name):
        return f"blocks.{layer[1]}.layers.{layer[2]}.{layer[3]}"
    if (output := _OUTPUT.match(name)) and int(output[2]) == _count(c, "num_hidden_layers"):
        return f"lm_heads.{output[1]}.weight"
    return "lm_heads.0.weight" if name == "lm_head.weight" else name


def medusa_config(
    c: Mapping[str, object], target_layers: int, shapes: Mapping[str, Sequence[int]]
) -> MedusaConfig:
    """The heads that a config.json describes, with tensors of these shapes under vLLM's names.

    Raises ModelError on anything unsupported.
    """
    output = shapes.get("lm_heads.0.weight", ())
    rows, width = output if len(output) == 2 else (None, None)
    scale = c.get("logit_scale", 1.0)
    if scale != 1.0:
        raise ModelError(f"logit_scale is {scale!r}; supported: Medusa heads whose logits are not scaled")
    vocab = count(c, "vocab_size", rows)
    shared = flag(c, "original_lm_head", False)
    truncated = c.get("truncated_vocab_size")
    return MedusaConfig(
        taps=(target_layers,),
        target_hidden_size=count(c, "hidden_size", width),
        vocab_size=vocab,
        draft_vocab_size=vocab if truncated is None else count(c, "truncated_vocab_size"),
        depth=_count(c, "num_heads"),
        num_layers=_count(c, "num_hidden_layers"),
        bias="blocks.0.layers.0.bias" in shapes,
        shared_head=shared,
        own_head=not shared or rows is not None,
    )


def _count(c: Mapping[str, object], name: str) -> int:
    """A number by vLLM's name or Medusa's own."""
    return integer(c, name if name in c else _COUNTS[name])
