"""Small language models (SpecInfer's SSMs) as a kind of draft: a few layers between the target's own tables.

A small model reads tokens alone: no hidden states are collected for it, and its folder loads in any library.
Embeddings and output layer are the target's and stay frozen; layers and norms are trained, in float32.

Shapes: B texts, T tokens, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specinfer.errors import ModelError, TuneError
from specinfer.heads.checkpoint import is_head, read_tensor
from specinfer.heads.layers import HeadLayer, HeadNorm, Rotation, initialise, rotation_at
from specinfer.hub import resolve
from specinfer.models.config import Family, ModelConfig
from specinfer.models.open_model import OpenModel, open_model
from specinfer.models.positions import Rope
from specinfer.models.safetensors import write_model
from specinfer.models.weight_reader import TensorFile
from specinfer.tune.dataset import BlockBatch, TrainingSet
from specinfer.tune.draft import Description, Kind, LossOf, Say, Target, TrainableDraft
from specinfer.tune.initial_head import calibrate_norm, check_trainable

EMBEDDINGS = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
_FAMILIES: Final = (Family.LLAMA, Family.MISTRAL, Family.QWEN2, Family.QWEN3)


class SmallModel(nn.Module):
    """A Llama-like decoder; its trained tensors have checkpoint names without the prefix `model.`."""

    def __init__(self, config: ModelConfig, embedding_VD: Tensor, output_VD: Tensor | None = None) -> None:
        """The tables are shared, not copied; `output_VD` None: tied to the embeddings."""
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, _weight=embedding_VD, _freeze=True
        )
        self.layers = nn.ModuleList(HeadLayer(config) for _ in range(config.num_layers))
        self.norm = HeadNorm(config.hidden_size, config.norm_eps)
        table_VD = embedding_VD if output_VD is None else output_VD
        self.output_VD = nn.Parameter(table_VD, requires_grad=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Inputs of the output layer for every token, [B, T, D]; texts may be padded at their ends."""
        config = self.config
        assert config.rope is not None
        rotation = rotation_at(torch.arange(tokens_BT.shape[1]), config.rope, config.head_dim)
        x: Tensor = self.embed_tokens(tokens_BT)
        for layer in self.layers:
            assert isinstance(layer, HeadLayer)
            x = layer.after_attention(x, _attended(layer, x, rotation))
        out: Tensor = self.norm(x)
        return out

    def take(self, source: TensorFile, layers: Sequence[int]) -> None:
        """Copy a model's last norm and the given layers, one for each layer here, or none."""
        with torch.no_grad():
            for layer, theirs in zip(self.layers, layers, strict=False):
                for name, parameter in layer.named_parameters():
                    parameter.copy_(read_tensor(source, f"model.layers.{theirs}.{name}"))
            self.norm.weight.copy_(read_tensor(source, "model.norm.weight"))


def tables(source: TensorFile) -> tuple[Tensor, Tensor | None]:
    """Embeddings and output layer of a model, float32 [V, D]; None: tied."""
    return read_tensor(source, EMBEDDINGS), read_tensor(source, OUTPUT) if OUTPUT in source.shapes else None


def _attended(layer: HeadLayer, x_BTD: Tensor, rotation: Rotation) -> Tensor:
    """Attention output of the layer, [B, T, K, G, H]; causal."""
    given, attention = layer.input_layernorm(x_BTD), layer.self_attn
    q_BTKGH = attention.queries(given, rotation)  # scaled
    group = q_BTKGH.shape[3]
    keys, values = (
        part.repeat_interleave(group, dim=2).transpose(1, 2)
        for part in (attention.keys(given, rotation), attention.values(given))
    )
    queries = q_BTKGH.flatten(2, 3).transpose(1, 2)
    found = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=1.0)
    return found.transpose(1, 2).reshape(q_BTKGH.shape)


