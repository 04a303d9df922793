"""The folder in which the blocks of a page run: the reader's files, and programs in place of some.

Stand-ins are one tiny model under the names that pages use, short prompts, and other addresses. The programs
`specinfer` (tests/page_command.py), `curl`, `pytest`, `torchrun` and `c++` run the real ones with limits.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Final

import tokenizers
from tokenizers import AddedToken

from specinfer.tokenizer import Tokenizer
from tests.adapters import adapter_tensors, write_peft
from tests.heads import eagle_config, tiny_body, tiny_head, write_tiny_head
from tests.hosted import save_tiny
from tests.page_command import PageCommands
from tests.pages import ROOT
from tests.quantized_folders import FORMATS, write_quantized
from tests.scripted_server import byte_tokenizer
from tests.tiny_models import write_byte_tokenizer, write_tiny_llama
from tests.tools.sources import bare_environment, copy_sources, copying_compiler

_MODEL = "smollm2-135m"  # a folder of that name comes before the model of the catalogue
_STANDINS = (  # other names that pages use for a model
    "qwen2.5-1.5b.gguf",
    "qwen2.5-0.5b.gguf",
    "qwen2.5-7b-instruct-q4_k_m.gguf",
    "M",
    "MODEL",
    "FOLDER",
    "FILE.gguf",
    "TARGET.gguf",
    "DRAFT",
    "target.gguf",
    "small.gguf",
    "other.gguf",
    "path/to/target.gguf",
    "path/to/draft.gguf",
    "path/to/model-Q4_K_M.gguf",
)
_SIZES: Final = {"hidden_size": 288, "num_heads": 9, "num_kv_heads": 3, "head_dim": 32}  # for 2 and 3 ranks
_ROWS = ("questions.jsonl", "prompts.jsonl")
_FEW = ("first_turns.jsonl", "FILE.jsonl", "prompts/dolly.jsonl")
_MARKS = (
    "<|im_end|>",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|file_sep|>",
)  # ids from 256 on
_ADDRESSES = re.compile(r"http://(?:127\.0\.0\.1|localhost):8000")
_MASTER = "10.0.0.1:29500"  # an engine's host on the pages


class PageFolder:
    """A furnished folder; `commands` runs `specinfer`, `master` is an address for ranks of other hosts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.commands = PageCommands(path / "commands", _free_port())
        self.master = f"127.0.0.1:{_free_port()}"
        _write_models(path)
        _write_texts(path)
        programs = path / "bin"
        programs.mkdir()
        program = f"exec {sys.executable} -I -S {ROOT}/tests/page_program.py {self.commands.path}"
        _program(programs / "specinfer", f'{program} "$@"')
        _program(programs / "curl", 'exec /usr/bin/curl --fail-with-body --max-time 120 "$@"')
        found = f'cd {ROOT} && exec {sys.executable} -m pytest --collect-only "$@"'
        _program(programs / "pytest", found)
        _program(programs / "torchrun", f'{program} torchrun "$@"')
        (path / "home/.config/fish").mkdir(parents=True)

    @property
    def variables(self) -> dict[str, str]:
        """Variables of the shell in which blocks run."""
        return {
            **os.environ,
            "PATH": _joined(self.path / "bin", Path(sys.executable).parent),
            "PYTHONPATH": str(ROOT),
            "PET_MASTER_PORT": str(_free_port()),  # torchrun's own
        }

    def here(self, text: str) -> str:
        """Return a block's text with this folder's addresses, home and process ids."""
        text = _ADDRESSES.sub(f"http://127.0.0.1:{self.commands.port}", text).replace(_MASTER, self.master)
        text = text.replace(" ~/", f" {self.path}/home/")
        processes = self.commands.processes
        return re.sub(r"\bPID\b", str(processes[0].pid), text) if processes else text

    def installation(self) -> tuple[Path, dict[str, str]]:
        """Return a copy of the checkout, and variables with an environment into which pip installs offline.

        The environment has the packages of this one, so nothing is fetched. Kernels are copied.
        """
        checkout, venv = self.path / "checkout", self.path / "venv"
        if not checkout.exists():
            copy_sources(checkout)
            (checkout / "tools").mkdir()
            for name in ("tools/install_torch.py", "constraints.txt"):
                (checkout / name).write_bytes((ROOT / name).read_bytes())
            copying_compiler(self.path / "bin" / "c++")
            python = self.path / "pythons" / "python3"
            python.parent.mkdir()
            _program(python, _PYTHON.format(python=sys.executable, packages=sysconfig.get_path("purelib")))
            subprocess.run([str(python), "-m", "venv", str(venv)], check=True)
        offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        path = _joined(self.path / "pythons", venv / "bin")
        return checkout, bare_environment(PATH=path, CXX=str(self.path / "bin" / "c++"), **offline)


