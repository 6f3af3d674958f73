#!/usr/bin/env bash
# Fine-tunes a small PaddleNLP Llama on packed samples: sft (the default; run twice and compared bit for bit), or
# lora, dpo or rm, which start from what sft leaves. Makes its environment (.venv-train) ready first. Further
# arguments are handed to scripts/finetune.py.
#
#   bash scripts/run_finetune.sh
#   bash scripts/run_finetune.sh dpo --override max_steps=300
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

task=sft
if [[ $# -gt 0 && "$1" != -* ]]; then
  task="$1"
  shift
fi
config="configs/${task}_tiny.json"
if [[ ! -f "$config" ]]; then
  echo "usage: bash scripts/run_finetune.sh [sft|lora|dpo|rm] [--override KEY=VALUE ...]" >&2
  exit 2
fi

bash scripts/setup_env.sh train
if [[ "$task" != sft && ! -d outputs/sft_tiny/flashmask/model ]]; then
  .venv-train/bin/python scripts/finetune.py --config configs/sft_tiny.json
fi
exec .venv-train/bin/python scripts/finetune.py --config "$config" "$@"
