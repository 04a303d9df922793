"""Code blocks of the pages, and the folder in which they run.

A comment `<!-- not run: REASON -->` in front of a block keeps it from being run; it is parsed all the same.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specinfer.hub.resolution import resolve
from tests.adapters import adapter_tensors, write_peft

ROOT = Path(__file__).parents[1]
LAB = ("log.md", "map.md", "glossary.md")  # for those who read the code: nothing to run
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in ROOT.glob("docs/*.md") if page.name not in LAB),
    *sorted(ROOT.glob("docs/benchmarks/*.md")),
]
_BLOCK = re.compile(r"^(?:<!-- not run: ([^\n]*?) -->\n)?```(\w*)\n(.*?)^```$", re.M | re.S)
_STANDINS = (  # names that pages use for a model of the reader's
    "qwen2.5-1.5b.gguf",
    "qwen2.5-0.5b.gguf",
    "M",
    "target.gguf",
    "small.gguf",
    "other.gguf",
    "path/to/target.gguf",
    "path/to/draft.gguf",
    "path/to/model-Q4_K_M.gguf",
)
_ADAPTED = {  # matrices of smollm2-135m that the adapters change
    f"model.layers.{layer}.self_attn.{name}.weight": shape
    for layer in range(30)
    for name, shape in (("q_proj", (576, 576)), ("v_proj", (192, 576)))
}


@dataclass(frozen=True)
class Block:
    """A fenced block; `reason` says why it is not run."""

    language: str
    text: str
    reason: str | None

    @property
    def commands(self) -> list[list[str]]:
        """The words of each specinfer command in a block of shell, without the program's name."""
        found = []
        for line in self.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if "specinfer " in line else []
            if "specinfer" in words and words[0] not in ("docker", "kubectl"):
                found.append(words[words.index("specinfer") + 1 :])
        return found


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order."""
    return [Block(language, text, reason or None) for reason, language, text in _found(page)]


def _found(page: Path) -> Iterator[tuple[str, str, str]]:
    for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield match[1], match[2], match[3]


def furnish(folder: Path) -> None:
    """Put the files into a folder that the pages name as the reader's own."""
    model = resolve("smollm2-135m").path
    for name in _STANDINS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(model)
    prompts = ["Name a river.", "Name a lake.", "Name a sea.", "Name a city."] * 8
    rows = [json.dumps({"prompt": f"{number}. {prompt}"}) for number, prompt in enumerate(prompts)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "notes.txt").write_text("Lisbon lies on the Tagus.\n")
    (folder / "keys.txt").write_text("a key of the reader's\n")
    schema = {"type": "object", "properties": {"city": {"enum": ["Lisbon"]}}, "required": ["city"]}
    (folder / "schema.json").write_text(json.dumps(schema))
    request = {"custom_id": "1", "method": "POST", "url": "/v1/completions"}
    request["body"] = {"prompt": "A river", "max_tokens": 4}
    (folder / "requests.jsonl").write_text(json.dumps(request) + "\n")
    for name in ("sql", "poems", "small", "other"):
        tensors = adapter_tensors(_ADAPTED, ("q_proj", "v_proj"), rank=2, seed=len(name), spread=0.02)
        write_peft(
            folder / "adapters" / name, tensors, r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]
        )
    programs = folder / "bin"
    programs.mkdir()
    _program(programs / "specinfer", f'exec {sys.executable} -m tests.page_command "$@"')
    _program(programs / "curl", 'exec /usr/bin/curl --fail-with-body --max-time 120 "$@"')


def environment(folder: Path, port: int) -> dict[str, str]:
    """Variables of the shell in which the blocks of a page run."""
    return {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PAGE_PORT": str(port),
        "PAGE_SERVER": str(folder / "server.pid"),
    }


def free_port() -> int:
    """A free port of 127.0.0.1."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
