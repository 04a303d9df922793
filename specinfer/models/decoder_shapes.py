"""decoder_shapes: the names and shapes of the tensors that a decoder asks for."""

from specinfer.kernels.recurrence_config import LayerKind
from specinfer.models.config import ModelConfig, NormPlace, QkNorm
from specinfer.models.experts import EXPERT_FACTORS, ROUTER_NORM, expert_matrices, mlp_matrices
from specinfer.models.per_layer import altup_shapes, per_layer_shapes
from specinfer.models.recurrent import recurrent_shapes


def norm_names(config: ModelConfig, layer: int) -> tuple[str | None, str | None, str | None, str | None]:
    """The names of a layer's norms: before attention, before the MLP, after attention, after the MLP.

    The layer is counted in the whole model. A half of a layer that is missing has no norm.
    """
    first = config.kind_of(layer - config.stage.first) is not LayerKind.NONE
    if not first or layer in config.layers_without_mlp:
        return ("input_layernorm", None, None, None) if first else (None, "input_layernorm", None, None)
    if config.norm_place is NormPlace.BOTH:
        return (
            *("input_layernorm", "pre_feedforward_layernorm"),
            *("post_attention_layernorm", "post_feedforward_layernorm"),
        )
    if config.norm_place is NormPlace.BEHIND:
        return None, None, "post_attention_layernorm", "post_feedforward_layernorm"
    return "input_layernorm", None if config.shared_norm else "post_attention_layernorm", None, None


def decoder_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors a Decoder of this config asks for, by name, with their shapes."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    if config.stage.begins:
        shapes["model.embed_tokens.weight"] = config.vocab_size, hidden
        if not config.tie_embeddings:
            shapes["lm_head.weight"] = config.vocab_size, hidden
        if config.learned_positions:
            positions = config.max_context + config.position_offset
            shapes["model.embed_positions.weight"] = positions, hidden
    norms = ["model.norm"]
    if config.per_layer is not None:
        shapes |= per_layer_shapes(config, config.per_layer)
    if config.altup is not None:
        shapes |= altup_shapes(config, config.altup)
    for i in range(config.stage.first, config.stage.end):
        layer = i - config.stage.first
        prefix = f"model.layers.{i}"
        norms += [f"{prefix}.{name}" for name in norm_names(config, i) if name is not None]
        matrices, norms_of_heads = _attention_shapes(config, layer)
        shapes |= {f"{prefix}.{name}.weight": (size,) for name, size in norms_of_heads.items()}
        if matrices and config.attention_sinks:
            shapes[f"{prefix}.self_attn.sinks"] = (config.num_heads,)
        if layer in config.recurrent_layers and config.recurrence is not None:
            own = recurrent_shapes(config.recurrence, hidden)
            shapes |= {f"{prefix}.mixer.{name}": shape for name, shape in own.items()}
        experts = config.experts_of(i)
        if experts is not None and experts.choice_bias:
            shapes[f"{prefix}.mlp.gate.choice_bias"] = (experts.count,)
        if config.output_factor:
            shapes[f"{prefix}.layer_scalar"] = (1,)
        if i not in config.layers_without_mlp:
            inner = config.inner_of(layer)
            mlp = [] if experts is None else expert_matrices(experts, hidden)
            if experts is None or experts.beside:
                mlp += mlp_matrices("mlp", inner, hidden, gated=config.gated_mlp, bias=config.mlp_bias)
            if experts is not None and experts.beside:
                numbers = ("post_feedforward", 1), ("post_feedforward", 2), ("pre_feedforward", 2)
                norms += [f"{prefix}.{place}_layernorm_{number}" for place, number in numbers]
                shapes[f"{prefix}.{ROUTER_NORM}"] = (hidden,)
                shapes[f"{prefix}.{EXPERT_FACTORS}"] = (experts.count,)
            matrices = [*matrices, *mlp]
        for name, rows, columns, bias in matrices:
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
    for name in norms:
        shapes[f"{name}.weight"] = (hidden,)
        if config.norm_bias:
            shapes[f"{name}.bias"] = (hidden,)
    return shapes


def _attention_shapes(
    config: ModelConfig, layer: int
) -> tuple[list[tuple[str, int, int, bool]], dict[str, int]]:
    """The matrices of a layer's attention: name, rows, columns, whether they have a bias; and its norms."""
    if layer not in config.attention_layers:
        return [], {}
    rows, hidden = config.query_rows(layer), config.hidden_size
    matrices = [(f"self_attn.{name}", size, hidden, config.qkv_bias) for name, size in rows.items()]
    sizes = {QkNorm.WHOLE: rows, QkNorm.HEAD: dict.fromkeys(rows, config.heads_of(layer).head_dim)}
    norms = {
        f"self_attn.{name[0]}_norm": size
        for name, size in sizes.get(config.qk_norm, {}).items()
        if name in ("q_proj", "k_proj")
    }
    return [*matrices, ("self_attn.o_proj", hidden, rows["q_proj"], config.o_bias)], norms
