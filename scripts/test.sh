#!/usr/bin/env bash
# Lint, format and tests: bash scripts/test.sh [pytest arguments…]
# Tests marked slow are left out: bash scripts/test.sh -m slow runs those alone, -m gpu those that need an SM90 GPU.
# PYTHON gives an environment to use as it is; see setup.sh.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
say() { printf 'test: %s\n' "$*" >&2; }

python=$(bash "$root/scripts/setup.sh" dev)

cd "$root"
# In an environment of the user's own the package need not be installed.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

say "ruff check ."
"$python" -m ruff check .
say "ruff format --check ."
"$python" -m ruff format --check .
say "pytest -q $*"
"$python" -m pytest -q "$@"
