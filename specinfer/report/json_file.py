"""A report as a JSON file: refused before the work, and written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specinfer.errors import ConfigError


def check_writable(path: Path) -> None:
    """Raise ConfigError when `path` cannot be written, before minutes are spent on what goes there."""
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder; give a file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.absolute().parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: the folder is not writable; choose another")


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write `result` to `path`, whole or not at all; raises ConfigError when the disk refuses."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.absolute().parent, prefix=f".{path.name}.", delete=False
        ) as file:
            partial = Path(file.name)
            try:
                json.dump(result, file, indent=1)
                file.write("\n")
                file.flush()
                partial.chmod(0o644)
                os.replace(partial, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
