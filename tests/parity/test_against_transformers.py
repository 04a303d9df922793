"""Our logits against transformers', float32: a whole prompt, token by token, and over a token tree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.models.adapters.adapter_cache import AdapterCache
from specinfer.models.fingerprint import fingerprint, is_of
from specinfer.models.language_model import LanguageModel
from specinfer.models.open_model import open_model
from specinfer.plan import StateCounts, StateUse
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.runner import ModelRunner
from tests.adapters import adapter_tensors, write_peft
from tests.kernels import NAMES, kernels
from tests.loading import load
from tests.passes import Passes
from tests.quantized_folders import pack_mxfp4
from tests.states import StateRunner

from .families import CASES, save_random
from .gguf_files import write_gguf

TOLERANCE = 1e-4
PROMPT = [5, 17, 40, 3, 88, 61, 12, 12, 70, 29, 9, 54]
BLOCK = 4
# Blocks out of order, so that K and V are gathered; and in order, so that they are read where they lie.
SCATTERED, CONTIGUOUS = [6, 2, 9, 1, 5, 0, 3], [1, 2, 3, 4, 5, 6, 7]

#   54 (last prompt token)
#    |--- 7 --- 8 --- 30
#    |          `---- 31
#    `--- 20 -- 8
TREE_TOKENS = [54, 7, 20, 8, 8, 30, 31]
TREE_PARENTS = [-1, 0, 0, 1, 2, 3, 3]
TREE_PATHS = [[], [7], [20], [7, 8], [20, 8], [7, 8, 30], [7, 8, 31]]  # below the root, per node


def runner_of(model):
    return StateRunner(model, num_blocks=10, block_size=BLOCK)


@torch.no_grad()
def logits_of(theirs, token_ids):
    return theirs(torch.tensor([token_ids])).logits[0]


def each_token(ours, table):
    """Logits of the prompt, token by token over the cache."""
    runner = runner_of(ours)
    rows = [[chain_rows([token], i, table, logits=True)] for i, token in enumerate(PROMPT)]
    return torch.stack([runner.forward(row)[0] for row in rows])


def each_node(ours, table):
    """Logits of the tree in one pass; grown level by level, as a draft grows it, they are the same."""
    before = len(PROMPT) - 1
    both = runner_of(ours), runner_of(ours)
    for runner in both:
        runner.forward([chain_rows(PROMPT[:before], 0, table, logits=False)])
    whole = both[0].forward([Rows(TREE_TOKENS, before, table, 0, TREE_PARENTS)])
    levels = [(0, 1), (1, 3), (3, 5), (5, 7)]
    grown = [Rows(TREE_TOKENS[a:b], before + a, table, 0, TREE_PARENTS[:b]) for a, b in levels]
    torch.testing.assert_close(
        torch.cat([both[1].forward([r]) for r in grown]), whole, atol=TOLERANCE, rtol=0
    )
    return whole


# Each family with both kernels, once tied to its embeddings and once not.
@pytest.mark.few(30)
@pytest.mark.parametrize(
    ("name", "tied", "run"),
    [(name, (i + j) % 2 == 0, run) for i, name in enumerate(CASES) for j, run in enumerate(NAMES)],
)
def test_a_prompt_its_tokens_a_tree_and_a_batch(name, tied, run, tmp_path):
    theirs = save_random(name, tmp_path, tied=tied)
    ours = load(tmp_path, run)
    assert ours.config.tie_embeddings == (tied and bool(theirs._tied_weights_keys))

    prompt, other = logits_of(theirs, PROMPT), PROMPT[::-1][:7]
    tree = torch.stack([logits_of(theirs, PROMPT + path)[-1] for path in TREE_PATHS])
    both = [chain_rows(PROMPT, 0, [6, 2, 9], logits=True), chain_rows(other, 0, [0, 1], logits=True)]
    batch = torch.stack([prompt[-1], logits_of(theirs, other)[-1]])
    for what, got, want in (
        ("prompt", runner_of(ours).forward([Rows(PROMPT, 0, CONTIGUOUS, 0)]), prompt),
        ("tokens, scattered", each_token(ours, SCATTERED), prompt),
        ("tokens, contiguous", each_token(ours, CONTIGUOUS), prompt),
        ("tree, scattered", each_node(ours, SCATTERED), tree),
        ("tree, contiguous", each_node(ours, CONTIGUOUS), tree),
        ("two requests", runner_of(ours).forward(both), batch),
    ):
        assert (got - want).abs().max() <= TOLERANCE, what


# Taps: inputs of all layers, and the output of the last.


TAPPED = ["llama", "llama-relu", "qwen2-window", "qwen3", "gemma3", "opt", "opt-no-bias"]
Both = tuple[torch.nn.Module, LanguageModel]


@pytest.fixture(params=[(name, run) for name in TAPPED for run in NAMES], ids=str, scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """A transformers model, and ours loaded from the folder it was saved to."""
    name, run = request.param
    folder: Path = tmp_path_factory.mktemp(name)
    theirs = save_random(name, folder, tied=True)
    return theirs, load(folder, run)


@torch.no_grad()
def hidden_states(theirs: torch.nn.Module, token_ids: Sequence[int]) -> Tensor:
    """[tokens, layers + 1, D]: the inputs of its layers, and what the last one puts out, before any norm."""
    body = theirs.model.decoder if hasattr(theirs.model, "decoder") else theirs.model
    last: list[Tensor] = []
    hook = body.layers[-1].register_forward_hook(
        lambda module, given, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    try:
        states = theirs(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    finally:
        hook.remove()
    return torch.stack([*(state[0] for state in states[:-1]), last[0].view(len(token_ids), -1)], dim=1)


def all_layers(model: LanguageModel) -> range:
    return range(model.config.num_layers + 1)


@pytest.mark.few(5)
def test_taps_of_a_prompt_in_chunks_are_the_hidden_states_and_not_their_neighbours(both: Both) -> None:
    theirs, ours = both
    want = hidden_states(theirs, PROMPT)
    for step in (len(PROMPT), 5):
        passes, parts = Passes(ours), []
        for start in range(0, len(PROMPT), step):
            rows = chain_rows(PROMPT[start : start + step], start, SCATTERED, logits=False)
            parts.append(passes.run(rows, taps=all_layers(ours))[1])
        got = torch.cat(parts)
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)
        assert ((got[:, 1:] - want[:, :-1]).abs().amax(dim=(0, 2)) > 100 * TOLERANCE).all()


# Mixtures of experts: gates are clamped, and experts are read however a file has them.


def ours(model, run):
    """The logits of the prompt."""
    return ModelRunner(load(model, run), num_blocks=3, block_size=4).forward([Rows(PROMPT, 0, [0, 1, 2], 0)])


def gpt_oss(folder, *, gates=1.0):
    """Save a gpt-oss whose gate and up matrices are multiplied by a factor."""
    theirs = save_random("gpt-oss", folder, tied=False)
    with torch.no_grad():
        for layer in theirs.model.layers:
            layer.mlp.experts.gate_up_proj.mul_(gates)
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize("run", NAMES)
def test_gates_and_ups_of_gpt_oss_are_clamped(run, tmp_path):
    theirs = gpt_oss(tmp_path, gates=8.0)
    want = logits_of(theirs, PROMPT)
    torch.testing.assert_close(ours(open_model(tmp_path), run), want, atol=TOLERANCE, rtol=0)
    for layer in theirs.model.layers:
        layer.mlp.experts.limit = 1e9
    assert (logits_of(theirs, PROMPT) - want).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("run", NAMES)
def test_gpt_oss_as_it_is_published(run, tmp_path):
    """Its experts in MXFP4: a folder, and the GGUF file that llama.cpp's converter makes of it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs = gpt_oss(tmp_path)
    packed = pack_mxfp4(tmp_path)
    with torch.no_grad():
        for name, (blocks, scales) in packed.items():
            floats = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            theirs.get_parameter(name).copy_(floats)
    want = logits_of(theirs, PROMPT)
    torch.testing.assert_close(ours(open_model(tmp_path), run), want, atol=TOLERANCE, rtol=0)
    file = tmp_path / "model.gguf"
    write_gguf(theirs, file, packed={name: mxfp4_blocks(*pair) for name, pair in packed.items()})
    torch.testing.assert_close(ours(open_model(file), run), want, atol=TOLERANCE, rtol=0)
    assert is_of(fingerprint(open_model(file)), open_model(tmp_path))


