#!/usr/bin/env bash
# Checks format, style, types and that generated files are up to date, in .venv-test; --fix formats and mends
# what can be mended.
#
#   bash scripts/lint.sh [--fix]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bin="$PWD/.venv-test/bin"
[[ -x "$bin/ruff" ]] || bash scripts/setup_env.sh test
mapfile -t kernels < <(git ls-files "csrc/*.h" "csrc/*.cc" "csrc/*.cuh" "csrc/*.cu" "tests/host/*")

if [[ "${1:-}" == --fix ]]; then
  "$bin/ruff" format
  "$bin/ruff" check --fix
  "$bin/clang-format" -i "${kernels[@]}"
  exit
fi

failed=0
check() {
  echo "--- $1 ${2:-}"
  "$bin/$@" || failed=1
}
check ruff format --check
check ruff check
check mypy
check clang-format --dry-run -Werror "${kernels[@]}"
check python scripts/generate_instantiations.py --check
check python scripts/generate_wgmma.py --check
exit "$failed"
