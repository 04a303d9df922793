"""Downloads from the Hugging Face hub into the hub's cache (HF_HOME), with its client.

The client keeps finished files, so a repeated pull fetches missing files only. An unfinished file is
downloaded from its start: huggingface_hub gives each attempt its own file name.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from specinfer.hub.gguf_header import first_parts, part_names
from specinfer.hub.model_files import TEMPLATES, choose_gguf, has_pickles, instead, other_tags
from specinfer.progress import Progress

if TYPE_CHECKING:
    from huggingface_hub.utils.tqdm import tqdm


MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt")


def offline() -> bool:
    """Return True if HF_HUB_OFFLINE forbids downloads, those from the package registry included."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@dataclass(frozen=True, slots=True)
class Repository:
    """Files of a hub repository; without a network those in the cache."""

    name: str
    revision: str | None
    sizes: dict[str, int]  # bytes of each file; 0 in the cache
    cached: Path | None = None  # folder in the cache, without a network
    fault: DownloadError | None = None  # the reason for having no others, without a network

    @classmethod
    def of(cls, name: str, revision: str | None) -> Repository:
        """List the files on the hub, or in the cache; raises DownloadError without both."""
        from huggingface_hub import errors, snapshot_download

        try:
            if offline():
                raise DownloadError(
                    f"{name} is not whole in the hub's cache, and HF_HUB_OFFLINE is set; unset it, "
                    "or pull on a machine with a network"
                )
            return cls(name, revision, _list_files(name, revision))
        except DownloadError as error:
            try:
                folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
            except errors.LocalEntryNotFoundError:
                raise error from None
            files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
            return cls(name, revision, dict.fromkeys(files, 0), folder, error)

    def fetch(self, files: Iterable[str], progress: Progress) -> dict[str, Path]:
        """Return the paths of files by name; download those that the cache lacks."""
        if self.cached is not None:
            return {name: self.cached / name for name in files}
        from huggingface_hub import constants, try_to_load_from_cache

        sizes, where = {name: self.sizes[name] for name in files}, (self.name, self.revision)
        missing = sum(
            size
            for name, size in sizes.items()
            if not isinstance(try_to_load_from_cache(self.name, name, revision=self.revision), str)
        )
        require_space(Path(constants.HF_HUB_CACHE), missing, self.name)
        with progress.showing(missing, f"downloading {self.name}"), _hub_errors(*where):
            return {name: _download(*where, name, progress) for name in sizes}

    def gguf(self, file: str, progress: Progress) -> Path:
        """Return the path of the (first) file of a GGUF model; downloads all of its parts."""
        parts = part_names(file)
        missing = [name for name in parts if name not in self.sizes]
        if missing and self.fault is not None:
            raise type(self.fault)(f"{missing[0]}: {self.fault}")
        if file not in self.sizes:
            ggufs = first_parts(name for name in self.sizes if name.endswith(".gguf"))
            raise ModelNotFoundError(
                f"{self.name} has no file {file}; "
                + (f"it has {_some(ggufs)}" if ggufs else "it has no GGUF file")
            )
        if missing:
            raise ModelNotFoundError(
                f"{self.name} has {file}, but lacks {missing[0]}, another part of that model"
            )
        return self.fetch(parts, progress)[parts[0]]

    def chosen_gguf(self, tag: str | None, progress: Progress) -> Path:
        """Return the path of the GGUF file of the quantization `tag`; None: the usual one, which it says."""
        ggufs = [name for name in self.sizes if name.endswith(".gguf")]
        file = choose_gguf(f"{self.name}:", ggufs, tag)
        if file is None:
            raise self.fault or ModelNotFoundError(
                f"{self.name} has no GGUF file; give {self.name} alone, or another one"
            )
        if tag in (None, "latest") and (tags := other_tags(ggufs, file)):
            name = f"{self.name}:{tags[0]}"
            progress.say(f"{self.name}: {file} is chosen; others are {_some(tags)}: name one like {name}")
        return self.gguf(file, progress)

    def folder(self, progress: Progress, *, code: bool = False) -> Path:
        """Return the folder of config, tokenizer and safetensors, or a GGUF file without safetensors.

        With `code`, its Python files are fetched, too.
        """
        files = self.sizes
        if (what := foreign_files(files)) is not None:
            raise ModelError(f"{self.name} is {what}")
        suffixes = (*MODEL_SUFFIXES, ".py") if code else MODEL_SUFFIXES
        selected = [
            name for name in files if name.endswith(suffixes) and name.rpartition("/")[0] in ("", TEMPLATES)
        ]
        if "config.json" not in selected or not any(name.endswith(".safetensors") for name in selected):
            if any(name.endswith(".gguf") for name in files):
                return self.chosen_gguf(None, progress)
            if self.fault is not None:
                raise self.fault
            own = [name for name in files if "/" not in name]
            if "config.json" in selected and has_pickles(own):
                raise ModelError(
                    f"{self.name} has no *.safetensors; {instead(own)}; then give a folder with "
                    "the result and its config.json"
                )
            raise ModelError(
                f"{self.name} has neither config.json with *.safetensors nor a GGUF file; "
                "give another repository"
            )
        # Skip a consolidated copy of the same weights under other names.
        if "model.safetensors.index.json" in selected or "model.safetensors" in selected:
            selected = [name for name in selected if not name.startswith("consolidated")]
        return self.fetch(selected, progress)["config.json"].parent


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


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
