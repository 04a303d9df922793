"""The layer behind a model's last that predicts a further token (multi-token prediction, MTP).

Files have it beside the model's own layers. It is opened as a model of one layer, under the decoder's names.
Three more tensors are `enorm` and `hnorm`, the norms of a token's embedding and of a hidden state, and `fc`,
the product of both. The decoder's last norm is the layer's own.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from specinfer.errors import ModelError, ModelFileError
from specinfer.models.config import ModelConfig
from specinfer.models.fields import Fields, integer

_LAYER: Final = re.compile(r"(?:model\.layers|blk)\.(\d+)\.")
_EXPERTS: Final = re.compile(r"\.experts\.|_exps\.")
_COUNTS: Final = ("mtp_num_hidden_layers", "num_nextn_predict_layers")  # keys of config.json


@dataclass(frozen=True, slots=True)
class NextNames:
    """How files name that layer's tensors."""

    # Beginnings of names in files, in the order in which they are tried, and those in a model of one layer.
    begins: Mapping[str, str]
    hidden_first: bool = False  # fc reads the hidden state, then the embedding; else the embedding first

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """The names of that layer's tensors among these, and their names in a model of one layer."""
        found = {}
        for name in names:
            begin = next((one for one in self.begins if name.startswith(one)), None)
            if begin is not None:
                found[name] = self.begins[begin] + name.removeprefix(begin)
        return found


QWEN: Final = NextNames(
    {
        **{"mtp.layers.": "model.layers.", "mtp.fc.": "fc."},
        **{"mtp.pre_fc_norm_embedding.": "enorm.", "mtp.pre_fc_norm_hidden.": "hnorm.", "mtp.": "model."},
    }
)
_MIMO: Final = "model.mtp_layers."
MIMO: Final = NextNames(
    {
        **{f"{_MIMO}0.token_layernorm.": "enorm.", f"{_MIMO}0.hidden_layernorm.": "hnorm."},
        **{f"{_MIMO}0.input_proj.": "fc.", f"{_MIMO}0.final_layernorm.": "model.norm."},
        _MIMO: "model.layers.",
    },
    hidden_first=True,
)


def nextn(layers: range) -> NextNames:
    """The names in GGUF files, whose `layers` are those behind the model's own."""
    begin = f"blk.{layers.start}.nextn."
    first = {
        **{f"{begin}eh_proj.": "fc.", f"{begin}enorm.": "enorm.", f"{begin}hnorm.": "hnorm."},
        f"{begin}shared_head_norm.": "output_norm.",
    }
    return NextNames(first | {f"blk.{layer}.": f"blk.{i}." for i, layer in enumerate(layers)})


def declared_layers(c: Fields) -> int | None:
    """The number of such layers that a config.json names; None: it names none."""
    return next((integer(c, key) for key in _COUNTS if c.get(key) is not None), None)


def next_config(
    path: Path, target: ModelConfig, names: Iterable[str], *, offset: float, declared: int | None
) -> ModelConfig:
    """The config of a target's further layer, as a model of one layer with tensors of these names.

    `offset` is the file's norm_weight_offset, `declared` the number of such layers in its config. Raises
    ModelFileError if it has none, or another number, and ModelError if there are several.
    """
    names = list(names)
    layers = len({found[1] for found in map(_LAYER.match, names) if found})
    if not names:
        raise ModelFileError(
            f"{path} has no layer that predicts further tokens (mtp or nextn tensors); name a head, a small "
            "model, or leave the draft out"
        )
    if declared not in (None, layers):
        raise ModelFileError(
            f"{path} has tensors of {layers} layers that predict further tokens, but its config says "
            f"{declared}; get the model again"
        )
    if layers != 1:
        raise ModelError(
            f"{path} has {layers} layers that predict further tokens; supported: 1. Leave this draft out"
        )
    experts = target.experts if any(map(_EXPERTS.search, names)) else None
    if experts is not None:
        experts = replace(experts, dense_layers=frozenset())
    return replace(one_layer(target), experts=experts, norm_weight_offset=offset)


def one_layer(target: ModelConfig) -> ModelConfig:
    """The config of a model of one attention layer with a single MLP, otherwise as the target's."""
    return replace(
        target,
        num_layers=1,
        layer_windows=(None,),
        layer_kinds=(),
        layer_inner=(),
        layers_without_rope=frozenset(),
        layers_without_mlp=frozenset(),
        recurrence=None,
        experts=None,
        tie_embeddings=True,
    )
