#!/bin/sh
# build_wheel.sh SOURCE WHEELS: a wheel of the checkout SOURCE, its kernels compiled, in the folder WHEELS.
set -eu
python3 -m pip wheel --no-deps --wheel-dir "$2" "$1"
