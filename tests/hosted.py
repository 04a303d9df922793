"""Tiny random models of every decoder in transformers, made from configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specinfer.check.promise import Effort, check_promise
from specinfer.kernels.choice import TORCH, Kernels
from specinfer.llm import LLM
from specinfer.models.hosted.skeleton import without_memory
from specinfer.models.language_model import LanguageModel
from specinfer.models.open_model import open_model
from specinfer.models.weights import load_model
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.runner import ModelRunner
from tests.engines import ENGINE
from tests.tiny_models import write_byte_tokenizer

# Sizes under their names in configs. Heads and MLPs are whole or half vectors of 64 elements, as in published
# models.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 160),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 128
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "dff"), 256),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads"), 2),
    "head_dim": 32,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 6),
    # Latent attention.
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 32
    ),
    "qk_head_dim": 64,
    # Experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k", "top_k"), 2),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 64
    ),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "n_shared_experts"), 1),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), 1),
    "eos_token_id": 2,
    "is_decoder": True,
    "num_kv_shared_layers": 0,
    "attention_multiplier": 32**-0.5,
    "default_language": "en_XX",
}
# Values of single kinds, whose defaults do not fit these sizes or describe no published model.
_OWN: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 16},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 128, "ffn_hidden_size": 64, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"ffn_hidden_size": 256, "zero_expert_num": 2},
    "mamba2": {"head_dim": 64},
    "reformer": {"axial_pos_embds_dim": [64, 64]},
    "xlm": {"emb_dim": 128, "causal": True},
    "zamba2": {"num_hidden_layers": 54},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(kind: str, **more: Any) -> Any:
    """Return a tiny config of a model_type: its defaults except for sizes; raises what its class raises."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    known = made().to_dict()
    sizes = {**SIZES, **more}
    if "kv_lora_rank" in known:  # latent attention makes keys and values of every head
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return made(**{**{name: value for name, value in sizes.items() if name in known}, **_OWN.get(kind, {})})


def save_tiny(kind: str, folder: Path, **more: Any) -> Any:
    """Save a tiny random model of a model_type by transformers to `folder`, without a tokenizer."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    torch.manual_seed(7)
    config = tiny_config(kind, **more)
    config.dtype = torch.float32
    config.architectures = None
    transformers.logging.set_verbosity_error()
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with without_memory(torch.float32):
        size = sum(one.numel() for one in model_class(tiny_config(kind, **more)).parameters())
    if size > _MOST:
        raise ValueError(f"{size / 1e6:.0f} million parameters; its config has other sizes than most")
    model = model_class._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            elif "norm" in name.lower() or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def failed_check(folder: Path) -> str | None:
    """Return what fails first in `specinfer check` on a folder of `save_tiny`, or None.

    The target is in bfloat16; the drafts are `self`, in int4, and lookups. Writes a tokenizer to the folder.
    """
    write_byte_tokenizer(folder, SIZES["vocab_size"])
    options: dict[str, Any] = {**ENGINE, "dtype": "bfloat16", "drafts": ("self",), "lookup": True}
    with LLM(folder, model_impl="transformers", **options) as llm:
        failed = (one for one in check_promise(llm, _PROMPTS, _EFFORT) if not one.passed)
        return next((one.name for one in failed), None)


def load_hosted(folder: Path, kernels: Kernels = TORCH, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """Load our model of a folder, through transformers' code."""
    opened = open_model(folder, "transformers")
    return load_model(opened, dtype=dtype, device=torch.device("cpu"), kernels=kernels)


PROMPT = [5, 17, 40, 3, 88, 61, 12, 12, 70, 29, 9, 54]
_PROMPTS = [[7, 8, 9, 7] * 5, [*range(30, 40)], PROMPT]  # the first is longer than a block
_EFFORT = Effort(max_tokens=24, samples=16, num_single=2)
_BLOCK = 4
_TABLE = [6, 2, 9, 1, 5, 0, 3, 4, 7, 8]
_OUTPUT = 4  # output tokens of a text
_MOST = 1 << 25  # max parameters of a tiny model


def difference(theirs: Any, ours: LanguageModel) -> float:
    """Return the largest difference from transformers' logits over a prompt, relative to their deviation
    if above 1.
    """
    with torch.no_grad():
        want = theirs(torch.tensor([PROMPT]), use_cache=False).logits[0]
    return float((logits_of(ours).float() - want).abs().max() / want.std().clamp(min=1))


def logits_of(ours: LanguageModel) -> torch.Tensor:
    """Return the logits after every prompt token."""
    return _runner(ours).forward([Rows(PROMPT, 0, _TABLE, 0)])


def same_with_a_tree(ours: LanguageModel) -> bool:
    """True if a text has bitwise equal logits token by token and as nodes of a tree."""
    text, logits, runner = list(PROMPT), list[torch.Tensor](), _runner(ours)
    made = runner.forward([chain_rows(PROMPT, 0, _TABLE, logits=True)])
    for _ in range(_OUTPUT):
        text.append(int(made[0].argmax()))
        logits.append(made[0])
        made = runner.forward([chain_rows(text[-1:], len(text) - 1, _TABLE, logits=True)])
    logits.append(made[0])
    # The prompt's last token is the root. Each node of the text has a sibling before and after it.
    tokens, parents, path = [PROMPT[-1]], [-1], [0]
    for token in text[len(PROMPT) :]:
        above = path[-1]
        path.append(len(tokens) + 1)
        tokens += [(token + 1) % 90, token, (token + 2) % 90]
        parents += [above] * 3
    runner = _runner(ours)
    runner.forward([chain_rows(PROMPT[:-1], 0, _TABLE, logits=False)])
    of_tree = runner.forward([Rows(tokens, len(PROMPT) - 1, _TABLE, 0, parents)])
    return torch.equal(of_tree[path], torch.stack(logits))


def _runner(model: LanguageModel) -> ModelRunner:
    return ModelRunner(model, num_blocks=10, block_size=_BLOCK)
