#!/bin/sh
# Run while an image is built: installs the packages that are named and makes what the executor expects of an image,
# the user `sandbox` (uid and gid 1000, no way to more privileges) and /workspace. For Debian, Ubuntu, Alpine, or none.
set -eu

if [ "$#" != 0 ]; then
    if command -v apt-get >/dev/null; then
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -q
        apt-get install -y -q --no-install-recommends "$@"
        rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/apt /var/log/dpkg.log
    elif command -v apk >/dev/null; then
        apk add --no-cache "$@"
    else
        echo "prepare.sh: this image has neither apt-get nor apk to install: $*" >&2
        exit 1
    fi
fi

name_of() { # the account of a uid, or the group of a gid
    while IFS=: read -r name _ number _; do
        if [ "$number" = "$2" ]; then echo "$name"; return; fi
    done <"$1"
}

# Written by hand, since no two families of images have the same programs for it. Some images have somebody with that uid
# (node in those of Node.js): the account goes on under the new name and in the new home.
group=$(name_of /etc/group 1000)
user=$(name_of /etc/passwd 1000)
shell=/bin/sh
if [ -x /bin/bash ]; then shell=/bin/bash; fi
if [ -z "$group" ]; then
    echo "sandbox:x:1000:" >>/etc/group
else
    sed -i "s|^$group:|sandbox:|" /etc/group
fi
if [ -n "$user" ]; then
    sed -i "/^$user:/d" /etc/passwd
    if [ -f /etc/shadow ]; then sed -i "s|^$user:|sandbox:|" /etc/shadow; fi
    if [ "$user" != sandbox ] && [ -d "/home/$user" ]; then mv "/home/$user" /home/sandbox; fi
fi
echo "sandbox:x:1000:1000:sandbox:/home/sandbox:$shell" >>/etc/passwd

mkdir -p /home/sandbox /workspace
chown 1000:1000 /home/sandbox /workspace
chmod 755 /home/sandbox /workspace
