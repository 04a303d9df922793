"""Make the packages of another environment importable in this Python's environment.

    .venv/bin/python tools/share_packages.py SITE_PACKAGES

`python -m venv --system-site-packages` shares only the base Python's packages. Some machines come with
PyTorch in an environment; this script shares the packages of that environment, too.
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
