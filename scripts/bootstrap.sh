#!/usr/bin/env bash
# Makes .venv with everything that `make up` (bootstrap.sh run) or `make test` (bootstrap.sh dev) needs.
#
# Exactly the locked versions are installed, each checked against its hash, and nothing is compiled. A second run with
# nothing changed returns at once. It can be interrupted anywhere: the stamp is written last, the next run goes on.
# PYTHON names the interpreter to use; without it the first of python3, python3.13, 3.12, 3.11 that is 3.11 to 3.13.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kind=${1:-run}
case $kind in
    run | dev) ;;
    *) echo "usage: scripts/bootstrap.sh [run|dev]" >&2; exit 2 ;;
esac
venv=.venv
python=$venv/bin/python
stamp=$venv/.sojourn-$kind

say() { printf 'setup: %s\n' "$*" >&2; }
die() { printf 'setup: %s\n' "$@" >&2; exit 1; }

# What the environment was made from. The directory is part of it: scripts in a venv hold absolute paths.
fingerprint() {
    pwd -P
    sha256sum requirements/run.txt "requirements/$kind.txt" pyproject.toml sdk/pyproject.toml scripts/bootstrap.sh
}

usable() { [ -x "$(command -v "$1")" ] && "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if usable "$candidate"; then command -v "$candidate"; return; fi
    done
    die "needs Python 3.11, 3.12 or 3.13 and found none as ${PYTHON:-python3, python3.13, python3.12 or python3.11}." \
        "Install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name it: make up PYTHON=/path/to/python3.12"
}

# Debian and Ubuntu ship python3 without ensurepip; then a venv cannot be made before python3-venv is installed.
install_venv_package() {
    local base=$1 version package
    version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    package=python$version-venv
    command -v apt-get >/dev/null || die "$base has no ensurepip module. Install your system's package for it, then run this again."
    if [ "$(id -u)" != 0 ]; then
        die "$base has no ensurepip module. Run this once, then try again:" "    sudo apt-get install -y $package"
    fi
    say "installing $package, which $base needs to make an environment"
    DEBIAN_FRONTEND=noninteractive apt-get update -q </dev/null >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$package" </dev/null >&2
}

make_venv() {
    local base
    base=$(find_python)
    say "making $venv with $("$base" -V)"
    rm -rf "$venv"
    "$base" -c 'import ensurepip, venv' 2>/dev/null || install_venv_package "$base"
    "$base" -m venv "$venv" || { rm -rf "$venv"; die "$base -m venv failed; see above."; }
}

same_place() { # the venv works and was made for this directory
    "$python" -m pip --version >/dev/null 2>&1 && [ "$(cat "$venv/.sojourn-place" 2>/dev/null)" = "$(pwd -P)" ] && usable "$python"
}

now=$(fingerprint)
if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$now" ]; then exit 0; fi

# Two makes at once would install into each other's half-made environment.
if command -v flock >/dev/null; then
    exec 9>.venv.lock
    flock -n 9 || { say "another setup is under way, waiting for it"; flock 9; }
    if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$now" ]; then exit 0; fi
fi

same_place || make_venv
rm -f "$venv"/.sojourn-run "$venv"/.sojourn-dev
pwd -P >"$venv/.sojourn-place"

pip_install() { "$python" -m pip --disable-pip-version-check --no-input install --progress-bar off "$@" </dev/null 9>&-; }

# pip's own lines are many; a person wants to see that it moves, a log wants one line.
counted() {
    local line count=0 total=$1
    while IFS= read -r line; do
        [[ $line == Collecting* && -t 2 ]] || continue
        count=$((count + 1))
        line=${line#Collecting } line=${line%% *}
        printf '\rsetup: %d of %d  %-50s' "$count" "$total" "${line%%=*}" >&2
    done
    if [ "$count" != 0 ]; then printf '\r%-72s\r' '' >&2; fi
}

total=$(grep -c == "requirements/$kind.txt")
started=$SECONDS
say "installing $total locked packages (once)"
pip_install --require-hashes --only-binary :all: -r "requirements/$kind.txt" | counted "$total"
say "installing sojourn-server and sojourn from this directory"
pip_install --quiet --no-deps --no-build-isolation -e . -e sdk
printf '%s\n' "$now" >"$stamp"
# The development environment holds all that the other one does.
if [ "$kind" = dev ]; then kind=run; fingerprint >"$venv/.sojourn-run"; fi
say "done in $((SECONDS - started)) s"
