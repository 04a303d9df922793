"""Small models are tuned without hidden states, and what is written is what transformers loads."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from specinfer.errors import ModelError, TuneError
from specinfer.hub import resolve
from specinfer.models.open_model import open_model
from specinfer.tokenizer import ChatEncoder, Tokenizer
from specinfer.tune.draft import Target
from specinfer.tune.evaluation import read_draft
from specinfer.tune.prompts import read_prompts
from specinfer.tune.small_model import SsmKind
from specinfer.tune.tuning import Tuning
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_models import write_tiny_llama
from tests.unit.tune.conftest import outputs_with, ticking, tuning_of

pytestmark = pytest.mark.thorough

KIND = SsmKind(layers=2, depth=3)
_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def opened(folder: Path) -> Target:
    files = resolve(str(folder))
    return Target(files, open_model(files))


@pytest.fixture(scope="module")
def chatting(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with a chat template."""
    folder = tmp_path_factory.mktemp("chatting") / "target"
    shutil.copytree(target, folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": _TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def tuned(chatting: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ssm") / "model"
    config = tuning_of(chatting, out, minutes=3.0, kind=KIND)
    Tuning(config, clock=ticking()).run(read_prompts([prompts]), [prompts.name])
    return out


def test_its_card_says_what_it_is(tuned: Path) -> None:
    card = (tuned / "README.md").read_text()
    assert "A small speculative model for target" in card
    assert "vocabulary | 64 of 64 tokens" in card
    assert "license: apache-2.0\n---" in card
    assert "target is licensed under apache-2.0, according to its model card." in card
    assert "these weights: embeddings and output layer" in card.replace("\n", " ")


def test_transformers_loads_it_and_says_the_same(tuned: Path, chatting: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tuned, dtype=torch.float32)
    tokens = torch.randint(64, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = model(tokens).logits[0]
    draft = read_draft(tuned, opened(chatting), 3)
    with torch.no_grad():
        ours = draft.logits(draft.model(tokens), tokens)[0]
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tuned)
    assert tokenizer("12 * 3")["input_ids"] == Tokenizer.load(chatting).encode("12 * 3")
    said = tokenizer.apply_chat_template([{"role": "user", "content": "7"}], tokenize=False)
    assert said == "7" == ChatEncoder(Tokenizer.load(tuned)).render([{"role": "user", "content": "7"}]).text


def test_what_cannot_be_a_small_model_is_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(TuneError, match="layers is 4; allowed: 1 to the target's 3"):
        Tuning(tuning_of(target, tmp_path / "a", kind=SsmKind(layers=4)))
    other = write_tiny_llama(tmp_path / "other", vocab_size=48, tokenizer=True)
    with pytest.raises(ModelError, match="has 48 tokens, and target 64"):
        read_draft(other, opened(target), 3)


def test_of_a_gguf_file_comes_a_folder_whose_ids_are_the_targets(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "target.gguf")
    source = opened(file)
    draft = SsmKind(layers=1).blank(source, torch.ones(0, 32), [])
    draft.model.take(source.model, [0])
    draft.write(tmp_path / "model", source)
    [output] = outputs_with(tmp_path / "model", file, prompts=["this"])
    assert output.figures.tokens_per_step > 3  # it is its target, but for bfloat16
