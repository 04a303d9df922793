"""Registry of model families, by config.json's model_type and by the architecture of GGUF files.

A kind of model that is not in it is refused, with its relatives that run. Keys of config.json that nothing
reads are reported, or refused if they change another family's logits.
"""

import logging
import re
from collections.abc import Mapping
from typing import Final

from specinfer.errors import ModelError
from specinfer.models.config import ModelConfig
from specinfer.models.families import (
    falcon,
    falcon_h1,
    gemma,
    gemma3n,
    gemma4,
    gpt,
    hybrids,
    llama,
    llama4,
    mamba,
    mixtures,
)
from specinfer.models.fields import Fields, mapping
from specinfer.models.gguf_config import GgufFamily
from specinfer.models.hf_config import HfFamily, not_computed

_SORTS: Final = (
    (
        r"mamba|rwkv|jamba|zamba|hybrid|recurrent|lfm|plamo2|next$|linear|minimax$|xlstm|delta",
        "a recurrent hybrid, whose layers keep a state that no native layer has",
    ),
    (
        r"vl$|vl_|vision|llava|clip|vit|siglip|idefics|paligemma|pixtral|mllama|vlm|4mm$|3n$|gemma4|glm4v",
        "a model with a vision tower, whose text part is of no family that specinfer has",
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
    "qwen=Qwen 2.5, Qwen 3 and Qwen 3.5|granite=Granite 3 and Granite 4|falcon=Falcon 3 and Falcon-H1"
    "|gemma=Gemma 3|recurrent_gemma=Gemma 3|paligemma=Gemma 3|lfm=LFM2 and LFM2.5|llama=Llama 3 and 4"
    "|mllama=Llama 3|deepseek=DeepSeek-R1-Distill|mistral=Mistral Small 24B|pixtral=Mistral Small 24B"
    "|phi=Phi 3.5 and Phi 4|glm=GLM-4-0414|chatglm=GLM-4-0414|aya=Command R7B|cohere=Command R7B"
    "|olmo=OLMo 2 and OLMo 3|smol=SmolLM2 and SmolLM3|nemotron=Nemotron 3 Nano|ernie=ERNIE 4.5 0.3B"
    "|exaone=EXAONE 4|gpt=gpt-oss"
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


_MODULES: Final = (llama, gemma, gemma3n, gemma4, mixtures, llama4, gpt, falcon, hybrids, mamba, falcon_h1)
HF_FAMILIES: Final[Mapping[str, HfFamily]] = {
    kind: family
    for module in _MODULES
    for family in module.HF
    for kind in (family.family.value, *family.also)  # a later row of a family has its name
}
_SENSES: Final = re.compile("vision|image|video|audio|speech")  # in keys for images and sound
# Sizes that the text_config of LLaVA and others omits, by its model_type: those of transformers' classes.
_SIZES: Final = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_OMITTED: Final[Mapping[object, Fields]] = {
    "llama": {**_SIZES, "intermediate_size": 11008},
    "mistral": {**_SIZES, "intermediate_size": 14336},
}
_NOT_CAUSAL: Final = ("paligemma",)  # their prompts see what follows, whatever the text part is
GGUF_FAMILIES: Final[Mapping[str, GgufFamily]] = {
    family.architecture: family for module in _MODULES for family in module.GGUF
}


def other_senses(config: Fields) -> list[str]:
    """The keys of config.json for the parts of a model that read images or sound."""
    return [key for key in config if key.endswith("_config") and _SENSES.search(key)]


def text_fields(config: Fields) -> Fields:
    """The fields of a model's text decoder, with its own model_type.

    They are in `text_config` if the model reads images or sound, too, or among its other fields. Embeddings
    of such a model are tied if either part says so, or neither says anything.
    """
    if config.get("text_config") is None or config.get("model_type") in _NOT_CAUSAL:
        return {key: value for key, value in config.items() if not _SENSES.search(key)}
    text, key = mapping(config, "text_config"), "tie_word_embeddings"
    tied = [part[key] for part in (text, config) if part.get(key) is not None]
    omitted = _OMITTED.get(text.get("model_type"), {})
    return {"model_type": config.get("model_type"), **omitted, **text, key: any(tied) or not tied}


def hf_family(config: Fields) -> HfFamily:
    """The family of a config.json's text decoder; raises ModelError for an unknown model_type."""
    kind, whole = text_fields(config).get("model_type"), config.get("model_type")
    if not isinstance(kind, str) or kind not in HF_FAMILIES:
        inside = "" if kind == whole else f", the text part of {whole!r},"
        raise ModelError(f"model_type {kind!r}{inside} is {_what(kind)}")
    return HF_FAMILIES[kind]


def gguf_family(metadata: Fields) -> GgufFamily:
    """The family of a GGUF file; raises ModelError for an unknown architecture."""
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in GGUF_FAMILIES:
        raise ModelError(f"the GGUF architecture {kind!r} is {_what(kind)}")
    return GGUF_FAMILIES[kind]


def _what(kind: object) -> str:
    what = sort_of(kind) or "of no family that specinfer has"
    return f"{what}; {running_relative(kind)}, docs/add_a_model.md says how to add one"


def config_from_hf(config: Fields, generation_config: Fields | None = None) -> ModelConfig:
    """The config of a Hugging Face folder; raises ModelError for anything unsupported.

    `config` is config.json as written by transformers 4 or 5; `generation_config`, if the folder has one,
    adds end-of-text ids (chat models list the end of a turn only there).
    """
    text = text_fields(config)
    return hf_family(config).config(text, (text, config, generation_config or {}))


_LOG = logging.getLogger(__name__)

# Keys whose values no logit depends on.
HARMLESS: Final = {
    *("architectures", "dtype", "torch_dtype", "transformers_version", "model_type", "_name_or_path"),
    *("use_cache", "bos_token_id", "pad_token_id", "sep_token_id", "initializer_range", "init_device"),
    *("attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout", "classifier_dropout"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "emb_pdrop", "dropout", "layerdrop", "init_std"),
    *("output_hidden_states", "output_attentions", "return_dict", "problem_type", "id2label", "label2id"),
    *("chunk_size_feed_forward", "pretraining_tp", "cross_attention_hidden_size", "is_decoder"),
    *("reorder_and_upcast_attn", "n_ctx", "task_specific_params", "summary_type", "summary_use_proj"),
    *("summary_activation", "summary_proj_to_labels", "summary_first_dropout", "embedding_fraction"),
    # Of training.
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "altup_coef_clip"),
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),  # sums are float32 here anyway
    *("is_encoder_decoder", "auto_map", "quantization_config", "tokenizer_class", "is_llama_config"),
    *("_attn_implementation_autoset", "unsloth_version", "unsloth_fixed", "transformers.js_config"),
    *("_attn_implementation", "attn_implementation", "use_flash_attn", "cache_implementation", "prefix"),
    *("init_config", "activation_dropout", "inference_runner", "pre_allocate_kv_cache", "pad_key_length"),
    *("validate_runner_input", "max_sequence_length", "seq_length", "model_max_length", "tokenizer_name"),
    *("learned_pos_emb", "use_embedding_sharing", "use_parallel_embedding"),
    *("chunk_size", "mamba_chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "residual_in_fp32"),
    *("num_logits_to_keep", "z_loss_coefficient", "rescale_prenorm_residual", "moe_shared_expert_overlap"),
    *("time_step_floor", "time_step_min", "time_step_max", "num_nextn_predict_layers"),
    *("mtp_layers_block_type", "mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    *("normalization_function", "init_method", "_model_name_or_path", "_commit_hash", "attn_output_gate"),
    # Defaults of generation.
    *("max_length", "min_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p"),
    *("repetition_penalty", "num_beams", "length_penalty", "typical_p", "no_repeat_ngram_size"),
}
# Keys that a family reads, but not beside every value of other keys, and other names of keys beside them.
SOMETIMES_READ: Final = {
    *("rope_interleaved", "initial_context_length", "experts_per_token", "rope_pct", "norm_eps", "ff_factor"),
    *("hidden_activation", "hidden_act", "activation_function", "layer_norm_epsilon", "norm_type"),
    *("scale_attn_weights", "layer_switch", "order_of_interleaved_layers", "position_embedding_type"),
    *("use_gated_activation", "use_parallel_block", "rotary_pct", "mlp_type", "full_attention_interval"),
    *("sliding_window", "_sliding_window_pattern", "sliding_window_pattern", "use_sliding_window"),
    *("max_window_layers", "no_rope_layer_interval", "rope_theta", "rope_parameters", "rope_scaling"),
    *("original_max_position_embeddings", "_remove_final_layer_norm", "num_key_value_heads", "num_kv_heads"),
    *("multi_query", "intermediate_size", "layer_types", "head_dim", "partial_rotary_factor"),
    *("block_ffn_dim_multiplier", "block_multiple_of", "block_auto_adjust_ff_dim", "full_attn_idxs"),
    *("use_double_wide_mlp", "vocab_size_per_layer_input", "global_head_dim", "num_global_key_value_heads"),
}
# Keys that change the logits of families that read them.
SWITCHES: Final = {
    *("residual_multiplier", "embedding_multiplier", "attention_multiplier", "logits_scaling", "scale_emb"),
    *("n_routed_experts", "n_shared_experts", "routed_scaling_factor", "n_group", "topk_group"),
    *("scoring_func", "alibi", "use_alibi", "q_lora_rank", "kv_lora_rank", "final_logit_softcapping"),
}
# Likewise, but only in models without experts: a mixture may have both names of their number.
EXPERTS: Final = {"num_experts", "num_local_experts", "num_experts_per_tok"}
_NEUTRAL: Final[tuple[object, ...]] = (None, False, 0, 1, "", [], {}, "softmax")


def read_config(config: Fields, generation_config: Fields | None = None) -> ModelConfig:
    """The config of a folder, as `config_from_hf`; logs keys that it does not read.

    A known switch among them raises ModelError. A key counts as read if another value gives another config
    or an error. Harmless keys, keys of `SOMETIMES_READ` and values of `_NEUTRAL` are not reported.
    """
    made, family, fields = config_from_hf(config, generation_config), hf_family(config), text_fields(config)

    def is_unread(key: str) -> bool:
        changed = {**fields, key: other_value(fields[key])}
        try:
            return family.config(changed, (changed, config, generation_config or {})) == made
        except ModelError:
            return False

    unread = [
        key
        for key, value in fields.items()
        if key not in HARMLESS | SOMETIMES_READ | family.passed_over
        if value is True or value not in _NEUTRAL
        if is_unread(key)
    ]
    switches = SWITCHES if made.experts is not None else SWITCHES | EXPERTS
    for key in unread:
        if key in switches:
            raise not_computed(key, fields[key], fields["model_type"])
    if unread:
        _LOG.warning("config.json sets %s, which specinfer does not know and ignores", ", ".join(unread))
    return made


def other_value(value: object) -> object:
    """A value of the same type that differs."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 3 * value + 1
    if isinstance(value, float):
        return value / 2 + 0.01
    if isinstance(value, str):
        return f"no {value}"
    return 5
