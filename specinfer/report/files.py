"""Report files: JSON, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specinfer.errors import ConfigError
from specinfer.files import write_text


def check_writable(path: Path) -> None:
    """Raise ConfigError if `path` cannot be written; called before minutes of measurement."""
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder; give a file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.absolute().parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: the folder is not writable; choose another")


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write `result` to `path`, whole or not at all; raises ConfigError if writing fails."""
    try:
        write_text(path, json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
