#!/usr/bin/env bash
# Runs every test, making the environments ready first: the core's in .venv-test, PaddleNLP's in .venv-train,
# PaddleFormers' in .venv-formers (the two frameworks cannot share one). Prints one total at the end. Arguments are
# handed to pytest.
#
#   bash scripts/run_tests.sh
#   bash scripts/run_tests.sh -k dropout -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup_env.sh test
bash scripts/setup_env.sh train
bash scripts/setup_env.sh formers

reports="$(mktemp -d)"
trap 'rm -rf "$reports"' EXIT
failed=0

# run ENVIRONMENT PYTEST_ARGUMENTS...
run() {
  local environment="$1" status=0
  shift
  echo "=== tests in .venv-$environment ==="
  ".venv-$environment/bin/python" -m pytest -q --junit-xml="$reports/$environment.xml" "$@" || status=$?
  # 5: no test was selected, which arguments such as -k may well do to one of them.
  if [[ $status -ne 0 && $status -ne 5 ]]; then failed=1; fi
}

run test --ignore=tests/integrations tests "$@"
# What needs the other framework is skipped in each.
run train tests/integrations "$@"
run formers tests/integrations/test_{paddleformers,paper_configs,readme,training_page}.py "$@"

.venv-test/bin/python - "$reports"/*.xml <<'PYTHON' || failed=1
"""Adds up JUnit reports; fails unless some test passed."""
import sys
import xml.etree.ElementTree as ET

suites = [suite for path in sys.argv[1:] for suite in ET.parse(path).iter("testsuite")]
tests, failures, errors, skipped = (
    sum(int(suite.get(key)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
)
passed = tests - failures - errors - skipped
print(f"total: {passed} passed, {failures + errors} failed, {skipped} skipped")
sys.exit(passed == 0)
PYTHON
exit "$failed"
