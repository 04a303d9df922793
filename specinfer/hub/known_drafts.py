"""Known drafts: published drafts of published models, and which of them are on this machine.

Each row of data/drafts.csv pairs a model with a draft: a small model of its family, or a head. A model is
recognized by its header: architecture, sizes and vocabulary. Models of equal sizes are told apart by their
names, which only change the order of the rows, as any draft of the same vocabulary is safe.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Self

from specinfer.errors import ModelError
from specinfer.files import cache_dir
from specinfer.hub.catalogue import CATALOGUE, SHIPPED_HEADS, shipped_head
from specinfer.hub.gguf_header import first_parts, read_gguf
from specinfer.hub.model_files import ModelFiles, choose_gguf, files_of, read_json
from specinfer.progress import format_bytes

_PADDING: Final = 512  # rows by which padded tables of one vocabulary differ
_GEMMA_3: Final = {"vocab_size": 262208}  # left out of most files of this kind
_WORD: Final = re.compile(r"[a-z0-9]+(?:\.[0-9]+[a-z]*)*")
BESIDE: Final = "beside the model"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Kind and sizes in the header of a model."""

    kind: str  # model_type without "_text", then without _ and -, as GGUF files have it
    hidden: int
    layers: int
    vocabulary: int  # tokens, with padding

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "qwen2 896 24 151936"."""
        kind, *sizes = text.split()
        return cls(_kind(kind), *map(int, sizes))

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """Read the header of a GGUF file, or a folder's config.json; None if it is not a language model's."""
        with suppress(ModelError, OSError, AttributeError, KeyError, TypeError, ValueError):
            if path.is_dir():
                config = read_json(path / "config.json")
                config = {**config, **(config.get("text_config") or {})}
                kind, names = _kind(config["model_type"]), ("hidden_size", "num_hidden_layers", "vocab_size")
                if kind == "gemma3":
                    config = {**_GEMMA_3, **config}
                return cls(kind, *(int(config[name]) for name in names))
            said = read_gguf(path).metadata
            arch = said["general.architecture"]
            hidden, layers = (int(said[f"{arch}.{name}"]) for name in ("embedding_length", "block_count"))
            return cls(_kind(arch), hidden, layers, len(said["tokenizer.ggml.tokens"]))
        return None

    def matches(self, other: ModelShape | None) -> bool:
        """Return whether both are of one model, whatever the padding of its table."""
        return (
            other is not None
            and (self.kind, self.hidden, self.layers) == (other.kind, other.hidden, other.layers)
            and abs(self.vocabulary - other.vocabulary) <= _PADDING
        )


@dataclass(frozen=True, slots=True)
class KnownDraft:
    """A row of the table."""

    target: str  # published name, without its author
    shape: ModelShape  # of the target
    draft: str  # name that `resolve` takes
    gguf: str  # name of a repository with GGUF files of the draft; empty: none
    form: str  # "model", or the kind of head
    draft_shape: ModelShape | None  # None: a head
    bytes: int  # bfloat16, or the file that the package fetches; 0: unknown
    measured: str  # figures and their author; empty: not measured here

    @property
    def size(self) -> str:
        """Its bytes as text."""
        return format_bytes(self.bytes) if self.bytes else "unknown size"

    def name_for(self, target: ModelFiles) -> str:
        """Return the name to pull, that of GGUF files if there are any and the target is one."""
        return self.gguf if self.gguf and target.header is not None else self.draft


@dataclass(frozen=True, slots=True)
class LocalDraft:
    """A draft of the table whose files are on this machine; they are not checked."""

    row: KnownDraft
    path: Path
    where: str

    @property
    def bytes(self) -> int:
        """Bytes of its files."""
        return _bytes(self.path)

    @property
    def name(self) -> str:
        """Name for people."""
        return self.path.name if self.where == BESIDE else self.row.draft

    def __str__(self) -> str:
        return f"{self.name} ({format_bytes(self.bytes)}, {self.where})"


@cache
def known_drafts() -> tuple[KnownDraft, ...]:
    """Return the table; of one target the best draft is first."""
    text = (files("specinfer") / "data" / "drafts.csv").read_text(encoding="utf-8")
    return tuple(_row(**row) for row in csv.DictReader(text.splitlines()))


def drafts_for(target: ModelFiles) -> list[KnownDraft]:
    """Return the rows of models with the target's sizes, those of its own name first."""
    shape = ModelShape.of(target.path)
    name = target.name if target.header is None else f"{target.name} {target.path.name}"
    rows = [row for row in known_drafts() if row.shape.matches(shape)]
    return sorted(rows, key=lambda row: _difference(name, row.target))


