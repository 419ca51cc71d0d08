"""Keeps the processors from going to sleep between the steps of one request.

What is answered in half a millisecond by two processes in turn waits several times for a processor to wake up. On an
idle virtual machine that takes some 50 microseconds each time: the host's doing, and more than what is measured. On a
machine that does anything else besides it is not there. So a figure in absolute time is taken with both."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# The kernel runs it only where nothing else wants the processor: by its policy within its session, and by the
# session's weight against others (sched(7), autogroup).
_SPIN: Final = """
import os
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
try:
    with open("/proc/self/autogroup", "w") as weight:
        weight.write("19")
except OSError:
    pass
print(flush=True)
while os.getppid() == PARENT:
    for _ in range(100_000):
        pass
"""


@contextmanager
def processors_awake() -> Iterator[None]:
    """While it is entered. Raises OSError where a process cannot be started."""
    spinning: list[subprocess.Popen[bytes]] = []
    try:
        for _ in os.sched_getaffinity(0):
            program = _SPIN.replace("PARENT", str(os.getpid()))
            spinning.append(subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                start_new_session=True,
            ))  # fmt: skip
        for process in spinning:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in spinning:
            process.kill()
        for process in spinning:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
