"""What a model is, as pure data: foreign formats (config.json, GGUF metadata) die here.

A family is a set of values of these fields plus a name map (weights.py, gguf.py). Anything a file asks for
that the decoder does not compute is refused with a ModelError; nothing is skipped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from specinfer.errors import ModelError


class Family(StrEnum):
    """The architectures specinfer runs."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    GEMMA3 = "gemma3"
    OPT = "opt"


class Activation(StrEnum):
    """The non-linearity of the MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's rope scaling: long wavelengths are divided by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding; at most one of the scalings is set."""

    theta: float
    linear_factor: float = 1.0  # positions are divided by it
    llama3: Llama3Scaling | None = None
    divisors: tuple[float, ...] | None = None  # [head_dim / 2], one per frequency (GGUF rope_freqs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything the decoder needs to know besides the weights."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope | None  # None: learned positions (OPT)
    local_rope: Rope | None = None  # of layers with a window, where it is another one (Gemma 3)
    layer_windows: tuple[int | None, ...]  # [num_layers]; position p sees positions > p - window
    tie_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each query and key head, before rope
    embedding_scale: float = 1.0
    norm_weight_offset: float = 0.0  # Gemma stores RMSNorm weights as w - 1
    sandwich_norms: bool = False  # norms after attention and MLP too (Gemma 3)
    activation: Activation = Activation.SILU
    attention_scale: float
    logit_softcap: float | None = None  # logits become cap * tanh(logits / cap)
    max_context: int
    eos_ids: tuple[int, ...] = ()
    embedding_size: int  # other than hidden_size only in OPT-350m
    norm_first: bool = True  # OPT-350m normalises after each block instead, and not at the end
    final_norm: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
            _positive(name, getattr(self, name))
        for name in ("num_kv_heads", "head_dim", "max_context", "embedding_size"):
            _positive(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"the model has {self.num_heads} query heads and {self.num_kv_heads} key-value heads; "
                "the first must be a multiple of the second. The config is damaged."
            )
        if self.rope is not None and self.head_dim % 2:
            raise ModelError(f"head size {self.head_dim} is odd; rotary embeddings need an even one")
        divisors = None if self.rope is None else self.rope.divisors
        if divisors is not None and len(divisors) != self.head_dim // 2:
            raise ModelError(
                f"rope_freqs has {len(divisors)} values for {self.head_dim // 2} frequencies; "
                "the file is damaged, get it again"
            )
        if len(self.layer_windows) != self.num_layers:
            raise ModelError(
                f"the config describes the attention of {len(self.layer_windows)} layers, "
                f"but the model has {self.num_layers}"
            )
        if len({w for w in self.layer_windows if w is not None}) > 1:
            raise ModelError(
                f"sliding windows {sorted({w for w in self.layer_windows if w is not None})} differ between "
                "layers; one window size per model is supported"
            )

    @property
    def window(self) -> int | None:
        """The sliding window of the layers that have one; None if none has."""
        return next((w for w in self.layer_windows if w is not None), None)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, object], generation_config: Mapping[str, object] | None = None
    ) -> ModelConfig:
        """The config of a Hugging Face folder; raises ModelError on anything unsupported.

        `config` is config.json as transformers 4 or 5 writes it; `generation_config`, if the folder has
        one, adds end-of-text ids (chat models list the end of a turn only there).
        """
        model_type = config.get("model_type")
        text = config
        if model_type == "gemma3":
            text = _mapping(config, "text_config")
        families = {
            "llama": Family.LLAMA,
            "mistral": Family.MISTRAL,
            "qwen2": Family.QWEN2,
            "qwen3": Family.QWEN3,
            "gemma3": Family.GEMMA3,
            "gemma3_text": Family.GEMMA3,
            "opt": Family.OPT,
        }
        if not isinstance(model_type, str) or model_type not in families:
            raise ModelError(
                f"model_type is {model_type!r}; supported: {', '.join(sorted(families))}. "
                "docs/add_a_model.md says how to add one."
            )
        if config.get("quantization_config") or text.get("quantization_config"):
            raise ModelError(
                "config.json has a quantization_config; supported: unquantized safetensors, or a GGUF file"
            )
        family = families[model_type]
        ids = (text, config, generation_config or {})
        if family is Family.OPT:
            return _opt_from_hf(text, ids)
        return _decoder_from_hf(family, {**_HF_DEFAULTS[family], **text}, ids)

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, object],
        shapes: Mapping[str, Sequence[int]],
        rope_divisors: tuple[float, ...] | None = None,
    ) -> ModelConfig:
        """The config of a GGUF file; raises ModelError on anything unsupported.

        `shapes` are the file's tensors by name, rows first ([out, in]); some facts stand only there.
        `rope_divisors` is its rope_freqs.weight, where it has one.
        """
        arch = metadata.get("general.architecture")
        families = {"llama": Family.LLAMA, "qwen2": Family.QWEN2, "qwen3": Family.QWEN3}
        families["gemma3"] = Family.GEMMA3
        if not isinstance(arch, str) or arch not in families:
            raise ModelError(
                f"the GGUF architecture is {arch!r}; supported: {', '.join(sorted(families))} "
                "(Mistral files say llama). docs/add_a_model.md says how to add one."
            )
        if _integer(metadata, f"{arch}.expert_count", 0):
            raise ModelError("the GGUF file is a mixture of experts; supported: dense models")
        return _decoder_from_gguf(families[arch], arch, metadata, shapes, rope_divisors)


