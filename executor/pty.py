"""Pseudo-terminals: opening one for a user, and its size."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import termios
from typing import Final

from executor.errors import NotSupported

# ioctl_tty(2); termios has no names for them before Python 3.13
_TIOCGPTN: Final = 0x80045430
_TIOCSPTLCK: Final = 0x40045431
_MODE: Final = 0o620  # as grantpt(3) has it: write(1) and wall(1) of group tty may write, nobody else may read


def open_pty(uid: int, cols: int, rows: int) -> tuple[int, int, str]:
    """(master, slave, the slave's path) of a new terminal that belongs to `uid` and has its size already.

    Raises NotSupported where this pod has no pseudo-terminals, OSError where it has no more of them."""
    try:
        master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError) as why:
        raise NotSupported(f"this pod has no pseudo-terminals: {why.strerror}; mount a devpts at /dev/pts") from why
    slave = -1
    try:
        fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
        (number,) = struct.unpack("i", fcntl.ioctl(master, _TIOCGPTN, bytes(4)))
        path = f"/dev/pts/{number}"
        slave = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        owner = os.fstat(slave)
        if owner.st_uid != uid:
            os.fchown(slave, uid, -1)
        if stat.S_IMODE(owner.st_mode) != _MODE:
            os.fchmod(slave, _MODE)
        set_size(master, cols, rows)
    except BaseException:
        if slave >= 0:
            os.close(slave)
        os.close(master)
        raise
    return master, slave, path


def set_size(master: int, cols: int, rows: int) -> None:
    """Tells the foreground programs too: SIGWINCH, where the size is another one."""
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


def end_of_input(master: int) -> bytes:
    """What the terminal takes for the end of input when it stands at the start of a line: Ctrl-D, mostly."""
    cc = termios.tcgetattr(master)[6][termios.VEOF]
    return cc if isinstance(cc, bytes) else bytes([cc])
