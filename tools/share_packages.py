"""Let the environment of the Python that runs this see the packages of another one.

    .venv/bin/python tools/share_packages.py SITE_PACKAGES

`python -m venv --system-site-packages` shares the base Python's packages only. Where the Python it was asked
of is an environment itself, as on machines that come with PyTorch in one, this shares that one's as well.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def main() -> None:
    [other] = sys.argv[1:]
    if other not in sys.path:
        own = Path(sysconfig.get_path("purelib"))
        (own / "shared.pth").write_text(other + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
