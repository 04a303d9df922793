"""config.json of Hugging Face models: the common part of reading it, and writing it.

models/families has the rest of each family. A config that requires computations the decoder does not support
is rejected with a ModelError; no setting is ignored silently.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from specinfer.errors import ConfigKeyError, ModelError
from specinfer.hub.foreign_format import quantized_config
from specinfer.models.config import Activation, Family, ModelConfig
from specinfer.models.fields import MAX_LAYERS, Fields, all_ids, count, integer, number
from specinfer.models.next_layer import QWEN, NextNames
from specinfer.models.positions import Rope, longest_text, rope_from_hf
from specinfer.models.sources import Names

# Class names of transformers for written configs.
ARCHITECTURES: Final = {
    Family.LLAMA: "LlamaForCausalLM",
    Family.MISTRAL: "MistralForCausalLM",
    Family.QWEN2: "Qwen2ForCausalLM",
    Family.QWEN3: "Qwen3ForCausalLM",
}
_ACTIVATIONS: Final = {
    "silu": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "swish": Activation.SILU,
    "relu2": Activation.RELU2,
}


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """config.json's keys of the fields common to all families."""

    vocab: str = "vocab_size"
    hidden: str = "hidden_size"
    inner: str = "intermediate_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    kv_heads: str = "num_key_value_heads"
    norm_eps: str = "rms_norm_eps"
    context: str = "max_position_embeddings"
    activation: str = "hidden_act"
    qkv_bias: str = ""  # "": no bias
    o_bias: str = ""
    mlp_bias: str = ""


USUAL: Final = ConfigKeys()
BIASED: Final = ConfigKeys(qkv_bias="attention_bias", o_bias="attention_bias")
ALL_BIASED: Final = replace(BIASED, mlp_bias="mlp_bias")
# Switches that a decoder computes only for families with a default of that key.
_SWITCHES: Final = (
    *("attn_logit_softcapping", "use_bidirectional_attention", "add_cross_attention"),
    *("use_qk_norm", "qk_layernorm", "scale_attn_by_inverse_layer_idx", "clip_qkv"),
)


def defaults(*, eps: float, context: int, tied: bool = False, **more: object) -> Fields:
    """transformers' defaults for keys that config.json omits; `more` are a family's own."""
    return {"rms_norm_eps": eps, "max_position_embeddings": context, "tie_word_embeddings": tied, **more}