# What transformers fills in when config.json leaves it out (its own files often do, Gemma 3's above all).
_LLAMA_DEFAULTS: dict[str, object] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_HF_DEFAULTS: dict[Family, dict[str, object]] = {
    Family.LLAMA: {**_LLAMA_DEFAULTS, "max_position_embeddings": 2048},
    Family.MISTRAL: {**_LLAMA_DEFAULTS, "max_position_embeddings": 131072, "sliding_window": 4096},
    Family.QWEN2: {**_LLAMA_DEFAULTS, "max_position_embeddings": 32768, "max_window_layers": 28},
    Family.QWEN3: {**_LLAMA_DEFAULTS, "max_position_embeddings": 32768, "max_window_layers": 28}
    | {"head_dim": 128},
    Family.GEMMA3: {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
}

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}


def _decoder_from_hf(
    family: Family, c: Mapping[str, object], ids: Sequence[Mapping[str, object]]
) -> ModelConfig:
    gemma = family is Family.GEMMA3
    for feature in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if c.get(feature):
            raise ModelError(f"config.json sets {feature} = {c[feature]!r}, which is not supported")
    activation_key = "hidden_activation" if gemma else "hidden_act"
    activation = _activation(c.get(activation_key, "gelu_pytorch_tanh" if gemma else "silu"))
    hidden = _integer(c, "hidden_size")
    heads = _integer(c, "num_attention_heads")
    layers = _integer(c, "num_hidden_layers")
    head_dim = _integer(c, "head_dim", hidden // heads)
    bias = bool(c.get("attention_bias", False))
    rope, local_rope = _hf_ropes(family, c)
    scalar = _float(c, "query_pre_attn_scalar", float(head_dim)) if gemma else float(head_dim)
    return ModelConfig(
        family=family,
        vocab_size=_integer(c, "vocab_size"),
        hidden_size=hidden,
        embedding_size=hidden,
        intermediate_size=_integer(c, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_integer(c, "num_key_value_heads", heads),
        head_dim=head_dim,
        norm_eps=_float(c, "rms_norm_eps"),
        rope=rope,
        local_rope=local_rope,
        layer_windows=_hf_windows(family, c, layers),
        tie_embeddings=bool(c["tie_word_embeddings"]),
        qkv_bias=True if family is Family.QWEN2 else bias and family is not Family.MISTRAL,
        o_bias=bias and family not in (Family.QWEN2, Family.MISTRAL),
        mlp_bias=bool(c.get("mlp_bias", False)) and family is Family.LLAMA,
        qk_norm=family in (Family.QWEN3, Family.GEMMA3),
        embedding_scale=hidden**0.5 if gemma else 1.0,
        norm_weight_offset=1.0 if gemma else 0.0,
        sandwich_norms=gemma,
        activation=activation,
        attention_scale=scalar**-0.5,
        logit_softcap=_optional_float(c, "final_logit_softcapping") if gemma else None,
        max_context=_integer(c, "max_position_embeddings"),
        eos_ids=_all_ids(ids, "eos_token_id"),
    )


def _opt_from_hf(c: Mapping[str, object], ids: Sequence[Mapping[str, object]]) -> ModelConfig:
    if not c.get("layer_norm_elementwise_affine", True):
        raise ModelError("config.json sets layer_norm_elementwise_affine = false, which is not supported")
    activation = _activation(c.get("activation_function", "relu"))
    hidden = _integer(c, "hidden_size")
    heads = _integer(c, "num_attention_heads")
    if hidden % heads:
        raise ModelError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    layers = _integer(c, "num_hidden_layers")
    bias = bool(c.get("enable_bias", True))
    norm_first = bool(c.get("do_layer_norm_before", True))
    return ModelConfig(
        family=Family.OPT,
        vocab_size=_integer(c, "vocab_size"),
        hidden_size=hidden,
        embedding_size=_integer(c, "word_embed_proj_dim", hidden),
        intermediate_size=_integer(c, "ffn_dim"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        norm_eps=1e-5,  # torch.nn.LayerNorm's default; OPT's config has no field for it
        rope=None,
        layer_windows=(None,) * layers,
        tie_embeddings=bool(c.get("tie_word_embeddings", True)),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        activation=activation,
        attention_scale=(hidden // heads) ** -0.5,
        max_context=_integer(c, "max_position_embeddings", 2048),
        eos_ids=_all_ids(ids, "eos_token_id"),
        norm_first=norm_first,
        final_norm=norm_first and not c.get("_remove_final_layer_norm", False),
    )


def _hf_windows(family: Family, c: Mapping[str, object], layers: int) -> tuple[int | None, ...]:
    window = None if c.get("sliding_window") is None else _integer(c, "sliding_window")
    if family is Family.LLAMA:
        return (None,) * layers
    if family in (Family.QWEN2, Family.QWEN3) and not c.get("use_sliding_window", False):
        window = None
    kinds = c.get("layer_types")
    if isinstance(kinds, list):
        unknown = sorted({str(k) for k in kinds} - {"full_attention", "sliding_attention"})
        if unknown:
            raise ModelError(
                f"layer_types holds {unknown}; supported: 'full_attention' and 'sliding_attention'"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if family is Family.GEMMA3:
        pattern = _integer(c, "sliding_window_pattern")
        return tuple(window if (i + 1) % pattern else None for i in range(layers))
    if family is Family.MISTRAL:
        return (window,) * layers
    first = _integer(c, "max_window_layers")
    return tuple(window if i >= first else None for i in range(layers))


def _hf_ropes(family: Family, c: Mapping[str, object]) -> tuple[Rope, Rope | None]:
    """The global rope and the local one; `rope_parameters` is transformers 5, the other keys are 4."""
    theta = _float(c, "rope_theta", 10000.0)
    scaling = c.get("rope_scaling")
    parameters = c.get("rope_parameters")
    if family is not Family.GEMMA3:
        return _hf_rope(parameters if parameters is not None else scaling, theta, c), None
    local_theta = _float(c, "rope_local_base_freq", 10000.0)
    if parameters is None:
        return _hf_rope(scaling, theta, c), Rope(local_theta)
    if not isinstance(parameters, dict):
        raise ModelError(f"rope_parameters is {parameters!r}; expected one entry per layer type")
    full, local = parameters.get("full_attention"), parameters.get("sliding_attention")
    return _hf_rope(full, theta, c), _hf_rope(local, local_theta, c)


def _hf_rope(parameters: object, theta: float, c: Mapping[str, object]) -> Rope:
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict):
        raise ModelError(f"the rope parameters are {parameters!r}; expected a JSON object")
    theta = _float(parameters, "rope_theta", theta)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if _float(parameters, "partial_rotary_factor", _float(c, "partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(
            "partial_rotary_factor is not 1; only rotary embeddings of whole heads are supported"
        )
    if kind == "default" and not any(isinstance(v, dict) for v in parameters.values()):
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, linear_factor=_float(parameters, "factor"))
    if kind == "llama3":
        return Rope(
            theta,
            llama3=Llama3Scaling(
                factor=_float(parameters, "factor"),
                low_freq_factor=_float(parameters, "low_freq_factor"),
                high_freq_factor=_float(parameters, "high_freq_factor"),
                original_context=_integer(parameters, "original_max_position_embeddings"),
            ),
        )
    raise ModelError(f"the rope scaling is {parameters!r}; supported: default, linear, llama3")


def _decoder_from_gguf(
    family: Family,
    arch: str,
    metadata: Mapping[str, object],
    shapes: Mapping[str, Sequence[int]],
    rope_divisors: tuple[float, ...] | None,
) -> ModelConfig:
    gemma = family is Family.GEMMA3
    c = {key[len(arch) + 1 :]: value for key, value in metadata.items() if key.startswith(f"{arch}.")}
    hidden = _integer(c, "embedding_length")
    heads = _integer(c, "attention.head_count")
    layers = _integer(c, "block_count")
    head_dim = _integer(c, "attention.key_length", hidden // heads)
    if _integer(c, "attention.value_length", head_dim) != head_dim:
        raise ModelError("the GGUF file has key and value heads of different sizes, which is not supported")
    if _integer(c, "rope.dimension_count", head_dim) != head_dim:
        raise ModelError(
            f"the GGUF file rotates {c['rope.dimension_count']} of {head_dim} dimensions of a head; "
            "only rotary embeddings of whole heads are supported"
        )
    if c.get("attn_logit_softcapping"):
        raise ModelError("the GGUF file caps attention scores, which is not supported")
    if "token_embd.weight" not in shapes:
        raise ModelError("the GGUF file has no token_embd.weight; it is not a complete language model")
    window = _integer(c, "attention.sliding_window", 0) or None
    windows: tuple[int | None, ...] = (window,) * layers
    scalar = float(head_dim)
    if gemma:
        pattern = _integer(c, "attention.sliding_window_pattern", 6)
        windows = tuple(window if (i + 1) % pattern else None for i in range(layers))
        # No key holds query_pre_attn_scalar; of the Gemma 3 models only the 27B's differs from head_dim.
        scalar = hidden / heads if layers == 62 else scalar
    return ModelConfig(
        family=family,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        embedding_size=hidden,
        intermediate_size=_integer(c, "feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_integer(c, "attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=_float(c, "attention.layer_norm_rms_epsilon"),
        rope=_gguf_rope(c, 1e6 if gemma else 1e4, rope_divisors),
        local_rope=Rope(_float(c, "rope.freq_base_swa", 1e4)) if gemma else None,
        layer_windows=windows,
        tie_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        norm_weight_offset=0.0,  # the converter has added Gemma's 1 already
        sandwich_norms=gemma,
        activation=Activation.GELU_TANH if gemma else Activation.SILU,
        attention_scale=scalar**-0.5,
        logit_softcap=_optional_float(c, "final_logit_softcapping"),
        max_context=_integer(c, "context_length"),
        eos_ids=tuple(
            dict.fromkeys(
                token
                for kind in ("eos", "eot", "eom")
                for token in _all_ids((metadata,), f"tokenizer.ggml.{kind}_token_id")
            )
        ),
    )


def _gguf_rope(c: Mapping[str, object], theta: float, divisors: tuple[float, ...] | None) -> Rope:
    theta = _float(c, "rope.freq_base", theta)
    kind = c.get("rope.scaling.type", "linear" if "rope.scale_linear" in c else "none")
    if divisors is not None:
        if kind not in ("none", "llama3"):
            raise ModelError(f"the GGUF file has rope_freqs and {kind!r} scaling; supported: one of them")
        return Rope(theta, divisors=divisors)
    if kind == "none":
        return Rope(theta)
    if kind == "linear":
        return Rope(
            theta, linear_factor=_float(c, "rope.scaling.factor", _float(c, "rope.scale_linear", 1.0))
        )
    raise ModelError(f"the GGUF rope scaling is {kind!r}; supported: none, linear, or a rope_freqs tensor")


def _activation(name: object) -> Activation:
    if isinstance(name, str) and name in _ACTIVATIONS:
        return _ACTIVATIONS[name]
    raise ModelError(f"the activation is {name!r}; supported: {', '.join(sorted(_ACTIVATIONS))}")


def _mapping(c: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = c.get(key)
    if not isinstance(value, dict):
        raise ModelError(f"{key} is {value!r}; expected a JSON object. The config is damaged.")
    return value


def _integer(c: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = c.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{key} is {value!r}; expected an integer. The config is damaged or incomplete.")
    return value


def _float(c: Mapping[str, object], key: str, default: float | None = None) -> float:
    value = c.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ModelError(f"{key} is {value!r}; expected a number. The config is damaged or incomplete.")
    return float(value)


def _optional_float(c: Mapping[str, object], key: str) -> float | None:
    return None if c.get(key) is None else _float(c, key)


def _positive(name: str, value: int) -> None:
    if value <= 0:
        raise ModelError(f"{name} is {value}; expected at least 1. The config is damaged.")


def _all_ids(sources: Sequence[Mapping[str, object]], key: str) -> tuple[int, ...]:
    """Every token id under `key`, an integer or a list of them, each once, in order."""
    found: list[int] = []
    for source in sources:
        value = source.get(key)
        values = value if isinstance(value, list) else [value]
        found.extend(v for v in values if isinstance(v, int) and not isinstance(v, bool))
    return tuple(dict.fromkeys(found))
