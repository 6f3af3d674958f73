#!/usr/bin/env bash
# The kernel tables beside peers on a host of several GPUs, each with shapes of its own, LENGTH:HEAD_DIM or
# LENGTH:HEAD_DIM:MASK,MASK (causal among them, for the others are judged by it): first all peers compile, then
# they are timed. What was measured before an interruption is left out by the next call.
#
#   bash scripts/bench/tables.sh FOLDER [SHAPE ...]      # default: 8 K and 32 K, D = 64 and 128, twelve masks
#   PEERS="flex" OPTIONS="--kernels sm90 --seconds 0.1" bash scripts/bench/tables.sh FOLDER 131072:128
#   COMMIT="$(git rev-parse --short HEAD)" bash ...      # where the files are copied to, git cannot be asked
#
# Writes FOLDER/shapes/*.csv, then all of them as FOLDER/kernels.csv, which kernels.py --report-only reads.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

folder="${1:?usage: bash scripts/bench/tables.sh FOLDER [SHAPE ...]}"
shift
shapes=("$@")
((${#shapes[@]})) || shapes=(32768:64 32768:128 8192:64 8192:128)
read -ra peers <<<"${PEERS:-flex flex_flash fa4 cudnn}"
read -ra options <<<"${OPTIONS:---kernels sm90 --seconds 0.1}"
gpus="$(nvidia-smi --list-gpus | wc -l)"
mkdir -p "$folder/shapes"

# GPU g takes shapes g, g + gpus, ...; the arguments go to kernels.py.
on_all_gpus() {
  local gpu i length head_dim masks
  for ((gpu = 0; gpu < gpus; gpu++)); do
    for ((i = gpu; i < ${#shapes[@]}; i += gpus)); do
      IFS=: read -r length head_dim masks <<<"${shapes[i]}"
      # shellcheck disable=SC2086  # masks are several words
      CUDA_VISIBLE_DEVICES=$gpu python3 scripts/bench/kernels.py --lengths "$length" --head-dims "$head_dim" \
        ${masks:+--masks ${masks//,/ }} --peers "${peers[@]}" "${options[@]}" ${COMMIT:+--commit "$COMMIT"} \
        --csv "$folder/shapes/${shapes[i]//[:,]/_}.csv" "$@" || echo "${shapes[i]}: kernels.py $* failed"
    done >>"$folder/log.txt" 2>&1 &
  done
  wait
}

on_all_gpus --prepare
on_all_gpus --resume
awk 'FNR > 1 || NR == 1' "$folder"/shapes/*.csv >"$folder/kernels.csv"
grep -E "S=[0-9]+ .*:|failed" "$folder/log.txt" || true
