#!/usr/bin/env bash
# Writes requirements/run.txt and requirements/dev.txt anew: every version with the hashes of its wheels, for Python
# 3.11 to 3.13 on any platform, without an index's address. Needs uv on the PATH or in .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if command -v uv >/dev/null; then
    uv=uv
elif [ -x .venv/bin/uv ]; then
    uv=.venv/bin/uv
else
    echo "lock: uv is not installed; get it with: .venv/bin/python -m pip install uv" >&2
    exit 1
fi

resolve() {
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --only-binary :all: \
        --no-emit-index-url --no-emit-find-links --no-header --no-annotate "$@" >/dev/null
}

compile() { resolve pyproject.toml sdk/pyproject.toml --extra manager --extra kubernetes --extra local "$@"; }

compile "${@}" --group build --output-file requirements/run.txt
# What runs in development is what is tested: dev.txt takes run.txt's versions over.
compile "${@}" --group dev --constraint requirements/run.txt --output-file requirements/dev.txt
# Other servers that the benchmark runs beside ours, each in an environment of its own.
for peer in benchmarks/peers/requirements-*.in; do
    resolve "${@}" "$peer" --output-file "${peer%.in}.txt"
done
grep -c == requirements/run.txt requirements/dev.txt
