"""The peak of this process's memory from a moment on.

Not getrusage(2)'s ru_maxrss: that keeps every earlier peak, and what the parent had when it forked. See
proc_pid_clear_refs(5).
"""

from __future__ import annotations

from pathlib import Path


def peak_from_now_bytes() -> int:
    """Bytes that are held now; the peak is counted from here on."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) << 10
