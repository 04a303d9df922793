"""The layout of Gemma 4's assistants: config.json, names of tensors, and the order of tokens.

    text_config                        layers as in Gemma 4; all of them have queries only
    model.layers.*, model.norm         their tensors
    pre_projection, post_projection    from and to rows of the target's size
    model.embed_tokens                 the output layer; token embeddings are the target's

With use_ordered_embeddings, tokens are in clusters of equal size:

    masked_embedding.centroids         a row for each cluster
    masked_embedding.token_ordering    the tokens, cluster by cluster
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from specinfer.errors import ModelError, ModelFileError
from specinfer.heads.config import AssistantConfig
from specinfer.heads.vocabulary import Entries, read_whole
from specinfer.models.config import ModelConfig
from specinfer.models.decoder_shapes import decoder_shapes
from specinfer.models.families.registry import config_from_hf
from specinfer.models.fields import boolean, count, integer, mapping

_TYPES: Final = ("gemma4_assistant", "gemma4_unified_assistant")
_OUTPUT: Final = "lm_head.weight"
_TABLE: Final = "embed_tokens.weight"
CENTROIDS: Final = "masked_embedding.centroids"
_ORDER: Final = "masked_embedding.token_ordering"
_UNREAD: Final = re.compile(r"layers\.\d+\.self_attn\.[kv]_(proj|norm)\.weight|" + re.escape(_ORDER))
# Switches of a Gemma 4 that its assistants do not have.
_NEVER: Final = (
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
    *("enable_moe_block", "use_double_wide_mlp"),
)


def is_assistant(c: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes an assistant."""
    return c.get("model_type") in _TYPES


def assistant_config(c: Mapping[str, Any], target: ModelConfig) -> AssistantConfig:
    """Return the config of the assistant with this config.json.

    Raises ModelError for anything that is not computed.
    """
    text = mapping(c, "text_config")
    for name in _NEVER:
        if text.get(name):
            raise ModelError(f"{name} of an assistant is {text[name]!r}; supported: 0 or false")
    given = {"num_kv_shared_layers": 0, "model_type": "gemma4_text", "hidden_size_per_layer_input": 0}
    body = config_from_hf({**text, **given})
    layers = body.num_layers
    if integer(text, "num_kv_shared_layers", layers) not in (0, layers):
        raise ModelError(
            f"num_kv_shared_layers of an assistant is {text['num_kv_shared_layers']}; expected all its "
            f"{layers} layers"
        )
    clusters = count(c, "num_centroids", 2048) if boolean(c, "use_ordered_embeddings", False) else 0
    return AssistantConfig(
        # A row attends to the last `window` + 1 tokens before its own, as in transformers.
        body=replace(
            body,
            layer_windows=tuple(None if one is None else one + 1 for one in body.layer_windows),
            shared_layers=layers,
            keys_elsewhere=True,
            tie_embeddings=True,
        ),
        taps=(target.num_layers,),
        target_hidden_size=count(c, "backbone_hidden_size"),
        draft_vocab_size=body.vocab_size,
        clusters=clusters,
        chosen=count(c, "centroid_intermediate_top_k", 32) if clusters else 0,
    )


def assistant_shapes(config: AssistantConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an assistant's tensors."""
    size, outer = config.hidden_size, config.target_hidden_size
    shapes = {name.removeprefix("model."): shape for name, shape in decoder_shapes(config.body).items()}
    shapes |= {"pre_projection.weight": (size, 2 * outer), "post_projection.weight": (outer, size)}
    if config.clusters:
        shapes[f"{CENTROIDS}.weight"] = config.clusters, size
    else:
        shapes[_OUTPUT] = shapes.pop(_TABLE)
    return shapes


def assistant_entries(config: AssistantConfig, entries: Entries) -> Entries:
    """Return the tensors that are read; the output layer is named as a table if its rows are looked up."""
    kept = {name: entry for name, entry in entries.items() if not _UNREAD.fullmatch(name)}
    found = [kept.pop(name) for name in (_OUTPUT, _TABLE) if name in kept]
    return kept | ({_TABLE if config.clusters else _OUTPUT: found[0]} if found else {})


def read_order(path: Path, config: AssistantConfig, entries: Entries) -> Sequence[int]:
    """Return the tokens cluster by cluster; raises ModelFileError if they are not all tokens once."""
    vocab = config.vocab_size
    if not config.clusters:
        return range(vocab)
    if _ORDER not in entries:
        raise ModelFileError(f"{path} lacks tensor {_ORDER!r}: the head is incomplete; download it again")
    order = read_whole(path, entries, _ORDER, vocab)
    if order.is_floating_point() or not torch.equal(order.long().sort().values, torch.arange(vocab)):
        raise ModelFileError(f"{path}: tensor {_ORDER!r} is damaged: it must name every token once")
    return [int(i) for i in order]
