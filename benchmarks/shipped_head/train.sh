#!/bin/sh
# The head that comes with the package: train.sh MODEL.gguf DOLLY_TRAIN.jsonl GSM8K_TRAIN.jsonl WORK MINUTES
# Rows of both files are {"prompt": ...}; ours are prompts.py's. --resume goes on where it was stopped: run it again.
set -eu
here=$(dirname "$0")
mkdir -p "$4"
python "$here/prompts.py" > "$4/own.jsonl"
resume=$(test -e "$4/head" && echo --resume || true)
# shellcheck disable=SC2086
specinfer tune --model "$1" --quantization int8 --max-context 1024 --seed 0 --minutes "$5" --out "$4/head" $resume \
  --prompts "$2" --prompts "$3" --prompts "$4/own.jsonl"
python "$here/pack.py" "$4/head" "$1" "$here/../../specinfer/data/heads/smollm2-135m-head"