def local_drafts(target: ModelFiles) -> list[LocalDraft]:
    """Return the drafts for a target that are on this machine and smaller than it, the best first.

    They are looked for beside the target, among the downloads of the package, and in the hub's cache.
    Nothing is downloaded.
    """
    rows, limit = drafts_for(target), sum(path.stat().st_size for path in target.weights)
    beside = [*_beside(target, limit)] if rows else []
    found: dict[Path, LocalDraft] = {}
    for row in rows:
        here = [
            path for path, shape in beside if row.draft_shape is not None and row.draft_shape.matches(shape)
        ]
        here.sort(key=lambda path: (_difference(path.name, row.draft.rpartition("/")[2]), _bytes(path)))
        places = [(path, BESIDE) for path in here]
        places += [(path, "on this machine") for path in _downloaded(row, target)]
        for path, where in places:
            if 0 < _bytes(path) < limit:
                found.setdefault(path, LocalDraft(row, path, where))
    return [*found.values()]


def _row(**row: str) -> KnownDraft:
    shapes: dict[str, Any] = {
        name: ModelShape.parse(row[name]) if row[name] else None for name in ("shape", "draft_shape")
    }
    return KnownDraft(**{**row, **shapes, "bytes": int(row["bytes"] or 0)})


def _kind(name: str) -> str:
    name = name.lower().replace("-", "_").removesuffix("_text")
    return name.replace("_", "")


def _difference(name: str, published: str) -> int:
    """Number of words of a published name that a model's name lacks, less those that it has."""
    own = {*_WORD.findall(name.lower())}
    return sum(1 - 2 * (word in own) for word in {*_WORD.findall(published.lower())})


def _beside(target: ModelFiles, limit: int) -> Iterator[tuple[Path, ModelShape]]:
    """Yield smaller models in the folder of a GGUF file, or in folders beside a folder."""
    folder = target.path.absolute().parent
    names: list[str] = []
    with suppress(OSError):
        names = [path.name for path in folder.iterdir()]
    if target.header is not None:
        paths = [folder / name for name in first_parts(name for name in names if name.endswith(".gguf"))]
    else:
        paths = [folder / name for name in sorted(names) if (folder / name / "config.json").is_file()]
    for path in paths:
        if 0 < _bytes(path) < limit and (shape := ModelShape.of(path)) is not None:
            yield path, shape


def _downloaded(row: KnownDraft, target: ModelFiles) -> Iterator[Path]:
    """Yield the draft's files among the package's downloads and in the hub's cache."""
    if row.draft in SHIPPED_HEADS:
        yield shipped_head(row.draft)
    elif row.draft in CATALOGUE:
        path = cache_dir() / "models" / row.draft / CATALOGUE[row.draft].file
        if path.is_file():
            yield path
    else:
        for name in dict.fromkeys((row.name_for(target), row.draft, row.gguf)):
            if name and (folder := _snapshot(name)) is not None:
                yield folder


def _snapshot(repository: str) -> Path | None:
    """Return a repository's model in the hub's cache, a folder or a GGUF file; None if it is not there."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    with suppress(ModelError, OSError, UnicodeDecodeError):
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")]
        if (gguf := choose_gguf(f"{repository}:", names)) is not None:
            return snapshot / gguf
        if (snapshot / "config.json").is_file() and any(snapshot.glob("*.safetensors")):
            return snapshot
    return None


def _bytes(path: Path) -> int:
    """Bytes of a model's files; 0 if they cannot be read."""
    with suppress(ModelError, OSError):
        return sum(file.stat().st_size for file in files_of(path))
    return 0
