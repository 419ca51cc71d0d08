"""What code in a pod does to find a secret: the script of a command that looks everywhere it can."""

from __future__ import annotations

from typing import Final

# The needles come in halves, so that the script itself is no hit; its own memory is left out, which holds them whole.
_SEARCH: Final = r"""
import os, re, socket, stat, sys
needles = [(a + b).encode() for a, b in HALVES]
most = max(map(len, needles))
hits, looked, sockets = [], {}, {}

def scan(what, fd, start=0, end=1 << 22):
    at, kept = start, b""
    while at < end:
        try:
            data = os.pread(fd, min(1 << 20, end - at), at) if start or what.endswith("mem") else os.read(fd, 1 << 20)
        except (OSError, ValueError, OverflowError):
            return
        if not data:
            return
        if any(needle in kept + data for needle in needles):
            hits.append(what)
            return
        kept, at = data[-most:], at + len(data)

def look(kind, path):
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return
    looked[kind] = looked.get(kind, 0) + 1
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISREG(mode) or stat.S_ISFIFO(mode):
            scan(path, fd)
    finally:
        os.close(fd)

me = os.getpid()
for pid in sorted(filter(str.isdigit, os.listdir("/proc")), key=int):
    proc = "/proc/" + pid
    for name in ("environ", "cmdline", "maps", "status", "limits", "comm", "mountinfo", "auxv", "stack"):
        look(name, proc + "/" + name)
    if int(pid) == me:
        continue
    try:
        for fd in os.listdir(proc + "/fd"):
            look("fd", proc + "/fd/" + fd)
    except OSError:
        pass
    try:
        ranges = [line.split()[0].split("-") for line in open(proc + "/maps") if line.split()[1][0] == "r"]
        memory = os.open(proc + "/mem", os.O_RDONLY)
    except OSError:
        continue
    looked["mem"] = looked.get("mem", 0) + 1
    for low, high in ranges:
        scan(proc + "/mem", memory, int(low, 16), int(high, 16))
    os.close(memory)
environment = "\0".join(name + "=" + value for name, value in os.environ.items()).encode()
if any(needle in environment for needle in needles):
    hits.append("environment")
open_fds = [fd for fd in range(1025) if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}")]
for fd in range(1025):
    look("own fd", f"/proc/self/fd/{fd}")
for top in PLACES:
    for directory, names, files in os.walk(top):
        names[:] = [name for name in names if os.path.join(directory, name) not in LEFT_OUT]
        for name in files:
            look("file", os.path.join(directory, name))
for line in open("/proc/net/unix").read().splitlines()[1:]:
    path = line.split()[7] if len(line.split()) > 7 else ""
    if not path or not any(path.startswith(top) for top in SOCKETS):
        continue
    address = "\0" + path[1:] if path[0] == "@" else path
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(10)
    try:
        s.connect(address)
        s.sendall(b"GET /v1/lease HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b""
        while data := s.recv(65536):
            answer += data
        sockets[path] = answer[9:12].decode()
        if any(needle in answer for needle in needles):
            hits.append(path)
    except OSError as why:
        sockets[path] = type(why).__name__
    finally:
        s.close()
print(repr({"hits": hits, "looked": looked, "sockets": sockets, "fds": open_fds}))
"""


def search_script(
    needles: list[str], places: list[str], *, left_out: tuple[str, ...] = (), sockets: tuple[str, ...] = ("/", "@")
) -> str:
    """A Python script that prints the repr of a dict: `hits` (where a needle was), `looked` (how many of each kind it
    could open), `sockets` (Unix sockets whose names begin so, with their answer's status or the error), `fds` (what is
    open beyond the first three).

    `places` are directories to read whole but for those of `left_out`."""
    halves = [(needle[: len(needle) // 2], needle[len(needle) // 2 :]) for needle in needles]
    head = f"HALVES = {halves!r}\nPLACES = {places!r}\nLEFT_OUT = {left_out!r}\nSOCKETS = {sockets!r}\n"
    return head + _SEARCH
