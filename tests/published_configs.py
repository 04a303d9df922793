"""config.json of heads in their authors' formats, made from that of the `speculators` library."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
LAYERS = 8
EAGLE_LAYERS = "eagle_aux_hidden_state_layer_ids"


def flat(written: Json, *names: str) -> Json:
    """Return the layers' config and the other fields of a flat layout."""
    layers = dict(written["transformer_layer_config"])
    for key in ("is_causal", "layer_types", "use_sliding_window", "sliding_window"):
        layers.pop(key, None)
    return layers | {name: written[name] for name in names}


def eagle(written: Json) -> Json:
    """SafeAILab's EAGLE and SpecForge: the taps are layers 2, L // 2 and L - 3."""
    names = ("draft_vocab_size", "fc_norm", "norm_output")
    return flat(written, *names) | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}


def eagle_with_taps(written: Json) -> Json:
    """vLLM: layer i is tapped at its input."""
    return eagle(written) | {EAGLE_LAYERS: written[EAGLE_LAYERS]}


def eagle_with_layers(written: Json) -> Json:
    """SpecForge: its layer i has the output that we call tap i + 1."""
    ids = [tap - 1 for tap in written[EAGLE_LAYERS]]
    return eagle(written) | {"eagle_config": {"use_aux_hidden_state": True, EAGLE_LAYERS: ids}}


def eagle_of_authors(written: Json) -> Json:
    """SafeAILab's release (yuhuili/EAGLE3-LLaMA3.1-Instruct-8B): only its tensors show the kind."""
    return flat(written, "draft_vocab_size") | {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bos_token_id": 1},
        **{"eos_token_id": [2, 3], "num_hidden_layers": 1, "pad_token_id": 0, "tie_word_embeddings": False},
        **{"torch_dtype": "float16", "use_cache": True},
    }


def eagle_of_vicuna(written: Json) -> Json:
    """The same with the target's number of layers: yuhuili/EAGLE3-Vicuna1.3-13B."""
    return eagle_of_authors(written) | {"num_hidden_layers": LAYERS}


def angelslim(written: Json) -> Json:
    """AngelSlim: named as a class of vLLM."""
    return eagle(written) | {"architectures": ["Eagle3LlamaForCausalLM"], "num_hidden_layers": LAYERS}


def nvidia(written: Json) -> Json:
    """NVIDIA's Model Optimizer, mainly for gpt-oss: without named layers the default ones are tapped."""
    eagle_fields = {
        EAGLE_LAYERS: [],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
    }
    return flat(written, "draft_vocab_size") | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": eagle_fields,
        "mlp_bias": False,
        "pretraining_tp": 1,
    }


def nvidia_with_layers(written: Json) -> Json:
    """The same for a Llama 4: its layer i has the output that we call tap i + 1."""
    described = nvidia(written) | {"model_type": "llama4_text"}
    described["eagle_config"][EAGLE_LAYERS] = [tap - 1 for tap in written[EAGLE_LAYERS]]
    return described


def automodel(written: Json) -> Json:
    """NVIDIA's Automodel: the target's config and more; tensor names begin with `model.`."""
    names = ("draft_vocab_size", "target_hidden_size")
    return flat(written, *names) | {
        "architectures": ["LlamaEagle3DraftModel"],
        "num_hidden_layers": LAYERS,
        "layer_types": ["full_attention"] * LAYERS,
        "tie_word_embeddings": False,
    }


def eagle_of_qwen(written: Json) -> Json:
    """Layers of Qwen's kind and the target's fields, with a sliding window."""
    return eagle(written) | {
        "model_type": written["transformer_layer_config"]["model_type"],
        "num_hidden_layers": LAYERS,
        "max_window_layers": 28,
        "sliding_window": 131072,
        "use_sliding_window": False,
    }


def eagle_of_phi(written: Json) -> Json:
    """SpecForge for Phi-4: layers are Llama's, whatever model_type is."""
    return eagle(written) | {"model_type": "phi3", "tie_word_embeddings": True}


def layers_of_block(written: Json) -> list[int]:
    """DFlash and DSpark: their layer i has the output that we call tap i + 1."""
    return [tap - 1 for tap in written["aux_hidden_state_layer_ids"]]


def dflash(written: Json) -> Json:
    """z-lab's format."""
    own = {"mask_token_id": written["mask_token_id"], "target_layer_ids": layers_of_block(written)}
    return flat(written, "block_size") | {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": own,
        "num_target_layers": LAYERS,
        "layer_types": ["full_attention"] * 2,
    }


def newer_dflash(written: Json) -> Json:
    """The same with a nested block size."""
    config = dflash(written)
    config["dflash_config"]["block_size"] = config.pop("block_size")
    return config


def full_dflash(written: Json) -> Json:
    """With all optional fields, switched off."""
    config = dflash(written)
    config["dflash_config"] |= {
        **{"projector_type": "dflash", "attention_mode": "gqa", "causal_head": False, "markov_rank": 0},
        **{"markov_head_type": "vanilla", "enable_confidence_head": False, "conv_kernel_size": 0},
        **{"output_multiplier": 1.0, "final_logit_softcapping": None, "num_anchors": 512},
    }
    return config


def causal_dflash(written: Json) -> Json:
    config = dflash(written)
    config["dflash_config"]["causal"] = True
    return config


def jetspec(written: Json) -> Json:
    """hao-ai-lab's format."""
    config = newer_dflash(written)
    config["dflash_config"]["causal_head"] = True
    return config


def dspark(written: Json) -> Json:
    """DeepSpec's format."""
    return flat(written, "block_size", "mask_token_id", "markov_rank", "markov_head_type") | {
        **CONFIDENCE,
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": layers_of_block(written),
        "layer_types": ["full_attention"] * 2,
        "num_anchors": 512,
    }


CONFIDENCE = {"enable_confidence_head": True, "confidence_head_with_markov": True}  # ignored when read
MARKOV = ("markov_rank", "markov_head_type")


def nested_dspark(written: Json) -> Json:
    """SpecForge: all fields nested except the layers."""
    config = dflash(written) | {"architectures": ["DSparkDraftModel"], "target_hidden_size": None}
    config["dflash_config"] |= {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "confidence_head_alpha": 1.0,
        **CONFIDENCE,
        **{name: written[name] for name in MARKOV},
    }
    return config


def nested_dspark_for_sglang(written: Json) -> Json:
    """The same after SpecForge's conversion for SGLang: layers and mask token keep their place."""
    return nested_dspark(written) | {
        "architectures": ["Qwen3DSparkModel"],
        **CONFIDENCE,
        **{name: written[name] for name in MARKOV},
    }
