"""A small language model in plain PyTorch, as it learns: a few layers between the target's own tables.

It is what SpecInfer calls an SSM: it reads tokens alone, and can be run by anybody. Embeddings and output
layer are the target's and stay as they are; layers and the norms are trained, in float32.

Shapes: B texts, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specinfer.heads.layers import HeadLayer, Norm, Rotation, rotations
from specinfer.models.config import ModelConfig
from specinfer.models.weight_reader import TensorFile

EMBEDDINGS = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"


class SmallModel(nn.Module):
    """A decoder of Llama's kind; its trained tensors have the names of checkpoints behind `model.`."""

    def __init__(self, config: ModelConfig, embedding_VD: Tensor, output_VD: Tensor | None = None) -> None:
        """The tables are shared, not copied; `output_VD` None: tied to the embeddings."""
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, _weight=embedding_VD, _freeze=True
        )
        self.layers = nn.ModuleList(HeadLayer(config) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.norm_eps)
        table_VD = embedding_VD if output_VD is None else output_VD
        self.output_VD = nn.Parameter(table_VD, requires_grad=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """What the output layer reads of every token, [B, T, D]; texts may be padded behind their ends."""
        config = self.config
        assert config.rope is not None
        rotation = rotations(torch.arange(tokens_BT.shape[1]), config.rope, config.head_dim)
        x: Tensor = self.embed_tokens(tokens_BT)
        for layer in self.layers:
            assert isinstance(layer, HeadLayer)
            x = layer.after_attention(x, _attended(layer, x, rotation))
        out: Tensor = self.norm(x)
        return out

    def logits(self, h: Tensor, ids_S: Tensor | None = None) -> Tensor:
        """The logits of these tokens, or all, [..., S], of rows [..., D]."""
        table = self.output_VD if ids_S is None else self.output_VD[ids_S]
        return h @ table.T

    def twin(self) -> SmallModel:
        """Another one with layers of its own, which are the same; the tables are shared."""
        tied = self.config.tie_embeddings
        copy = SmallModel(self.config, self.embed_tokens.weight.data, None if tied else self.output_VD.data)
        copy.load_state_dict(self.trained(), strict=False)
        return copy.eval()

    def trained(self) -> dict[str, Tensor]:
        """The tensors that are trained, by name; not copies."""
        return {name: p.detach() for name, p in self.named_parameters() if p.requires_grad}

    def take_layer(self, number: int, source: TensorFile, theirs: int) -> None:
        """Copy layer `theirs` of a model's."""
        layer = self.layers[number]
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(_whole(source, f"model.layers.{theirs}.{name}"))

    def take_norm(self, source: TensorFile) -> None:
        """Copy the last norm of a model's."""
        with torch.no_grad():
            self.norm.weight.copy_(_whole(source, "model.norm.weight"))


def tables(source: TensorFile) -> tuple[Tensor, Tensor | None]:
    """Embeddings of a model and its output layer, float32 [V, D]; None: these are one table."""
    return _whole(source, EMBEDDINGS), _whole(source, OUTPUT) if OUTPUT in source.shapes else None


def _attended(layer: HeadLayer, x_BTD: Tensor, rotation: Rotation) -> Tensor:
    """What the layer's attention finds, [B, T, K, G, H]: each token sees those up to itself."""
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


def _whole(source: TensorFile, name: str) -> Tensor:
    return source.read_rows(name, 0, source.shapes[name][0]).float()
