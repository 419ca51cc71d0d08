"""This process's own terminal: raw while a session lasts, as it was before on every way out."""

from __future__ import annotations

import os
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

DEFAULT_SIZE: Final = (80, 24)
# What a program that was cut off may have switched on: mouse reports, bracketed paste, the other screen, a hidden
# cursor, colours.
RESET: Final = b"\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?1049l\x1b[?25h\x1b[0m"


class LocalTerminal:
    """Descriptors 0 and 1. `interactive` is False where one of them is no terminal, and then nothing is changed."""

    def __init__(self) -> None:
        self.in_fd, self.out_fd = 0, 1
        self.interactive = os.isatty(0) and os.isatty(1)
        self._before: list[Any] | None = None

    def size(self) -> tuple[int, int]:
        """(columns, rows)."""
        for fd in (self.out_fd, self.in_fd):
            try:
                cols, rows = os.get_terminal_size(fd)
            except OSError:
                continue
            if cols > 1 and rows > 0:
                return cols, rows
        return DEFAULT_SIZE

    @contextmanager
    def raw(self) -> Iterator[None]:
        if not self.interactive:
            yield
            return
        self._before = termios.tcgetattr(self.in_fd)
        tty.setraw(self.in_fd, termios.TCSADRAIN)
        try:
            yield
        finally:
            self.restore()

    def restore(self, *, reset: bool = False) -> None:
        """As it was; safe to repeat. `reset` also switches off what a program on the far side left on."""
        before, self._before = self._before, None
        if before is not None:
            if reset:
                write_all(self.out_fd, RESET)
            termios.tcsetattr(self.in_fd, termios.TCSADRAIN, before)

    def say(self, text: str) -> None:
        """A line of our own on stderr, whatever state the terminal is in."""
        ends = "\r\n" if self._before is not None else "\n"
        start = "\r\n" if self._before is not None else ""
        write_all(2, f"{start}sojourn: {text}{ends}".encode())


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
