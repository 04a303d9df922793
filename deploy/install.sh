#!/bin/sh
# install.sh WHEELS PREFIX: installs the server from the wheel in WHEELS into a new environment PREFIX.
set -eu
source=$(cd "$(dirname "$0")/.." && pwd)
python3 -m venv "$2"
"$2/bin/python" "$source/tools/install_torch.py"
wheel=$(ls "$1"/specinfer-*.whl)
"$2/bin/python" -m pip install --no-cache-dir --constraint "$source/constraints.txt" "$wheel[serve]"
"$2/bin/specinfer" serve --help > /dev/null