def mxfp4_blocks(blocks, scales):
    """The same in ggml's order: a byte has elements i and i + 16 of a group, where it had neighbours."""
    elements = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [experts, rows, groups, 32]
    octets = elements[..., :16] | elements[..., 16:] << 4
    return torch.cat((scales[..., None], octets), -1).flatten(-2)


# Whether the output layer is the embeddings: every flag with every tensor.


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


def write_tied(family, folder, flag, tensor):
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
            write_tied(family, folder, flag, tensor)
            tied = family in TIED_BY_DEFAULT if flag is None else flag
            if tensor == "absent" and not tied:  # transformers makes up random numbers
                with pytest.raises(ModelFileError, match=r"lacks tensor 'lm_head\.weight'"):
                    open_model(folder)
            else:
                check_tied(folder, tied=tensor == "absent")


def check_tied(folder, *, tied):
    """Our logits are transformers', and the output layer is the embeddings if and only if it is `tied`."""
    import transformers  # seconds, which only this test should wait

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    want = logits_of(theirs, PROMPT)
    ours = load(folder, "torch")
    assert ours.config.tie_embeddings == tied, folder.name
    got = ModelRunner(ours, num_blocks=3, block_size=4).forward([Rows(PROMPT, 0, [2, 0, 1], 0)])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0, msg=lambda text: f"{folder.name}: {text}")


