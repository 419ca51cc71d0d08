"""A program on a real pseudo-terminal, as in somebody's terminal window."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

WAIT_SEC = 60.0


class LocalTty:
    """`shown` is everything that the program wrote so far."""

    def __init__(self, argv: list[str], env: Mapping[str, str], *, cols: int = 80, rows: int = 24) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(cols, rows)
        self.before = termios.tcgetattr(self.slave)
        self.shown = b""
        # As leader of a new session `sh` gets the terminal that it opens as its controlling one (tty_ioctl(4)).
        enter = ["sh", "-c", 'exec "$@" 0<>"$0" 1>&0 2>&0', os.ttyname(self.slave), *argv]
        self.process = subprocess.Popen(
            enter, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    def type(self, text: str | bytes) -> None:
        os.write(self.master, text.encode() if isinstance(text, str) else text)

    def resize(self, cols: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def read_until(self, text: str | bytes, since: int = 0) -> bytes:
        """Everything shown from `since` on, once `text` is in it."""
        wanted = text.encode() if isinstance(text, str) else text
        give_up = time.monotonic() + WAIT_SEC
        while wanted not in self.shown[since:]:
            assert time.monotonic() < give_up, f"{wanted!r} did not show: {self.shown[-2000:]!r}"
            self._read(0.1)
        return self.shown[since:]

    def _read(self, wait_sec: float) -> bool:
        if not select.select([self.master], [], [], wait_sec)[0]:
            return False
        self.shown += os.read(self.master, 65_536)
        return True

    def wait(self) -> int:
        """The program's exit code; what it still shows is read meanwhile."""
        give_up = time.monotonic() + WAIT_SEC
        while self.process.poll() is None:
            assert time.monotonic() < give_up, f"it does not end: {self.shown[-2000:]!r}"
            self._read(0.05)
        while self._read(0):
            pass
        return self.process.returncode

    @property
    def settings(self) -> list[Any]:
        return termios.tcgetattr(self.slave)
