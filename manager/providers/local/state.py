"""The label store: one directory and one small file per pod, shared by every manager on the machine. All calls block.

<data dir>/pods/<name>/pod.json      what is known of the pod; replaced atomically, under `lock`
                       lock          flock(2) of whoever is changing pod.json
                       creating      flock(2) of whoever is making the pod: free means that its maker has died
                       launcher      /proc/PID/stat of the outer process, written by itself
                       status        what bubblewrap says about the pod's end
                       log           the executor's stdout and stderr
                       run/ state/ etc/ workspace/
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from manager.model import Pod
from manager.providers.base import ClaimLost, PodGone
from manager.providers.local.cgroups import PodCgroup
from manager.providers.local.network import PodNetwork
from manager.providers.local.processes import ProcessId

LOCK_SEC: Final = 5.0  # a change holds the lock for well under a millisecond
_NEW: Final = ".new-"
_UNPACKED: Final = re.compile(r"/sha256-([0-9a-f]{64})/rootfs\Z")
_TRASH: Final = ".trash-"

Phase = Literal["creating", "ready", "deleting"]


class PodRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One pod.json."""

    name: str
    target: str  # whose pod it is: targets may share a data directory
    version: int  # counts the changes of labels and annotations
    phase: Phase
    labels: dict[str, str]
    annotations: dict[str, str]
    created_at: float  # seconds since the epoch
    boot_id: str  # of the machine: after its restart no process of the record is alive
    socket: str
    run_dir: str  # holds the socket; outside the pod's directory where that path is too long for a socket
    cgroups: list[PodCgroup] = []
    isolation: str = "namespaces"  # `gvisor`; `none`: plain processes
    image: str = ""  # root directory of the pod's system; "": this machine's own
    workspace: str = ""  # where it is not in the pod's directory
    inner: ProcessId | None = None  # the executor, PID 1 of the pod
    outer: ProcessId | None = None  # bubblewrap outside, waiting for it
    network: PodNetwork | None = None  # None: nothing but loopback

    def alive(self, boot: str) -> bool:
        return self.boot_id == boot and self.inner is not None and self.inner.alive()


def pod_of(record: PodRecord) -> Pod:
    return Pod(
        name=record.name, version=str(record.version), target=record.target, labels=record.labels,
        annotations=record.annotations, address=f"unix:{record.socket}", ready=record.phase == "ready",
        deleting=record.phase == "deleting", created_at=record.created_at, image_digest=_digest_of(record.image),
    )  # fmt: skip


def _digest_of(root: str) -> str:
    """Images are unpacked into directories that are called by their digests, if they have one (`images`)."""
    found = _UNPACKED.search(root)
    return f"sha256:{found[1]}" if found is not None else ""


class PodStore:
    """The pods' directories under one data directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """Makes the root, for this user alone. Raises OSError."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        return self.root / name

    def begin(self, record: PodRecord) -> int:
        """Makes the pod's directory in one step, with the maker's lock held, and gives the lock's descriptor.

        Raises FileExistsError where the name is taken."""
        fresh = self.root / f"{_NEW}{record.name}-{secrets.token_hex(8)}"
        fresh.mkdir(mode=0o700)
        held: int | None = None
        try:
            held = os.open(fresh / "creating", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(held, fcntl.LOCK_EX)
            (fresh / "lock").touch(mode=0o600)
            (fresh / "pod.json").write_bytes(msgspec.json.encode(record))
            os.rename(fresh, self.path(record.name))
        except BaseException as why:
            if held is not None:
                os.close(held)
            for left in fresh.iterdir():
                left.unlink()
            fresh.rmdir()
            if isinstance(why, OSError) and why.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(errno.EEXIST, "there is a pod of this name", record.name) from why
            raise
        return held

    def read(self, name: str) -> PodRecord | None:
        """None where there is no such pod, or where its file is no record (a machine that lost power)."""
        try:
            raw = (self.path(name) / "pod.json").read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return msgspec.json.decode(raw, type=PodRecord)
        except msgspec.DecodeError:
            return None

    def names(self) -> list[str]:
        """Every pod's name, those of dead pods too."""
        try:
            with os.scandir(self.root) as entries:
                return sorted(
                    entry.name
                    for entry in entries
                    if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
                )
        except FileNotFoundError:
            return []

    def change(self, name: str, how: Callable[[PodRecord], PodRecord]) -> PodRecord:
        """Replaces the record with what `how` makes of it: one step among all processes. `how` may raise.

        Raises PodGone, and ClaimLost where the lock was not to be had; nothing was changed then."""
        with self._locked(name):
            record = self.read(name)
            if record is None:
                raise PodGone(name)
            changed = how(record)
            fresh = self.path(name) / f".pod-{secrets.token_hex(8)}"
            try:
                fresh.write_bytes(msgspec.json.encode(changed))
                os.replace(fresh, self.path(name) / "pod.json")
            except BaseException:
                fresh.unlink(missing_ok=True)
                raise
            return changed

    def patch(
        self, name: str, version: str, labels: Mapping[str, str | None], annotations: Mapping[str, str | None]
    ) -> PodRecord:
        """Sets or (None) removes entries if the pod is still at `version`. Raises ClaimLost, PodGone."""

        def apply(record: PodRecord) -> PodRecord:
            if record.phase != "ready" or str(record.version) != version:
                raise ClaimLost(f"pod {name} is {record.phase} at version {record.version}, not ready at {version}")
            return msgspec.structs.replace(
                record, version=record.version + 1,
                labels=_merged(record.labels, labels), annotations=_merged(record.annotations, annotations),
            )  # fmt: skip

        return self.change(name, apply)

    def abandoned(self, name: str) -> bool:
        """Whether nobody is making this pod any more."""
        try:
            fd = os.open(self.path(name) / "creating", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(fd)

    def retire(self, name: str) -> Path | None:
        """Takes the pod's directory out of the store in one step and says where it is now; None where it is gone."""
        trash = self.root / f"{_TRASH}{name}-{secrets.token_hex(8)}"
        try:
            os.rename(self.path(name), trash)
        except FileNotFoundError:
            return None
        return trash

    def leftovers(self) -> list[Path]:
        """Directories that a dead manager was making or removing."""
        found = list(self.root.glob(f"{_TRASH}*"))
        for entry in self.root.glob(f"{_NEW}*"):
            # The age, because a directory is there a moment before its lock is.
            with contextlib.suppress(FileNotFoundError):
                if entry.stat().st_mtime < time.time() - 60 and self.abandoned(entry.name):
                    found.append(entry)
        return found

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        try:
            fd = os.open(self.path(name) / "lock", os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as why:
            raise PodGone(name) from why
        try:
            deadline = time.monotonic() + LOCK_SEC
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise ClaimLost(f"pod {name} is being changed by somebody else") from None
                    time.sleep(0.001)
            yield
        finally:
            os.close(fd)


def _merged(old: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    merged = dict(old)
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = value
    return merged
