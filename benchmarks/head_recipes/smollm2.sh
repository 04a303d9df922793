#!/bin/sh
# The head that comes with the package: smollm2.sh MODEL.gguf DOLLY_TRAIN.jsonl GSM8K_TRAIN.jsonl WORK MINUTES [INIT [SEED]]
# Rows of both files are {"prompt": ...}; prompts.py adds ours and leaves long ones out. INIT is a head to go on
# from, as smollm2-135m-head; another SEED asks prompts in another order. What was stopped is gone on with: run it again.
set -eu
here=$(dirname "$0")
mkdir -p "$4"
# GSM8K's answers are the easiest to guess: a few of them are enough.
head -n 2000 "$3" > "$4/gsm8k.jsonl"
python "$here/prompts.py" chat "$2" "$4/gsm8k.jsonl" > "$4/prompts.jsonl"
resume=$(test -e "$4/head" && echo --resume || true)
# shellcheck disable=SC2086
specinfer tune --model "$1" --quantization int8 --max-context 1024 --vocabulary 16384 --seed "${7:-0}" --minutes "$5" --out "$4/head" $resume \
  --prompts "$4/prompts.jsonl" ${6:+--init "$6"}
python "$here/pack.py" "$4/head" "$1" "$here/../../specinfer/data/heads/smollm2-135m-head" "${7:-0}" \
  ${6:+"$6"}
