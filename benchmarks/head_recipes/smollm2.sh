#!/bin/sh
# Train the head of the package: smollm2.sh MODEL.gguf DOLLY_TRAIN.jsonl GSM8K_TRAIN.jsonl WORK MINUTES [INIT [SEED]]
# Rows of both files are {"prompt": ...}; prompts.py adds prompts of this repository and drops long ones.
# Training starts from the head INIT, if given, for example smollm2-135m-head; SEED sets the order of the prompts.
# A second run resumes an interrupted one.
set -eu
here=$(dirname "$0")
mkdir -p "$4"
# 2,000 prompts of GSM8K are enough, since its answers are the easiest to guess.
head -n 2000 "$3" > "$4/gsm8k.jsonl"
python "$here/prompts.py" chat "$2" "$4/gsm8k.jsonl" > "$4/prompts.jsonl"
resume=$(test -e "$4/head" && echo --resume || true)
# shellcheck disable=SC2086
specinfer tune --model "$1" --quantization int8 --max-context 1024 --vocabulary 16384 --seed "${7:-0}" --minutes "$5" --out "$4/head" $resume \
  --prompts "$4/prompts.jsonl" ${6:+--init "$6"}
python "$here/pack.py" "$4/head" "$1" "$here/../../specinfer/data/heads/smollm2-135m-head" "${7:-0}" \
  ${6:+"$6"}
