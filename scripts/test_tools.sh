#!/usr/bin/env bash
# Installs what some tests need of the system and skip without: gVisor, image builders, file systems, networks. For build servers:
# it does nothing but as root on Debian or Ubuntu, and what cannot be had is said and left out.
set -uo pipefail

packages=()
want() { command -v "$1" >/dev/null || packages+=("$2"); }
want runsc runsc
want buildah buildah
want busybox busybox-static
want mkfs.ext4 e2fsprogs
want cc gcc
want nft nftables
want ip iproute2
want curl curl

if [ "${#packages[@]}" = 0 ]; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "tests that need ${packages[*]} will be skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
timeout 120 apt-get update -q </dev/null >&2
for package in "${packages[@]}"; do # one by one: not every release has all of them
    timeout 300 apt-get install -y -q --no-install-recommends "$package" </dev/null >/dev/null ||
        echo "$package cannot be installed; tests that need it will be skipped" >&2
done
exit 0
