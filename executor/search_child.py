"""A search's own process: it has become the user before it opens a file, and it may be killed at any moment.

Imported by `python -I -S -c ... FD`, FD being the open directory to search below. Standard library only. The job comes
as JSON on stdin; matches go out as lines of JSON, and one last line says how the search ended. A process of its own, as
a regular expression can run for ever, holds the interpreter while it does, and can only be stopped with it.
"""

from __future__ import annotations

import base64
import fnmatch
import heapq
import json
import os
import re
import resource
import signal
import stat
import sys
import time

import spawn_helper  # type: ignore[import-not-found]  # beside us: the path is the package's own directory

TYPE_CHECKING = False  # as typing's, which takes longer to import than a small search
if TYPE_CHECKING:
    from typing import Any

MEMORY_BYTES = 768 << 20  # of address space
FILE_SEC = 2.0  # for one file's regular expression
BATCH = 20_000  # names of one directory in memory at once
TEXT_CHARS = 400  # of a line, around the match
DONE = -1  # as the line to go on from: all of that file has been searched


class TooSlow(Exception):
    """The expression did not come to an end in time."""


class Stop(Exception):
    """The limit of matches, or the deadline."""


class Search:
    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.name: str | None = job["name"]
        self.depth: int = job["depth"]
        self.left: int = job["limit"]
        self.max_file_bytes: int = job["max_file_bytes"]
        self.until = time.monotonic() + float(job["timeout_sec"])
        after = job["after"]
        self.cursor: tuple[bytes, ...] = tuple(base64.b64decode(part) for part in after["parts"]) if after else ()
        self.cursor_line: int = after["line"] if after else 0
        self.last: tuple[tuple[bytes, ...], int] = (self.cursor, self.cursor_line)
        self.counts = {"files": 0, "binary": 0, "large": 0, "unreadable": 0, "slow": 0, "too_deep": 0}
        content = job["content"]
        self.needle: bytes | None = None
        self.pattern: re.Pattern[str] | None = None
        if content is not None:
            if job["regex"] or job["ignore_case"]:
                flags = re.MULTILINE | (re.IGNORECASE if job["ignore_case"] else 0)
                self.pattern = re.compile(content if job["regex"] else re.escape(content), flags)
            else:
                self.needle = content.encode("utf-8", "surrogateescape")

    def run(self, fd: int) -> dict[str, object]:
        """The last line."""
        truncated = False
        try:
            self.below(fd, (), self.depth, self.cursor)
        except Stop:
            truncated = True
        parts, line = self.last
        after = {"parts": [_b64(part) for part in parts], "line": line} if truncated and parts else None
        return {"end": {**self.counts, "truncated": truncated or self.is_cut_by_depth(), "after": after}}

    def is_cut_by_depth(self) -> bool:
        return self.counts["too_deep"] > 0 and not self.job["depth_is_wanted"]

    def below(self, fd: int, above: tuple[bytes, ...], depth: int, cursor: tuple[bytes, ...]) -> None:
        """Each directory before its content, names in the order of their bytes, from the cursor on."""
        start = cursor[0] if cursor else b""
        while names := _names_from(fd, start):
            for name in names:
                resumed = bool(cursor) and name == cursor[0]
                inside = cursor[1:] if resumed else ()
                try:
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except OSError:
                    continue
                parts = (*above, name)
                if not inside:
                    self.visit(fd, name, parts, status, self.cursor_line if resumed else 0)
                if stat.S_ISDIR(status.st_mode):
                    self.enter(fd, name, parts, depth, inside)
            if len(names) < BATCH:
                return
            start = names[-1] + b"\0"

    def enter(self, fd: int, name: bytes, parts: tuple[bytes, ...], depth: int, cursor: tuple[bytes, ...]) -> None:
        if depth <= 1:
            self.counts["too_deep"] += 1
            return
        try:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        except OSError:
            self.counts["unreadable"] += 1
            return
        try:
            self.below(inner, parts, depth - 1, cursor)
        finally:
            os.close(inner)

    def visit(self, fd: int, name: bytes, parts: tuple[bytes, ...], status: os.stat_result, line: int) -> None:
        self.check_time()
        wanted = self.name is None or fnmatch.fnmatchcase(os.fsdecode(name), self.name)
        if wanted and line != DONE:
            if self.needle is None and self.pattern is None:
                if not line:  # else it was the last one of the page before
                    self.found(parts, status, 1, {})
            elif stat.S_ISREG(status.st_mode):
                self.content(fd, name, parts, status, line)
        self.last = (parts, DONE)

    def content(self, fd: int, name: bytes, parts: tuple[bytes, ...], status: os.stat_result, line: int) -> None:
        try:
            data = self.read(fd, name)
        except OSError:
            self.counts["unreadable"] += 1
            return
        except MemoryError:
            self.counts["large"] += 1
            return
        if data is None:
            return
        self.counts["files"] += 1
        if self.needle is not None:
            self.literal(data, parts, status, line)
            return
        signal.setitimer(signal.ITIMER_REAL, min(FILE_SEC, max(self.until - time.monotonic(), 0.01)))
        try:
            self.expression(data.decode("utf-8", "surrogateescape"), parts, status, line)
        except TooSlow:
            self.counts["slow"] += 1
        except (MemoryError, RecursionError):
            self.counts["large"] += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def read(self, fd: int, name: bytes) -> bytes | None:
        """All of a text file; None for what is none, or too large, and counted."""
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
        with open(os.open(name, flags, dir_fd=fd), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return None
            if status.st_size > self.max_file_bytes:
                self.counts["large"] += 1
                return None
            data = file.read(8192)
            if b"\0" in data:
                self.counts["binary"] += 1
                return None
            while len(data) < self.max_file_bytes and (more := file.read(self.max_file_bytes - len(data))):
                data += more
            return data

    def literal(self, data: bytes, parts: tuple[bytes, ...], status: os.stat_result, after: int) -> None:
        assert self.needle is not None
        at, line = 0, 1
        while (hit := data.find(self.needle, at)) >= 0:
            line += data.count(b"\n", at, hit)
            start, end = data.rfind(b"\n", 0, hit) + 1, data.find(b"\n", hit)
            end = len(data) if end < 0 else end
            if line > after:
                before = data[max(start, hit - 4 * TEXT_CHARS) : hit].decode("utf-8", "replace")
                column = len(data[start:hit].decode("utf-8", "replace")) + 1
                text = before[-TEXT_CHARS // 4 :] + data[hit : min(end, hit + 4 * TEXT_CHARS)].decode(
                    "utf-8", "replace"
                )
                self.found(parts, status, line, {"line": line, "column": column, "text": text[:TEXT_CHARS]})
            at, line = end + 1, line + 1
            if at > len(data):
                return

    def expression(self, text: str, parts: tuple[bytes, ...], status: os.stat_result, after: int) -> None:
        assert self.pattern is not None
        at, line = 0, 1
        while at <= len(text) and (match := self.pattern.search(text, at)) is not None:
            hit = match.start()
            if hit == len(text) and hit and text[-1] == "\n":
                return  # an empty match behind the last line
            line += text.count("\n", at, hit)
            start, end = text.rfind("\n", 0, hit) + 1, text.find("\n", hit)
            end = len(text) if end < 0 else end
            if line > after:
                shown = text[max(start, hit - TEXT_CHARS // 4) : end][:TEXT_CHARS]
                shown = shown.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
                self.found(parts, status, line, {"line": line, "column": hit - start + 1, "text": shown})
            at, line = end + 1, line + 1

    def found(self, parts: tuple[bytes, ...], status: os.stat_result, line: int, more: dict[str, object]) -> None:
        if self.left == 0:
            raise Stop
        self.left -= 1
        facts = {"parts": [_b64(part) for part in parts], "mode": status.st_mode, "size": status.st_size, **more}
        say({"match": facts})
        self.last = (parts, line)

    def check_time(self) -> None:
        if time.monotonic() > self.until:
            raise Stop


def _names_from(fd: int, start: bytes) -> list[bytes]:
    try:
        with os.scandir(fd) as scan:
            names = (os.fsencode(entry.name) for entry in scan)
            return heapq.nsmallest(BATCH, (name for name in names if name >= start))
    except OSError:
        return []


def _b64(part: bytes) -> str:
    return base64.b64encode(part).decode()


def say(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")


def _too_slow(_number: int, _frame: object) -> None:
    raise TooSlow


def main() -> None:
    """One job, and the end. Whoever started us kills us where we take too long."""
    fd = int(sys.argv[1])
    job = json.loads(sys.stdin.buffer.read())
    spawn_helper.become(job["user"])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    seconds = int(job["timeout_sec"]) + 5
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    signal.signal(signal.SIGALRM, _too_slow)
    try:
        top = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)  # as the user, whose right it needs
    except OSError as why:
        say({"refused": why.errno})
    else:
        try:
            end = Search(job).run(top)
        except re.error as why:
            end = {"bad_pattern": str(why)}
        except (OverflowError, RecursionError, MemoryError):
            end = {"bad_pattern": "it is too large"}
        say(end)
    sys.stdout.flush()
    os._exit(0)
