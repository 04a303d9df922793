"""LibraryErrors: the tokenizers library's complaints about a file, as ours."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from specinfer.errors import ModelFileError


class LibraryErrors:
    """A `with` block in which the library reads a file: its errors leave as ModelFileError.

    The library raises bare `Exception` for all it finds wrong, so exactly that class is translated, and
    its panics are; everything else passes through.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is Exception or is_panic(kind):
            raise ModelFileError(f"the tokenizer in {self._path} is damaged: {error}") from error


def is_panic(kind: type[BaseException] | None) -> bool:
    """Whether the library gave up in the middle; the class, a BaseException, is not to be imported."""
    return kind is not None and kind.__name__ == "PanicException"
