"""Models that read images or sound, too, run as text models: our logits are those of transformers' text.

The rope of the VL models has sections for time, height and width, whose positions are equal in texts.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specinfer.errors import ModelError
from specinfer.models.open_model import open_model
from specinfer.runtime.batch import Rows
from tests.kernels import NAMES
from tests.loading import load
from tests.quantized_folders import FORMATS

from . import test_against_transformers as parity
from .families import CASES
from .test_against_transformers import CONTIGUOUS, PROMPT, SCATTERED, TOLERANCE, logits_of, runner_of

_SIDE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_SIGLIP = {**_SIDE, "image_size": 28, "patch_size": 14}
_QWEN_VISION = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32}
_QWEN_VISION |= {"patch_size": 4, "deepstack_visual_indexes": [0]}
_QWEN2_VISION = {"embed_dim": 16, "depth": 1, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 32}
_AUDIO = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
_AUDIO |= {"num_mel_bins": 8, "max_source_positions": 20}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}  # heads of 16
_OF_8 = {**_SECTIONS, "mrope_section": [2, 1, 1]}  # heads of 8 elements
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
_MOE = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
_LLAMA4_VISION = {**_SIGLIP, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
# Class of transformers, the text part by a case of families.py with other fields, and the other part.
TOWERS = {
    "gemma3": ("Gemma3", "gemma3", {}, {"vision_config": _SIGLIP}),
    "qwen2_vl": ("Qwen2VL", "qwen2", {"rope_parameters": _OF_8}, {"vision_config": _QWEN2_VISION}),
    "qwen2_5_vl": ("Qwen2_5_VL", "qwen2", {"rope_parameters": _OF_8}, {"vision_config": _QWEN_VISION}),
    "qwen3_vl": (
        *("Qwen3VL", "qwen3", {"rope_parameters": {**_SECTIONS, "mrope_interleaved": True}}),
        {"vision_config": _QWEN_VISION},
    ),
    "qwen3_vl_moe": (
        *("Qwen3VLMoe", "qwen3", {**_MOE, "rope_parameters": {**_SECTIONS, "mrope_interleaved": True}}),
        {"vision_config": _QWEN_VISION},
    ),
    "mistral3": ("Mistral3", "mistral-full", {"model_type": "mistral"}, {"vision_config": _SIGLIP}),
    "ministral3": (
        *("Mistral3", "mistral-full", {"model_type": "ministral3", "rope_parameters": _YARN, "head_dim": 8}),
        {"vision_config": _SIGLIP},
    ),
    "llava": (
        *("Llava", "llama", {"model_type": "llama", "intermediate_size": 64}),
        {"vision_config": _SIGLIP},
    ),
    "llama4": ("Llama4", "llama4", {}, {"vision_config": _LLAMA4_VISION}),
    "smolvlm": ("SmolVLM", "llama", {"model_type": "llama"}, {"vision_config": _SIGLIP}),
    "qwen2_audio": ("Qwen2Audio", "qwen2", {"model_type": "qwen2"}, {"audio_config": _AUDIO}),
}


def save_tower(name, folder, *, tied, **saving):
    """Save a random model of that kind and return it, float32; `saving` are options of save_pretrained."""
    import transformers  # seconds, which only those who make such a model should wait

    kind, text, fields, other = TOWERS[name]
    config = getattr(transformers, f"{kind}Config")(
        text_config={**CASES[text][1], **fields}, **other, tie_word_embeddings=tied
    )
    config._attn_implementation = "eager"
    torch.manual_seed(11)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.tie_weights()
    model.save_pretrained(folder, **saving)
    return model


def changed_config(folder, change):
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("name", "tied", "run"),
    [(name, (i + j) % 2 == 0, run) for i, name in enumerate(TOWERS) for j, run in enumerate(NAMES)],
)
def test_a_prompt_its_tokens_and_a_tree(name, tied, run, tmp_path, caplog):
    theirs = save_tower(name, tmp_path, tied=tied)
    ours = load(tmp_path, run)
    assert ours.config.tie_embeddings == (
        theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    )
    [line] = [one for one in caplog.messages if "runs as a text model" in one]
    assert f"({next(iter(TOWERS[name][3]))})" in line
    prompt = logits_of(theirs, PROMPT)
    tree = torch.stack([logits_of(theirs, PROMPT + path)[-1] for path in parity.TREE_PATHS])
    for what, got, want in (
        ("prompt", runner_of(ours).forward([Rows(PROMPT, 0, CONTIGUOUS, 0)]), prompt),
        ("tokens", parity.each_token(ours, SCATTERED), prompt),
        ("tree", parity.each_node(ours, SCATTERED), tree),
    ):
        assert (got - want).abs().max() <= TOLERANCE * want.std(), what


def test_experts_are_read_in_either_order_of_dimensions(tmp_path):
    """Published ones have a row for each input."""
    save_tower("qwen3_vl_moe", tmp_path, tied=False)
    name, saved = "model.layers.1.mlp.experts.3.up_proj.weight", load_file(tmp_path / "model.safetensors")
    want = open_model(tmp_path).read_rows(name, 0, 24)
    for stack in [name for name in saved if "experts" in name]:
        saved[stack] = saved[stack].mT.contiguous()
    save_file(saved, tmp_path / "model.safetensors")
    assert torch.equal(open_model(tmp_path).read_rows(name, 0, 24), want)


def test_shards_without_text_are_not_opened(tmp_path):
    theirs = save_tower("mistral3", tmp_path, tied=False, max_shard_size="6KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    with_text = {file for name, file in index.items() if name.startswith("language_model.")}
    others = {*index.values()} - with_text
    assert with_text
    assert others
    for file in others:
        (tmp_path / file).write_bytes(b"no safetensors")
    got = runner_of(load(tmp_path)).forward([Rows(PROMPT, 0, CONTIGUOUS, 0)])
    torch.testing.assert_close(got, logits_of(theirs, PROMPT), atol=TOLERANCE, rtol=0)


def test_every_layout_of_names_is_read(tmp_path):
    """Modules of the text part, and the place of the output layer, differ between releases."""
    save_tower("llava", tmp_path, tied=False)
    want = open_model(tmp_path).shapes
    saved = load_file(tmp_path / "model.safetensors")
    for body, head in (
        ("language_model.model.", "language_model.lm_head."),
        ("model.language_model.", "lm_head."),
        ("model.text_model.", "lm_head."),
        ("model.", "lm_head."),
    ):
        renamed = {
            name.replace("language_model.model.", body, 1).replace("language_model.lm_head.", head, 1): one
            for name, one in saved.items()
        }
        save_file(renamed, tmp_path / "model.safetensors")
        assert open_model(tmp_path).shapes == want, body


def test_a_config_without_a_part_for_the_text(tmp_path):
    """As Qwen2-VL and Qwen2.5-VL are published."""
    theirs = save_tower("qwen2_5_vl", tmp_path, tied=False)
    saved = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): one
        for name, one in saved.items()
    }
    save_file(renamed, tmp_path / "model.safetensors")

    def flat(config):
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        return {**text, **config, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}

    changed_config(tmp_path, flat)
    got = runner_of(load(tmp_path)).forward([Rows(PROMPT, 0, CONTIGUOUS, 0)])
    torch.testing.assert_close(got, logits_of(theirs, PROMPT), atol=TOLERANCE, rtol=0)


def test_quantized_text_beside_a_plain_tower(tmp_path):
    for form in ("gptq", "awq", "w4a16", "fp8-tensor", "nf4"):
        folder = tmp_path / form
        save_tower("llava", folder, tied=False)
        stored, generator, floats = {}, torch.Generator().manual_seed(5), {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            stored[name] = tensor
            if name.startswith("language_model.") and "_proj." in name:
                pieces, floats[name.removeprefix("language_model.")] = FORMATS[form].make(tensor, generator)
                del stored[name]
                stored |= {name.removesuffix("weight") + end: piece for end, piece in pieces.items()}
        save_file(stored, folder / "model.safetensors")
        changed_config(folder, lambda config, said=FORMATS[form].said: config | {"quantization_config": said})
        opened = open_model(folder)
        for name, want in floats.items():
            torch.testing.assert_close(opened.read_rows(name, 0, len(want)), want, msg=f"{form}: {name}")


def test_parts_that_do_not_run_are_named(tmp_path):
    save_tower("llava", tmp_path, tied=True)
    for kind, text, message in (
        ("gemma3n", "gemma3n_unknown", "'gemma3n_unknown', the text part of 'gemma3n', is of no family"),
        ("paligemma", "gemma", "'paligemma' is a model with a vision tower, whose text part is of no fam"),
    ):

        def other(config, kind=kind, text=text):
            return config | {"model_type": kind, "text_config": config["text_config"] | {"model_type": text}}

        changed_config(tmp_path, other)
        with pytest.raises(ModelError, match=message):
            open_model(tmp_path)
