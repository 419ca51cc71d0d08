"""A disk of bounded size for a pod, which holds its /workspace, /tmp and /var/tmp. All calls block.

The disk is mounted in a mount namespace that only the pod's processes are in, between the launcher and what isolates
the pod. So nothing of it is ever seen outside, and when the last of these processes ends, however it ends, the kernel
takes the mount and the loop device away by itself: a manager that dies leaves nothing to clear up but a file in the
pod's directory.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

Way = Literal["loop", "memory"]

PROBE_SEC: Final = 10.0
MKFS_SEC: Final = 60.0
MOUNT_POINT: Final = "disk"  # in the pod's directory: an empty directory outside of the pod's mount namespace
IMAGE: Final = "disk.img"
LEAST_BYTES: Final = 16 << 20
_PROBE_BYTES: Final = LEAST_BYTES

# No journal and no flush at the end: what a pod leaves is thrown away with it. Nothing written ahead: the file is as
# large as what the pod has stored.
_MKFS: Final = ("-q", "-F", "-O", "^has_journal", "-m", "0", "-E", "lazy_itable_init=1,nodiscard")
_LOOP_OPTIONS: Final = "loop,nosuid,nodev,noatime,noinit_itable"

_SCRIPT: Final = """\
dir=$1 owner=$2 type=$3 options=$4 source=$5; shift 5
mount -n -t "$type" -o "$options" "$source" "$dir" || exit 125
cd "$dir" && mkdir workspace tmp var-tmp && chown "$owner" workspace || exit 125
chmod 755 . workspace && chmod 1777 tmp var-tmp && cd / || exit 125
exec "$@"
"""


class DiskWay(msgspec.Struct, frozen=True, kw_only=True):
    """How pods' disks are bounded on this machine."""

    way: Way | None  # `loop`: a file with a file system; `memory`: tmpfs, part of the pod's memory; None: not at all
    why_not: str = ""  # where there is none
    weaker_because: str = ""  # where only memory serves


def probe(data_dir: Path, *, root: bool, bwrap_path: str) -> DiskWay:
    """Makes a small disk in each way, the best first, until one holds a file."""
    ways: tuple[Way, ...] = ("loop", "memory") if root else ("memory",)
    failures: list[str] = []
    for way in ways:
        failure = _try(way, data_dir, root=root, bwrap_path=bwrap_path)
        if failure is None:
            return DiskWay(way=way, weaker_because="; ".join(failures) if root else "not root")
        failures.append(failure)
    return DiskWay(way=None, why_not="; ".join(failures))


def make_image(home: Path, size_bytes: int) -> None:
    """The file of a `loop` disk, with an empty file system that fills it. Raises OSError."""
    image = home / IMAGE
    with open(image, "xb") as file:
        file.truncate(size_bytes)
    program = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise FileNotFoundError(errno.ENOENT, "mkfs.ext4 is not installed (e2fsprogs)")
    try:
        done = subprocess.run(
            [program, *_MKFS, str(image)], stdin=subprocess.DEVNULL, capture_output=True, timeout=MKFS_SEC, check=False
        )
    except subprocess.TimeoutExpired as why:
        raise OSError(errno.EIO, f"mkfs.ext4 did not end within {MKFS_SEC:.0f} s") from why
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-400:]
        raise OSError(errno.ENOSPC if "No space left" in said else errno.EIO, f"mkfs.ext4: {said}")


def wrapper(way: Way, home: Path, size_bytes: int, *, owner: int, root: bool, bwrap_path: str) -> tuple[str, ...]:
    """Argv to stand before that of the pod: it mounts the disk for what comes after it and becomes that.

    `owner` is whose /workspace is; without root it is ours in any case."""
    target = str(home / MOUNT_POINT)
    if not root:
        made = [f"--perms {mode} --dir {target}/{name}".split(" ", 3) for name, mode in _DIRECTORIES]
        size = ("--perms", "0755", "--size", str(size_bytes), "--tmpfs", target)
        return (bwrap_path, "--dev-bind", "/", "/", *size, *(word for words in made for word in words), "--")
    kind, options, source = "ext4", _LOOP_OPTIONS, str(home / IMAGE)
    if way == "memory":
        kind, options, source = "tmpfs", f"size={size_bytes},mode=0755,nosuid,nodev", "sojourn-disk"
    script = ("sh", "-c", _SCRIPT, "sojourn-disk", target, f"{owner}:{owner}", kind, options, source)
    return ("unshare", "--mount", "--propagation", "private", *script)


_DIRECTORIES: Final = (("workspace", "0755"), ("tmp", "1777"), ("var-tmp", "1777"))


def _try(way: Way, data_dir: Path, *, root: bool, bwrap_path: str) -> str | None:
    """None where a disk of this way can be written to; else what went wrong."""
    try:
        where = next(path for path in (data_dir, *data_dir.parents) if path.is_dir())  # the doctor comes before `up`
        with tempfile.TemporaryDirectory(prefix=".probe-disk-", dir=where) as name:
            home = Path(name)
            (home / MOUNT_POINT).mkdir()
            if way == "loop":
                make_image(home, _PROBE_BYTES)
            before = wrapper(way, home, _PROBE_BYTES, owner=os.geteuid(), root=root, bwrap_path=bwrap_path)
            return _run([*before, "sh", "-c", f'echo x > "{home}/{MOUNT_POINT}/workspace/x"'])
    except OSError as why:
        return f"{way}: {why.strerror or why}"


def _run(argv: Sequence[str]) -> str | None:
    """None where it ends well within the deadline. One that does not is killed and not waited for."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)
        try:
            code = process.wait(PROBE_SEC)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"no end within {PROBE_SEC:.0f} s"
        said.seek(0)
        text = said.read().decode(errors="replace").strip()[-400:]
    return None if code == 0 else text or f"exit code {code}"
