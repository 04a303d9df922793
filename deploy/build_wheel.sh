#!/bin/sh
# build_wheel.sh SOURCE WHEELS: builds a wheel of the checkout SOURCE, with compiled kernels, into WHEELS.
# SPECINFER_WHEEL_LEVELS lists the kinds of CPU to compile for; default: all of this architecture.
set -eu
export SPECINFER_WHEEL_LEVELS="${SPECINFER_WHEEL_LEVELS:-all}"
python3 -m pip wheel --no-deps --wheel-dir "$2" "$1"
