"""Compiles and tries this machine's native kernels, if they are not there: `python -m specinfer.kernels`.

An installation runs it, so that no question waits for a compiler. Without a compiler it prints why, and ends
with status 0: the kernels are compiled once a compiler is there, and PyTorch runs until then.
"""

from __future__ import annotations

import sys

from specinfer.errors import SpecInferError
from specinfer.kernels.native import load_library
from specinfer.progress import ProgressBar


def main() -> None:
    """Print the library that models will use."""
    try:
        library = load_library(ProgressBar())
    except SpecInferError as error:
        print(f"no native kernels, models will run slowly: {error}", file=sys.stderr)
        return
    print(f"native kernels for {library.level.words}: {library.path}", file=sys.stderr)


if __name__ == "__main__":
    main()
