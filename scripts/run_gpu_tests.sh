#!/usr/bin/env bash
# Runs everything in tests/gpu on this machine's GPU, several processes at once: each family of kernels; the portable ones
# with the shared memory of smaller cards, and as on cards before Hopper; memcheck and synccheck; and, where Paddle is a
# CUDA build with the operators in place, the operator. Needs torch with CUDA, pytest, nvcc and compute-sanitizer.
#
#     scripts/run_gpu_tests.sh [processes at once, 8]
#
# A kernel that hangs ends its part after $FLASHMASK_TEST_SECONDS (1800).
# $FLASHMASK_CUDA_LIBRARY and $FLASHMASK_CUDA_LIBRARY_80_ON_90 name libraries that are built already. Logs go to
# outputs/gpu_tests. Fails if anything does.
set -euo pipefail
cd "$(dirname "$0")/.."

# Without one all tests would be skipped.
python3 -c 'import torch, sys; sys.exit("torch sees no CUDA device" if not torch.cuda.is_available() else 0)'

processes=${1:-8}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} # or every process takes all cores
export logs=outputs/gpu_tests
mkdir -p "$logs"
rm -f "$logs"/*.log

if [ -z "${FLASHMASK_CUDA_LIBRARY:-}" ]; then
  python3 scripts/build_kernels.py --cuda --targets 90 --output build
  export FLASHMASK_CUDA_LIBRARY=$PWD/build/libflashmask_cuda.so
fi
if [ -z "${FLASHMASK_CUDA_LIBRARY_80_ON_90:-}" ]; then
  python3 scripts/build_kernels.py --cuda --targets 80-on-90 --output build/80_on_90
  export FLASHMASK_CUDA_LIBRARY_80_ON_90=$PWD/build/80_on_90/libflashmask_cuda.so
fi

# A name, then a command; the long ones first.
list() {
  local test="python3 -m pytest -q -p no:cacheprovider tests/gpu"
  local portable="$test/test_kernels_random.py tests/gpu/test_kernels_faults.py tests/gpu/test_kernels_modes.py"
  local kinds='-k "sm80 and not thousand and not million and not far and not rise"'
  echo "before_hopper FLASHMASK_CUDA_LIBRARY=\$FLASHMASK_CUDA_LIBRARY_80_ON_90 $portable $kinds"
  echo "shared_163k FLASHMASK_TEST_SHARED_MEMORY=166912 $portable $kinds"
  echo "shared_99k FLASHMASK_TEST_SHARED_MEMORY=101376 $portable $kinds"
  if python3 -c 'import paddle, sys; sys.exit(not paddle.is_compiled_with_cuda())' 2> /dev/null; then
    echo "operator $test/test_paddle_operator.py"
    # Through Paddle by the portable kernels, which alone fit.
    echo "operator_99k FLASHMASK_TEST_SHARED_MEMORY=101376 $test/test_paddle_operator.py -k \"not info\""
  fi
  for family in sm90 sm80 cuda; do
    for file in modes random faults; do
      echo "${family}_$file $test/test_kernels_$file.py -k $family"
    done
  done
  echo "memcheck compute-sanitizer --tool memcheck --padding 256 --error-exitcode 1 python3 tests/gpu/sanitize.py"
  echo "synccheck compute-sanitizer --tool synccheck --error-exitcode 1 python3 tests/gpu/sanitize.py"
  echo "others $test/test_kernels_decode.py tests/gpu/test_kernels_classify.py tests/gpu/test_device_problems.py"
}

run() {
  local name=${1%% *} start=$SECONDS code=0
  timeout "${FLASHMASK_TEST_SECONDS:-1800}" bash -c "${1#* }" > "$logs/$name.log" 2>&1 || code=$?
  local summary
  summary=$(grep -hE 'passed|failed|ERROR SUMMARY' "$logs/$name.log" | tail -n 1 || true)
  echo "$name: exit code $code, $((SECONDS - start)) s, $summary"
  return $((code != 0))
}
export -f run

list | xargs -d '\n' -P "$processes" -I '{}' bash -c 'run "$1"' run '{}'
