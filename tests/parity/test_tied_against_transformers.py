"""Whether the output layer is the embeddings: every flag with every tensor, as transformers reads them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specinfer.errors import ModelFileError
from specinfer.models.open_model import open_model
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner
from tests.loading import load

from .families import save_random

PROMPT = [5, 17, 40, 3, 88, 61, 12, 12, 70, 29, 9, 54]
TIED_BY_DEFAULT = (
    *("gemma", "gemma2", "gemma3", "smollm3", "ernie", "cohere", "cohere2"),
    *("gpt2", "starcoder", "starcoder2", "falcon-7b", "mpt", "opt"),
)
UNTIED_BY_DEFAULT = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo", "olmo2", "olmo3", "granite", "glm", "glm4"),
    *("seed-oss", "exaone", "helium", "cwm", "gpt-neox", "stablelm"),
)
TABLES = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "embed_in.weight")
EVERY_FLAG = {"llama", "mistral", "qwen2", "qwen3", "gemma3", "opt", "falcon-7b", "gpt-neox"}
FAMILIES = (*TIED_BY_DEFAULT, *UNTIED_BY_DEFAULT)


def write(family, folder, flag, tensor):
    """A model whose config.json has this flag (None: none), and its files this lm_head."""
    save_random(family, folder, tied=False)
    tensors = load_file(folder / "model.safetensors")
    [embeddings] = [weight for name, weight in tensors.items() if name.endswith(TABLES)]
    head = "embed_out.weight" if family == "gpt-neox" else "lm_head.weight"
    if tensor == "absent":
        del tensors[head]
    if tensor == "equal":
        tensors[head] = embeddings.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(
        json.dumps(config if flag is None else config | {"tie_word_embeddings": flag})
    )


@pytest.mark.few(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family, tmp_path):
    for flag in (True, False, None) if family in EVERY_FLAG else (None,):
        for tensor in ("absent", "equal", "another"):
            folder = tmp_path / f"{flag}-{tensor}"
            write(family, folder, flag, tensor)
            tied = family in TIED_BY_DEFAULT if flag is None else flag
            if tensor == "absent" and not tied:  # transformers makes up random numbers
                with pytest.raises(ModelFileError, match=r"lacks tensor 'lm_head\.weight'"):
                    open_model(folder)
            else:
                check(folder, tied=tensor == "absent")


def check(folder, *, tied):
    """Our logits are transformers', and the output layer is the embeddings if and only if it is `tied`."""
    import transformers  # seconds, which only this test should wait

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        want = theirs(torch.tensor([PROMPT])).logits[0]
    ours = load(folder, "torch")
    assert ours.config.tie_embeddings == tied, folder.name
    got = ModelRunner(ours, num_blocks=3, block_size=4).forward([Rows(PROMPT, 0, [2, 0, 1], 0)])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0, msg=lambda text: f"{folder.name}: {text}")
