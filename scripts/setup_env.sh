#!/usr/bin/env bash
# Makes the environment .venv-NAME ready: a virtual environment with requirements/NAME.txt and this package, built
# and installed in place. Does only what is missing, so a second call is instant.
#
#   bash scripts/setup_env.sh NAME      # test, train, formers, bench or paddle26
#   PYTHON=python3.12 bash scripts/setup_env.sh NAME
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name="${1:-}"
requirements="requirements/$name.txt"
if [[ -z "$name" || ! -f "$requirements" ]]; then
  echo "usage: bash scripts/setup_env.sh NAME, with NAME one of:" \
    "$(basename -s .txt requirements/*.txt | tr '\n' ' ')" >&2
  exit 2
fi
venv=".venv-$name"

say() { printf '[setup %s] %s\n' "$name" "$*" >&2; }
fail() { say "error: $*"; exit 1; }

is_supported() {
  "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.10 python3}; do
    if is_supported "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "found no Python 3.10, 3.11 or 3.12; install one (Debian: apt-get install python3 python3-venv) or name" \
    "it: PYTHON=/path/to/python3.11"
}

# What the build reads. The package itself is installed in place, so its Python files are not among them.
sources_hash() {
  local files
  mapfile -t files < <(find csrc setup.py pyproject.toml scripts/{kernel_sources,build_kernels}.py -type f \
    2>/dev/null | LC_ALL=C sort)
  sha256sum "${files[@]}" | sha256sum
}

# A stamp says what a finished step was made from; a step that failed leaves none.
is_done() { [[ -f "$venv/$1.stamp" && "$(<"$venv/$1.stamp")" == "$2" ]]; }

requirements_hash="$(sha256sum <"$requirements")"
if ! is_supported "$venv/bin/python" || ! is_done requirements "$requirements_hash"; then
  python="$(find_python)"
  say "making $venv with $("$python" --version) and $requirements; the first time takes a few minutes"
  rm -rf "$venv"
  "$python" -m venv "$venv" ||
    fail "$python cannot make virtual environments (Debian: apt-get install python3-venv)"
  # -qq: errors only.
  "$venv/bin/python" -m pip install -qq --upgrade pip
  "$venv/bin/python" -m pip install -qq -r "$requirements" || fail "pip could not install $requirements, see above"
  echo "$requirements_hash" >"$venv/requirements.stamp"
fi

build_hash="$(sources_hash)"
if ! is_done build "$build_hash" || ! compgen -G "paddle_flashmask/_C*.so" >/dev/null; then
  command -v "${CXX:-g++}" >/dev/null ||
    fail "found no C++ compiler ${CXX:-g++} (Debian: apt-get install g++), which the operators are built with"
  say "building the operators"
  rm -f "$venv/build.stamp"
  "$venv/bin/python" -m pip install -qq --no-build-isolation --no-deps -e . ||
    fail "the build failed, see above"
  echo "$build_hash" >"$venv/build.stamp"
fi