def head_dim(c: Fields, keys: ConfigKeys = USUAL) -> int:
    """The size of a head."""
    return count(c, "head_dim", count(c, keys.hidden) // count(c, keys.heads))


def one_rope(c: Fields) -> tuple[Rope | None, Rope | None]:
    """The rotary embedding of all layers."""
    return rope_from_hf(c, head_dim(c)), None


def no_rope(c: Fields) -> tuple[Rope | None, Rope | None]:
    """Positions are learned, or ALiBi's."""
    return None, None


@dataclass(frozen=True, slots=True)
class HfFamily:
    """How to read the folders of one family: as a Llama, apart from the fields that differ."""

    family: Family  # its value is the model_type in config.json
    defaults: Fields  # transformers' values of keys that config.json omits
    keys: ConfigKeys = USUAL
    adjusted: Callable[[ModelConfig, Fields], ModelConfig] = lambda config, _: config  # by its own keys
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields with one value in the whole family
    given: Callable[[Fields], Fields] = lambda c: c  # adds or converts keys before they are read
    # The embeddings of layers without a window, and of those with one if they differ.
    ropes: Callable[[Fields], tuple[Rope | None, Rope | None]] = one_rope
    names: Names = field(default_factory=Names)
    also: tuple[str, ...] = ()  # further model_types; a family's last row has its value, too
    others: tuple[str, ...] = ()  # prefixes of unread tensors
    next_names: NextNames | None = QWEN  # names of a layer for further tokens, a draft head
    passed_over: frozenset[str] = frozenset()  # keys that have no effect beside some values of other keys

    @property
    def embeddings(self) -> str:
        """The name of the embeddings in files of the whole model."""
        ours = "model.embed_tokens"
        return next((name for name, own in self.names.outside.items() if own == ours), ours) + ".weight"

    def config(self, c: Fields, ids: Sequence[Fields]) -> ModelConfig:
        """The config of a model with the fields `c`, and with token ids from all of `ids`.

        Raises ModelError for anything unsupported.
        """
        for name in _SWITCHES:
            computed = name in self.defaults or (name == "use_qk_norm" and "qk_norm" in self.fixed)
            if c.get(name) and c[name] != "vision" and not computed:  # of images alone, in Gemma 4
                raise not_computed(name, c[name], self.family.value)
        c, keys = self.given({**self.defaults, **c}), self.keys
        rope, local_rope = self.ropes(c)
        hidden, heads = count(c, keys.hidden), count(c, keys.heads)
        layers = integer(c, keys.layers, limit=MAX_LAYERS)
        size = head_dim(c, keys)
        config = ModelConfig(
            family=self.family,
            vocab_size=integer(c, keys.vocab),
            hidden_size=hidden,
            intermediate_size=integer(c, keys.inner),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=integer(c, keys.kv_heads, heads),
            head_dim=size,
            norm_eps=number(c, keys.norm_eps),
            rope=rope,
            local_rope=local_rope,
            layer_windows=(None,) * layers,
            tie_embeddings=bool(c["tie_word_embeddings"]),
            qkv_bias=bool(c.get(keys.qkv_bias, False)),
            o_bias=bool(c.get(keys.o_bias, False)),
            mlp_bias=bool(c.get(keys.mlp_bias, False)),
            activation=activation(c.get(keys.activation, "silu")),
            attention_scale=size**-0.5,
            max_context=longest_text(rope, integer(c, keys.context)),
            eos_ids=all_ids(ids, "eos_token_id"),
        )
        return self.adjusted(replace(config, **self.fixed), c)


def with_rope(c: Fields, parameters: Fields) -> Fields:
    """Add rope parameters to a config.json that has none."""
    given = c.get("rope_parameters") is not None or c.get("rope_scaling") is not None
    return c if given else {**c, "rope_parameters": parameters}


def window_of(c: Fields) -> int | None:
    """The sliding window of layers that have one."""
    return None if c.get("sliding_window") is None else count(c, "sliding_window")


def switched_window(c: Fields) -> int | None:
    """The same for models that have windows only with a further switch."""
    return window_of(c) if c.get("use_sliding_window", False) else None


def but_every(number: int) -> Callable[[int], bool]:
    """All layers except layer `number` - 1 and every `number`-th layer after it."""
    return lambda layer: (layer + 1) % number != 0


def windows(c: Fields, window: int | None, otherwise: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer: by layer_types if present, else of layers for which `otherwise` is true."""
    kinds = c.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list):
            raise ModelError(f"layer_types is {kinds!r}; expected a list. The config is damaged.")
        unknown = sorted({str(k) for k in kinds} - {"full_attention", "sliding_attention"})
        if unknown:
            raise ModelError(
                f"layer_types holds {unknown}; supported: 'full_attention' and 'sliding_attention'"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    layers = integer(c, "num_hidden_layers", limit=MAX_LAYERS)
    return tuple(window if otherwise(layer) else None for layer in range(layers))


def not_computed(key: str, value: object, model_type: object) -> ConfigKeyError:
    """The error for a key of config.json that changes the logits of other families."""
    return ConfigKeyError(
        f"config.json sets {key} = {value!r}, which specinfer does not compute for models of model_type "
        f"{model_type!r}",
        key,
    )


def activation(name: object) -> Activation:
    """The activation with that name in transformers."""
    if isinstance(name, str) and name in _ACTIVATIONS:
        return _ACTIVATIONS[name]
    raise ModelError(f"the activation is {name!r}; supported: {', '.join(sorted(_ACTIVATIONS))}")


def check_silu(c: Fields, key: str, what: str) -> None:
    """Raise ModelError if a key of config.json names another activation than SiLU."""
    if c.get(key, "silu") not in ("silu", "swish"):
        raise ModelError(f"{key} is {c[key]!r}; supported for {what}: 'silu'")


def check_unquantized(config: Fields) -> None:
    """Raise ModelError if a config.json says that the weights are quantized by any method."""
    if (method := quantized_config(config)) is not None:
        raise ModelError(
            f"config.json says that the weights are quantized by {method}, which is not supported here; "
            "supported: unquantized safetensors, or a GGUF file. Give the original model; the option "
            "quantization converts it to int8 or int4."
        )


def layers_to_hf(config: ModelConfig, rope_theta: float) -> dict[str, object]:
    """The fields of config.json for the sizes and layers of a model of one of ARCHITECTURES."""
    return {
        "model_type": str(config.family),
        "architectures": [ARCHITECTURES[config.family]],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": rope_theta,
        "mlp_bias": config.mlp_bias,
    }


def config_to_hf(config: ModelConfig) -> dict[str, object]:
    """config.json of a model without windows; raises ModelError for other models.

    Rotary embeddings must have no scaling.
    """
    plain = config.rope is not None and config.rope == Rope(config.rope.theta)
    if (
        config.family not in ARCHITECTURES
        or not plain
        or config.window is not None
        or not config.plain_layers
        or (config.family in (Family.LLAMA, Family.QWEN3) and config.qkv_bias != config.o_bias)
    ):
        raise ModelError(f"a model of {config.family} with these layers cannot be written as a folder")
    assert config.rope is not None
    return {
        **layers_to_hf(config, config.rope.theta),
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.o_bias,
        "sliding_window": None,
        "use_sliding_window": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": list(config.eos_ids) or None,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",  # transformers 4
    }
