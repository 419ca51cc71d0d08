"""File calls under another user's identity, one thread at a time.

The kernel keeps credentials per thread; only the C library keeps a process's threads alike. So a worker thread of a
root executor takes on the command user by the bare system calls: from then on the kernel grants that thread's file
calls what it would grant the user's commands, and new files belong to the user. The real and the saved user id stay
root's, so that no command may signal or trace the thread. setfsuid(2) would do too, but gVisor does not have it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from executor.errors import ExecutorError, NotSupported
from executor.isolation import CommandUser

# setresuid, setresgid, setgroups: of x86-64, and of the table that newer architectures share.
_X86_64: Final = (117, 119, 116)
_GENERIC: Final = (147, 149, 159)
_NUMBERS: Final = {"x86_64": _X86_64, "aarch64": _GENERIC, "riscv64": _GENERIC, "loongarch64": _GENERIC}
_PR_GET_DUMPABLE: Final = 3
_PR_SET_DUMPABLE: Final = 4
_KEEP: Final = ctypes.c_uint32(0xFFFF_FFFF)  # "leave that id as it is"

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class FileUser:
    """Makes the calling thread's file accesses those of a user; does nothing where the executor is not root."""

    def __init__(self) -> None:
        self._can_switch = os.geteuid() == 0
        self._own_groups = tuple(os.getgroups())
        self._thread = threading.local()

    def assume(self, user: CommandUser) -> None:
        """For worker threads only: the thread keeps the identity. Raises ExecutorError where it cannot be had."""
        if not self._can_switch or getattr(self._thread, "user", None) == user:
            return
        self._thread.user = None
        self._switch(0, 0, self._own_groups)  # only root may take on a third one
        if (user.uid, user.gid) != (0, 0):
            self._switch(user.uid, user.gid, user.groups)
            if os.geteuid() != user.uid or os.getegid() != user.gid:
                raise ExecutorError(f"file calls could not take on the user {user.name}")
        self._thread.user = user

    @contextmanager
    def root_again(self) -> Iterator[bool]:
        """Root's rights for a few calls on open descriptors, never on names; False where there are none."""
        user: CommandUser | None = getattr(self._thread, "user", None)
        if not self._can_switch or user is None or user.uid == 0:
            yield self._can_switch
            return
        _set_ids(_X.uid, 0)
        try:
            yield True
        finally:
            _set_ids(_X.uid, user.uid)

    def _switch(self, uid: int, gid: int, groups: tuple[int, ...]) -> None:
        _set_ids(_X.uid, 0)
        array = (ctypes.c_uint32 * len(groups))(*groups)
        _checked(_libc.syscall(ctypes.c_long(_X.groups), ctypes.c_size_t(len(groups)), array))
        _set_ids(_X.gid, gid)
        _set_ids(_X.uid, uid)


class _X:
    uid, gid, groups = _NUMBERS.get(os.uname().machine, (-1, -1, -1))


def _set_ids(number: int, effective: int) -> None:
    if number < 0:
        raise NotSupported(f"file calls as another user are not known for {os.uname().machine}; run the executor as it")
    dumpable = _libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)
    _checked(_libc.syscall(ctypes.c_long(number), _KEEP, ctypes.c_uint32(effective), _KEEP))
    if dumpable == 0:  # the kernel just reset it to fs.suid_dumpable, which need not be 0
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise ExecutorError(f"file calls could not take on the command user: {os.strerror(number)}")
