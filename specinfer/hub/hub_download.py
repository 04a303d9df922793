"""Downloads from the Hugging Face hub into the hub's cache (HF_HOME), with its client.

The client keeps finished files, so a repeated pull fetches missing files only. An unfinished file is
downloaded from its start: huggingface_hub gives each attempt its own file name.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specinfer.errors import (
    DownloadError,
    GatedModelError,
    ModelError,
    ModelNotFoundError,
    SourceUnavailableError,
)
from specinfer.hub.catalogue import CatalogueEntry, HubSource, disk_errors, install_file, require_space
from specinfer.hub.foreign_format import foreign_files
from specinfer.hub.gguf_choice import choose_gguf, other_tags
from specinfer.hub.gguf_header import first_parts, part_names
from specinfer.hub.model_files import TEMPLATES, has_pickles, instead, weight_files
from specinfer.progress import Progress

if TYPE_CHECKING:
    from huggingface_hub.utils.tqdm import tqdm


MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt")


def offline() -> bool:
    """Return True if HF_HUB_OFFLINE forbids downloads, those from the package registry included."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def fetch_file(repository: str, revision: str | None, file: str, progress: Progress) -> Path:
    """Return the path of a repository's file, from the cache or the hub.

    Fetches all parts of a split GGUF model, and returns the first one's path. Without a network, uses the
    cached copy.
    """
    cached = {name: _cached_file(repository, revision, name) for name in part_names(file)}
    parts, lacking = [*cached], [name for name, path in cached.items() if path is None]
    first = cached[parts[0]]
    if offline():
        if first is None or lacking:
            raise _not_cached(f"{lacking[0]} of {repository}")
        return first
    try:
        files = _list_files(repository, revision)
    except SourceUnavailableError:
        if first is None or lacking:
            raise
        return first
    if file not in files:
        ggufs = first_parts(name for name in files if name.endswith(".gguf"))
        raise ModelNotFoundError(
            f"{repository} has no file {file}; "
            + (f"it has {_some(ggufs)}" if ggufs else "it has no GGUF file")
        )
    if missing := [name for name in parts if name not in files]:
        raise ModelNotFoundError(
            f"{repository} has {file}, but lacks {missing[0]}, another part of that model"
        )
    return _fetch(repository, revision, {name: files[name] for name in parts}, progress)[parts[0]]


def fetch_gguf(repository: str, revision: str | None, tag: str | None, progress: Progress) -> Path:
    """Return the path of a repository's GGUF file of the quantization `tag`; None: the usual choice.

    Without a network, chooses among the cached files. Says what it has chosen, and how to name another file.
    """
    try:
        if offline():
            raise _not_cached(repository)
        names: Collection[str] = _list_files(repository, revision)
    except (DownloadError, SourceUnavailableError):
        if not (names := _cached_ggufs(repository, revision)):
            raise
    ggufs = [name for name in names if name.endswith(".gguf")]
    file = choose_gguf(f"{repository}:", ggufs, tag)
    if file is None:
        raise ModelNotFoundError(f"{repository} has no GGUF file; give {repository} alone, or another one")
    if tag in (None, "latest") and (tags := other_tags(ggufs, file)):
        name = f"{repository}:{tags[0]}"
        progress.say(f"{repository}: {file} is chosen; others are {_some(tags)}: name one like {name}")
    return fetch_file(repository, revision, file, progress)


def fetch_folder(repository: str, revision: str | None, progress: Progress, *, code: bool = False) -> Path:
    """Return the folder of a repository's config, tokenizer and safetensors, from the cache or the hub.

    With `code`, fetches its Python files, too. Without a network, uses a complete cached copy. Returns the
    path of a GGUF file for a repository without safetensors.
    """
    files: dict[str, int] | None = None
    if not offline():
        try:
            files = _list_files(repository, revision)
        except SourceUnavailableError:
            if _cached_folder(repository, revision) is None and not _cached_ggufs(repository, revision):
                raise
    if files is None:
        return _cached_folder(repository, revision) or fetch_gguf(repository, revision, None, progress)
    if (what := foreign_files(files)) is not None:
        raise ModelError(f"{repository} is {what}")
    suffixes = (*MODEL_SUFFIXES, ".py") if code else MODEL_SUFFIXES
    selected = {
        name: size
        for name, size in files.items()
        if name.endswith(suffixes) and name.rpartition("/")[0] in ("", TEMPLATES)
    }
    if "config.json" not in selected or not any(name.endswith(".safetensors") for name in selected):
        if any(name.endswith(".gguf") for name in files):
            return fetch_gguf(repository, revision, None, progress)
        own = [name for name in files if "/" not in name]
        if "config.json" in selected and has_pickles(own):
            raise ModelError(
                f"{repository} has no *.safetensors; {instead(own)}; then give a folder with "
                "the result and its config.json"
            )
        raise ModelError(
            f"{repository} has neither config.json with *.safetensors nor a GGUF file; "
            "give another repository"
        )
    # Skip a consolidated copy of the same weights under other names.
    if "model.safetensors.index.json" in selected or "model.safetensors" in selected:
        selected = {name: size for name, size in selected.items() if not name.startswith("consolidated")}
    return _fetch(repository, revision, selected, progress)["config.json"].parent