# A python3 whose new environments have the packages of this one. No editable install is found through them.
_PYTHON = """"{python}" "$@" || exit
[ "$1 $2" = "-m venv" ] || exit 0
for at in "$3"/lib/python*/site-packages; do
  rm -rf "$at"/setuptools* "$at"/pkg_resources  # older ones, which Python brings
  echo "{packages}" > "$at/ours.pth"
done
"""


def _write_models(folder: Path) -> None:
    vocab, layers = 256 + len(_MARKS), 4
    model = write_tiny_llama(
        folder / _MODEL,
        **_SIZES,
        vocab_size=vocab,
        intermediate_size=576,
        num_layers=layers,
        max_context=2048,
        eos_token_id=256,
        spread=0.05,
    )
    byte_tokenizer(model)
    backend = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _MARKS])
    backend.save(str(model / "tokenizer.json"))
    body = replace(tiny_body(), **_SIZES, vocab_size=vocab)
    eagle = eagle_config(body=body, target_hidden_size=_SIZES["hidden_size"])
    write_tiny_head(tiny_head(eagle, spread=0.05), folder / f"{_MODEL}-head")
    for name in _STANDINS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(model)
    adapted = {
        f"model.layers.{layer}.self_attn.{name}.weight": (heads * _SIZES["head_dim"], _SIZES["hidden_size"])
        for layer in range(layers)
        for name, heads in (("q_proj", _SIZES["num_heads"]), ("v_proj", _SIZES["num_kv_heads"]))
    }
    for name in ("sql", "poems", "small", "other"):
        tensors = adapter_tensors(adapted, ("q_proj", "v_proj"), rank=2, seed=len(name), spread=0.02)
        write_peft(
            folder / "adapters" / name, tensors, r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]
        )
    quantized = folder / "path/to/Qwen2.5-1.5B-Instruct-GPTQ-Int4"
    write_quantized(quantized, FORMATS["gptq"], vocab_size=256)
    write_byte_tokenizer(quantized, 256)
    hosted = folder / "org/some-model"  # without a native family
    save_tiny("phi", hosted, vocab_size=256)
    byte_tokenizer(hosted)


def _write_texts(folder: Path) -> None:
    prompts = ["Name a river.", "Name a lake.", "Name a sea.", "Name a city."] * 8
    rows = [{"prompt": f"{number}. {text}", "reference": "The Tagus."} for number, text in enumerate(prompts)]
    for names, count in ((_ROWS, len(rows)), (_FEW, 2)):
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
    encode = Tokenizer.load(folder / _MODEL).encode
    traffic = [json.dumps({"prompt_token_ids": list(encode(row["prompt"]))}) + "\n" for row in rows]
    for name in ("traffic.jsonl", "log.jsonl"):
        (folder / name).touch(0o600)
        (folder / name).write_text("".join(traffic))
    (folder / "notes.txt").write_text("Lisbon lies on the Tagus.\n")
    (folder / "keys.txt").write_text("a key of the reader's\n")
    schema = {"type": "object", "properties": {"city": {"enum": ["Lisbon"]}}, "required": ["city"]}
    (folder / "schema.json").write_text(json.dumps(schema))
    request = {"custom_id": "1", "method": "POST", "url": "/v1/completions"}
    request["body"] = {"prompt": "A river", "max_tokens": 4}
    (folder / "requests.jsonl").write_text(json.dumps(request) + "\n")


def _joined(*first: Path) -> str:
    """PATH with these folders in front."""
    return os.pathsep.join([*map(str, first), os.environ["PATH"]])


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
