"""Fetch the JavaScript libraries of the server's page from npm, in the versions and with the sums below.

    python tools/vendor_page.py          write them to specinfer/serve/page/vendor
    python tools/vendor_page.py --sums   print the sums of a new version, to be put here

The files are npm's own without their reference to a source map, which the package does not have. They are
committed, so that the page needs no network; tests compare them with the sums.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parents[1] / "specinfer/serve/page/vendor"


class Vendored(NamedTuple):
    """A file of a package: its place in the package, its name here, and the sum of its bytes here."""

    package: str
    place: str
    name: str
    sha256: str


MARKED, DOMPURIFY = "marked@18.2.1", "dompurify@3.5.0"
VENDORED = (
    Vendored(
        MARKED,
        "lib/marked.esm.js",
        "marked.esm.js",
        "c622dc6824a1c92c2d10ea9ede2fc872e46128afcc34b298e6ddee6f387ace8e",
    ),
    Vendored(
        MARKED,
        "LICENSE",
        "marked.license.txt",
        "8e3a3f82f59a60958f56ca08f445647c32a4733dc7ca6c2c46f6eb898471ab9c",
    ),
    Vendored(
        DOMPURIFY,
        "dist/purify.min.js",
        "purify.min.js",
        "1bb69dcd35ac61a515cd876d9f9024b3117c8b7a1725f9b3097782d8d822e8d3",
    ),
    Vendored(
        DOMPURIFY,
        "LICENSE",
        "purify.license.txt",
        "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30",
    ),
)


def main(arguments: list[str]) -> int:
    """Fetch the packages and write the files; return 1 if a sum differs, and then write nothing."""
    fetched = fetch()
    sums = {one: hashlib.sha256(body).hexdigest() for one, body in fetched.items()}
    if arguments == ["--sums"]:
        print("\n".join(f"{one.name} {found}" for one, found in sums.items()))
        return 0
    if wrong := [one.name for one, found in sums.items() if found != one.sha256]:
        print(f"other sums than in tools/vendor_page.py: {', '.join(wrong)}; see --sums", file=sys.stderr)
        return 1
    FOLDER.mkdir(exist_ok=True)
    for one, body in fetched.items():
        (FOLDER / one.name).write_bytes(body)
    return 0


def fetch() -> dict[Vendored, bytes]:
    """The files as npm has them now, in the versions above."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for package in dict.fromkeys(one.package for one in VENDORED):
            packed = subprocess.run(
                ["npm", "pack", "--silent", package], cwd=folder, capture_output=True, text=True, check=True
            )
            with tarfile.open(Path(folder, packed.stdout.split()[-1])) as archive:
                for one in (one for one in VENDORED if one.package == package):
                    member = archive.extractfile(f"package/{one.place}")
                    assert member is not None, f"{package} has no file {one.place}"
                    found[one] = re.sub(rb"\n//# sourceMappingURL=\S+\s*$", b"\n", member.read())
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
