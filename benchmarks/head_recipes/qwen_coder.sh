#!/bin/sh
# A head for Qwen2.5-Coder-1.5B-Instruct: qwen_coder.sh MODEL.gguf ALPACA_TRAIN.jsonl WORK MINUTES [INIT]
# Rows of the file are {"prompt": ...}; prompts.py puts functions of ours among them and leaves long ones out.
# Stanford Alpaca, which gave the prompts of ours, is CC BY-NC 4.0: for more than non-commercial use give other rows.
# INIT is a head to go on from. What was stopped is gone on with: run it again. WORK/head is the head.
set -eu
here=$(dirname "$0")
mkdir -p "$3"
python "$here/prompts.py" code "$2" > "$3/prompts.jsonl"
resume=$(test -e "$3/head" && echo --resume || true)
# shellcheck disable=SC2086
specinfer tune --model "$1" --quantization int8 --max-context 1024 --seed 0 --minutes "$4" --out "$3/head" $resume \
  --prompts "$3/prompts.jsonl" ${5:+--init "$5"}