def fetch_catalogue_file(source: HubSource, entry: CatalogueEntry, target: Path, progress: Progress) -> None:
    """Download a catalogue entry's file to `target` and check it; the caller holds the lock of `target`.

    Raises SourceUnavailableError, ChecksumError, or DownloadError (full disk).
    """
    scratch = target.parent / "hub"
    require_space(target.parent, entry.size, entry.name)
    try:
        # Without a network this request fails at once; the download would retry for 30 seconds.
        files = _list_files(source.repository, source.revision)
        if source.file not in files:
            raise SourceUnavailableError(f"{source.repository} no longer has the file {source.file}")
        label = f"downloading {entry.name}"
        with progress.showing(entry.size, label), _hub_errors(source.repository, source.revision):
            path = _download(source.repository, source.revision, source.file, progress, local_dir=scratch)
        with disk_errors(target.parent):
            install_file(path, entry, target)
    except (ModelNotFoundError, GatedModelError) as error:  # removed or gated since the entry was written
        raise SourceUnavailableError(str(error)) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _list_files(repository: str, revision: str | None) -> dict[str, int]:
    from huggingface_hub import HfApi

    with _hub_errors(repository, revision):
        info = HfApi().model_info(repository, revision=revision, files_metadata=True)
    return {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}


def _fetch(
    repository: str, revision: str | None, files: dict[str, int], progress: Progress
) -> dict[str, Path]:
    from huggingface_hub import constants

    missing = sum(size for name, size in files.items() if _cached_file(repository, revision, name) is None)
    require_space(Path(constants.HF_HUB_CACHE), missing, repository)
    with progress.showing(missing, f"downloading {repository}"), _hub_errors(repository, revision):
        return {name: _download(repository, revision, name, progress) for name in files}


def _download(
    repository: str, revision: str | None, file: str, progress: Progress, local_dir: Path | None = None
) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(
        hf_hub_download(
            repository, file, revision=revision, local_dir=local_dir, tqdm_class=_bar_class(progress)
        )
    )


def _bar_class(progress: Progress) -> type[tqdm]:
    """Return a tqdm class for the hub's client that draws nothing and advances `progress`."""
    from huggingface_hub.utils.tqdm import tqdm

    furthest = 0  # some transports open two bars per file: bytes received and bytes written

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.bytes = 0
            super().__init__(*args, **(kwargs | {"disable": True}))  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal furthest
            self.bytes += int(n or 0)
            if self.bytes > furthest:
                progress.advance(self.bytes - furthest)
                furthest = self.bytes
            return None

    return Bar


def _cached_file(repository: str, revision: str | None, file: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(repository, file, revision=revision)
    return Path(path) if isinstance(path, str) else None


def _cached_folder(repository: str, revision: str | None) -> Path | None:
    config = _cached_file(repository, revision, "config.json")
    if config is None:
        return None
    weight_files(config.parent)  # raises if a file is missing
    return config.parent


def _cached_ggufs(repository: str, revision: str | None) -> list[str]:
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except errors.LocalEntryNotFoundError:
        return []
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]


@contextmanager
def _hub_errors(repository: str, revision: str | None) -> Iterator[None]:
    """Convert the client's errors inside the block to this package's errors."""
    from huggingface_hub import constants, errors

    try:
        with disk_errors(Path(constants.HF_HUB_CACHE)):
            yield
    except errors.GatedRepoError as error:
        raise GatedModelError(
            f"{repository} is gated: accept its terms on the hub with your account, "
            "then log in (hf auth login) or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"the hub has no public model {repository}, and no local folder has that name; "
            "check the spelling, or log in (hf auth login)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(
            f"{repository} has no revision {revision}; check the branch, tag or commit"
        ) from error
    except errors.LocalEntryNotFoundError as error:  # raised for a lost connection, too
        raise SourceUnavailableError(
            f"the hub cannot be reached for {repository} ({_line(error.__cause__ or error)}); "
            "check the network"
        ) from error
    except errors.EntryNotFoundError as error:
        raise SourceUnavailableError(
            f"a file of {repository} was removed during the pull: {_line(error)}; pull again"
        ) from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"{repository!r} is not a hub name: {_line(error)}") from error
    # The client passes on errors of its HTTP library; this is their base class.
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        raise SourceUnavailableError(
            f"the hub cannot be reached for {repository} ({_line(error)}); check the network"
        ) from error


def _not_cached(what: str) -> DownloadError:
    return DownloadError(
        f"{what} is not in the hub's cache, and HF_HUB_OFFLINE is set; unset it, "
        "or pull on a machine with a network"
    )


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
