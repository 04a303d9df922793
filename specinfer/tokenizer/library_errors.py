"""LibraryErrors: the tokenizers library's complaints about a file, as ours."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from specinfer.errors import ModelFileError


class LibraryErrors:
    """A `with` block in which the library reads a file: its errors leave as ModelFileError.

    The library raises bare `Exception` for all it finds wrong, so exactly that class is translated;
    everything derived from it passes through.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is Exception:
            raise ModelFileError(f"the tokenizer in {self._path} is damaged: {error}") from error
