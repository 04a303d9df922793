#!/bin/sh
# Train a head for Qwen2.5-Coder-1.5B-Instruct: qwen_coder.sh MODEL.gguf ALPACA_TRAIN.jsonl WORK MINUTES [INIT]
# Rows of the file are {"prompt": ...}; prompts.py adds prompts of this repository and drops long ones.
# The measured head used Stanford Alpaca, which is CC BY-NC 4.0: use other rows for commercial purposes.
# Training starts from the head INIT, if given, and writes WORK/head. A second run resumes an interrupted one.
set -eu
here=$(dirname "$0")
mkdir -p "$3"
python "$here/prompts.py" code "$2" > "$3/prompts.jsonl"
resume=$(test -e "$3/head" && echo --resume || true)
# shellcheck disable=SC2086
specinfer tune --model "$1" --quantization int8 --max-context 1024 --seed 0 --minutes "$4" --out "$3/head" $resume \
  --prompts "$3/prompts.jsonl" ${5:+--init "$5"}
