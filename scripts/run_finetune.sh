#!/usr/bin/env bash
# Fine-tunes a small PaddleNLP Llama on packed documents, twice, and compares the runs bit for bit. Makes its
# environment (.venv-train) ready first. Arguments are handed to scripts/finetune.py.
#
#   bash scripts/run_finetune.sh
#   bash scripts/run_finetune.sh --override max_steps=300
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup_env.sh train
exec .venv-train/bin/python scripts/finetune.py --config configs/sft_tiny.json "$@"