class SmallDraft(TrainableDraft):
    """A small language model as a draft; it predicts the next token after each token of a text."""

    trained_depth = 1  # a deeper level is the same pass, one token later
    one_pass = False

    def __init__(self, model: SmallModel, depth: int) -> None:
        """`depth` levels are measured."""
        self.module = self.model = model
        self.depth = depth
        self.vocab = model.config.vocab_size
        self.ids = torch.arange(self.vocab)
        self.scale_ND = torch.ones(0, model.config.hidden_size)
        self.last_norm = model.norm

    def level_states(self, batch: BlockBatch, levels: int) -> Tensor:
        """Rows of the text: level l is the row l tokens after the anchor."""
        h_BTD: Tensor = self.model(batch.tokens_BT)
        places_BAL = batch.anchors_BA[..., None] + torch.arange(levels)
        flat = places_BAL.flatten(1)[..., None].expand(-1, -1, h_BTD.shape[2])
        return h_BTD.gather(1, flat).view(*places_BAL.shape, -1)

    def logits(self, h: Tensor, before: Tensor, entries_S: Tensor | None = None) -> Tensor:
        """As TrainableDraft; `before` is unused, since the rows depend on it already."""
        table = self.model.output_VD if entries_S is None else self.model.output_VD[entries_S]
        return h @ table.T

    def write(self, folder: Path, target: Target) -> None:
        """Write it as a folder that transformers loads, with the target's tokenizer."""
        model = self.model
        tensors = {EMBEDDINGS: model.embed_tokens.weight.data}
        tensors |= {f"model.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}
        if not model.config.tie_embeddings:
            tensors[OUTPUT] = model.output_VD.data
        write_model(model.config, tensors, folder, tokenizer=target.files)

    def description(self) -> Description:
        """Description for the model card."""
        body = self.model.config
        return Description(
            library="transformers",
            tag="ssm",
            title="small speculative model",
            does="is a language model that guesses a level of a tree in each pass",
            kind=f"{body.family}, {body.num_layers} layer(s) of {body.hidden_size}; the target's embeddings",
            reads="tokens alone",
            of_target="embeddings and output layer, and layers initialized from its own by default",
        )


@dataclass(frozen=True, kw_only=True)
class SsmKind(Kind):
    """A few layers of the target's architecture between its own tables."""

    name = "ssm"
    layers: int = 2
    depth: int = 5  # levels that are measured

    def check(self, target: ModelConfig, init: str | None) -> None:
        """Raises as Kind."""
        config = self.config(target)
        if init not in (None, "target", "random"):
            _opened(init, config)

    def taps(self, target: ModelConfig) -> tuple[int, ...]:
        """No taps."""
        return ()

    def facts(self) -> dict[str, object]:
        """The model's shape."""
        return {"kind": self.name, **asdict(self)}

    def new(
        self, init: str | None, target: Target, dataset: TrainingSet, seed: int, loss_of: LossOf, say: Say
    ) -> SmallDraft:
        """A model with the best of the target's layers, random layers, or an exported model's."""
        if init not in (None, "target", "random"):
            config = self.config(target.config)
            return SmallDraft(_whole_model(_opened(init, config), config), self.depth)
        model = self._empty(target)
        draft = SmallDraft(model, self.depth)
        if init == "random":
            model.take(target.model, ())
            initialise(model, torch.Generator().manual_seed(seed))
            return draft
        tried: list[tuple[float, Sequence[int]]] = []
        for layers in _choices(self.layers, target.config.num_layers):
            model.take(target.model, layers)
            tried.append((calibrate_norm(draft, loss_of), layers))
        _, best = min(tried)
        model.take(target.model, best)
        loss = calibrate_norm(draft, loss_of)
        named = ", ".join(str(layer) for layer in best)
        say(f"the model begins with the target's layers {named} and a loss of {loss:.2f}")
        return draft

    def blank(self, target: Target, scale_ND: Tensor, ids: list[int]) -> SmallDraft:
        """A model of this shape."""
        return SmallDraft(self._empty(target), self.depth)

    def config(self, target: ModelConfig) -> ModelConfig:
        """The model's config: the target's, with fewer layers, no windows and unscaled positions.

        Raises ModelError for targets whose layers cannot be trained here.
        """
        check_trainable(target)
        if target.family not in _FAMILIES or target.rope is None:
            raise ModelError(f"no small model can be trained for {target.family}; use Llama, Mistral or Qwen")
        if not 1 <= self.layers <= target.num_layers:
            raise TuneError(f"layers is {self.layers}; allowed: 1 to the target's {target.num_layers}")
        return replace(
            target,
            num_layers=self.layers,
            layer_windows=(None,) * self.layers,
            rope=Rope(target.rope.theta),
        )

    def _empty(self, target: Target) -> SmallModel:
        return SmallModel(self.config(target.config), *tables(target.model))


def read_small(opened: OpenModel, depth: int) -> SmallDraft:
    """A language model as a draft; raises ModelError if its layers cannot be trained here."""
    check_trainable(opened.config)
    return SmallDraft(_whole_model(opened, opened.config), depth)


def _whole_model(opened: OpenModel, config: ModelConfig) -> SmallModel:
    """All layers of an opened model, under a config of the same shape."""
    model = SmallModel(config, *tables(opened))
    model.take(opened, range(config.num_layers))
    return model


def _opened(name: str, wanted: ModelConfig) -> OpenModel:
    """Open an exported model to resume training; reads no weights.

    Raises TuneError if its shape differs from `wanted`, ModelError or a subclass if there is none.
    """
    files = resolve(name)
    if is_head(files.path):
        raise TuneError(
            f"init is {name!r}, which is a draft head; allowed: target, random, or a model's folder"
        )
    opened = open_model(files)
    if replace(opened.config, eos_ids=wanted.eos_ids) != wanted:
        raise TuneError(
            f"the model {name} differs in shape from the configured one; give --layers as it was "
            "trained, and the model it is a draft of, or leave --init out"
        )
    return opened


def _choices(count: int, whole: int) -> list[tuple[int, ...]]:
    """Candidate subsets of a model's layers: from both ends, the first, the last, and evenly spread."""
    first = (count + 1) // 2
    ends = (*range(first), *range(whole - (count - first), whole))
    spread = tuple(round(i * (whole - 1) / max(count - 1, 1)) for i in range(count))
    return list(dict.fromkeys((ends, tuple(range(count)), tuple(range(whole - count, whole)), spread)))
