#!/usr/bin/env bash
# Finds or makes the Python environment, and prints its interpreter, alone, on stdout:
#     python=$(bash scripts/setup.sh)          what training needs
#     python=$(bash scripts/setup.sh dev)      and what the tests need
#
# An environment that is given (PYTHON=…), active (virtual environment or conda), or that already holds torch
# and torchtitan is yours: it is checked, never changed. Otherwise .venv is created in the repository.
set -euo pipefail

extra=${1:-}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
    say "error: $1"
    shift
    [ $# -eq 0 ] || printf '       %s\n' "$@" >&2
    exit 1
}

# The absolute path; unlike readlink it keeps the environment that a link to an interpreter stands for.
interpreter() { "$1" -c 'import sys; print(sys.executable)' 2>/dev/null; }

require_python_310() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "Python 3.10 or newer is needed; $1 is $("$1" -V 2>&1)." \
            "Put a newer python3 first on PATH, or give an environment that has what pyproject.toml asks for:" \
            "PYTHON=/path/to/python"
}

# An environment that is not ours: says what pyproject.toml asks for and the environment lacks.
check() {
    local python=$1 why=$2 missing
    require_python_310 "$python"
    missing=$(
        "$python" - "$root/pyproject.toml" "$extra" <<'PY'
import sys
from importlib import metadata

try:  # packaging and, on Python 3.10, tomli come with torchtitan; pip's copies serve where it is missing
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement
try:
    import tomllib
except ImportError:
    try:
        import tomli as tomllib
    except ImportError:
        from pip._vendor import tomli as tomllib

with open(sys.argv[1], "rb") as f:
    project = tomllib.load(f)["project"]
wanted = project["dependencies"] + project["optional-dependencies"].get(sys.argv[2], [])
for requirement in map(Requirement, wanted):
    if requirement.marker and not requirement.marker.evaluate():
        continue
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        found = "none"
    if found == "none" or not requirement.specifier.contains(found, prereleases=True):
        print(f"       needed: {requirement}; found: {found}")
PY
    ) || fail "could not read the requirements with $python (it needs pip, or packaging and tomli)."
    if [ -n "$missing" ]; then
        say "error: $why lacks what this needs, and is not changed by this script:"
        printf '%s\n' "$missing" >&2
        say "install it yourself, from $root:"
        printf '       %s -m pip install -c constraints.txt -e ".%s"\n' "$python" "${extra:+[$extra]}" >&2
        exit 1
    fi
    say "using $why: $python"
    printf '%s\n' "$python"
    exit 0
}

venv=$root/.venv
# Activating our own .venv must not make it somebody else's.
active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
[ "$active" = "$venv" ] && active=

if [ -n "${PYTHON:-}" ]; then
    python=$(interpreter "$PYTHON") ||
        fail "PYTHON=$PYTHON does not run." "Give the path of a Python interpreter, or unset PYTHON."
    check "$python" "the environment given by PYTHON"
elif [ -n "$active" ]; then
    python=$(interpreter "$active/bin/python") ||
        fail "the active environment $active has no working bin/python." "Deactivate or repair it."
    check "$python" "the active environment"
elif python3 -c 'from importlib.util import find_spec as f; exit(not (f("torch") and f("torchtitan")))' \
    2>/dev/null; then
    check "$(interpreter python3)" "this machine's python3, which has torch and torchtitan"
fi

# Two runs at once must not build the same .venv.
if command -v flock >/dev/null; then
    exec 9>"$root/.venv.lock"
    flock --nonblock 9 || {
        say "waiting for another setup of this repository"
        flock 9
    }
fi

stamp=$venv/.complete        # written last: its absence says that an installation did not finish
unfinished=$venv/.unfinished # written first: says that this script, not somebody else, began this .venv
wanted=$({ printf '%s\n' "$root" && cat "$root/pyproject.toml" "$root/constraints.txt"; } | cksum)

if [ -e "$venv" ] && [ ! -e "$stamp" ] && [ ! -e "$unfinished" ]; then
    python=$(interpreter "$venv/bin/python") ||
        fail "$venv was not made by this script and has no working bin/python." "Remove or repair it."
    check "$python" "the .venv found in the repository"
fi
if [ -e "$venv" ] && { [ -e "$unfinished" ] || ! interpreter "$venv/bin/python" >/dev/null; }; then
    say "$venv is half-built or broken: building it anew"
    rm -rf "$venv"
fi

if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    if [ ! -e "$venv" ]; then
        command -v python3 >/dev/null ||
            fail "there is no python3 on PATH." "Install Python 3.10 or newer."
        require_python_310 python3
        python3 -c 'import venv, ensurepip' 2>/dev/null ||
            fail "python3 ($(interpreter python3)) cannot make virtual environments." \
                "Install its venv module (Debian, Ubuntu: apt-get install python3-venv), or" \
                "give an environment that has what pyproject.toml asks for: PYTHON=/path/to/python"
        say "creating $venv with $(python3 -V)"
        mkdir "$venv"
    fi
    touch "$unfinished"
    rm -f "$stamp"
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv" >&2
    say "installing the versions of constraints.txt into $venv (a minute or two; longer where torch brings CUDA)"
    quiet=--quiet
    [ ! -t 2 ] || quiet=
    (cd "$root" && "$venv/bin/python" -m pip install ${quiet:+"$quiet"} -c constraints.txt -e ".[dev]") >&2 ||
        fail "pip could not install the requirements; its words are above." \
            "The next run starts again from nothing."
    printf '%s\n' "$wanted" >"$stamp"
    rm -f "$unfinished"
fi
say "using $venv/bin/python"
printf '%s\n' "$venv/bin/python"
