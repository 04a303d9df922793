"""A model's weights in each engine's format, converted once and kept in the peers' folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent
_CONVERTERS = {  # form -> environment, script, more arguments, suffix of the result
    "safetensors": ("transformers", "to_safetensors.py", (), ""),
    "q8_0": ("llama_cpp", "to_gguf.py", ("Q8_0",), ".gguf"),
    "q4_0": ("llama_cpp", "to_gguf.py", ("Q4_0",), ".gguf"),
}


class WeightsError(Exception):
    """A model cannot be converted; the message is one line."""


@dataclass(frozen=True)
class Home:
    """The folder with the other engines' environments and with converted weights."""

    folder: Path

    def python(self, environment: str) -> Path:
        """Return the Python of an environment, which may not exist."""
        return self.folder / environment / "bin" / "python"

    def weights(self, model: Path, form: str) -> Path:
        """Return `model` in a form: "file" (unchanged), "safetensors", "q8_0" or "q4_0".

        Raises WeightsError if it cannot be converted.
        """
        if form == "file" or (form == "safetensors" and model.is_dir()):
            return model
        environment, script, arguments, suffix = _CONVERTERS[form]
        # Files of one name differ in size; a truncated file cannot be converted.
        target = self.folder / "weights" / f"{model.stem}-{model.stat().st_size}-{form}{suffix}"
        if target.exists():
            return target
        if model.is_dir():
            raise WeightsError(f"{model.name} is a folder; {form} is made from a .gguf file only: give one")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"partial-{target.name}")
        _remove(partial)
        command = [*map(str, (self.python(environment), _HERE / script, model, partial)), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            raise WeightsError(f"{form} weights need the {environment} environment; {INSTALL}") from None
        if done.returncode:
            words = done.stderr.strip().splitlines()
            raise WeightsError(f"{script} failed: {words[-1] if words else f'exit code {done.returncode}'}")
        partial.rename(target)
        return target


def default_home() -> Path:
    """Return the folder of install.sh."""
    named = os.environ.get("SPECINFER_PEERS")
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(named) if named else (Path(cache) if cache else Path.home() / ".cache") / "specinfer-peers"


INSTALL = "run: make peers-env"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