# Adapters, against the model that they are merged into.


# Separate and stacked matrices, gated and plain MLPs, the head orders of several libraries, and each kind of
# recurrent layer.
ADAPTED = (
    *("llama-biases", "qwen2-window", "gemma3", "gemma4", "gemma3n", "opt", "phi3-partial-rope", "glm4"),
    *("lfm2", "qwen3.5", "granite-hybrid", "falcon-h1", "nemotron-h"),
)
WITHOUT = {"qwen3.5": ("in_proj_a", "in_proj_b")}  # modules without adapters: gates of a delta rule
RANK, ALPHA = 3, 5
PREFIX = "base_model.model."


@pytest.mark.few(4)
@pytest.mark.parametrize("run", NAMES)
@pytest.mark.parametrize("name", ADAPTED)
@torch.no_grad()
def test_an_adapter_of_all_linear_modules(name: str, run: str, tmp_path: Path) -> None:
    theirs = save_random(name, tmp_path / "model", tied=True)
    without = WITHOUT.get(name, ())
    linear = {
        f"{name}.weight": module
        for name, module in theirs.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head" and not name.endswith(without)
        if not any(other in name for other in ("per_layer", "altup", "laurel"))  # these have no adapters
    }
    targets = sorted({name.rsplit(".", 2)[-2] for name in linear})
    shapes = {name: module.weight.shape for name, module in linear.items()}
    tensors = adapter_tensors(shapes, targets, RANK, 3, 0.3)
    every = targets if without else "all-linear"
    write_peft(tmp_path / "adapter", tensors, r=RANK, lora_alpha=ALPHA, target_modules=every)
    chosen = kernels(run)
    ours = load(tmp_path / "model", chosen)
    shelf = AdapterCache(
        ours.config,
        weights=ours.dtype,
        device=ours.device,
        library=chosen.products.library,
        limit=1,
        free=lambda: 1 << 30,
    )
    shelf.add("adapter", tmp_path / "adapter")
    runner = ModelRunner(ours, num_blocks=8, block_size=4, adapters=shelf, states=StateCounts(2))
    plain = theirs(torch.tensor([PROMPT])).logits[0]
    for name, module in linear.items():
        inside = f"{PREFIX}{name.removesuffix('.weight')}.lora_"
        module.weight += ALPHA / RANK * tensors[f"{inside}B.weight"] @ tensors[f"{inside}A.weight"]
    want = theirs(torch.tensor([PROMPT])).logits[0]
    rows = [
        Rows(PROMPT, 0, [1, 2, 3], 0, adapter="adapter", states=StateUse(0)),
        Rows(PROMPT, 0, [4, 5, 6], 0, states=StateUse(1)),
    ]
    adapted, without = runner.forward(rows).split(len(PROMPT))
    torch.testing.assert_close(adapted, want, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(without, plain, atol=1e-4, rtol=0)
    assert float((want - plain).abs().max()) > 0.1, "an adapter that says nothing proves nothing"
