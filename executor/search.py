"""Searches by name and content, each in a process of its own that has the user's rights, a deadline and bounds."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from executor import kernel
from executor.errors import Conflict, InvalidRequest, RateLimited, TooLarge
from executor.files import FileService
from executor.filetree import path_base64, type_name
from executor.isolation import CommandUser
from executor.pipereader import PipeReader, new_pipes
from executor.pipes import StdinWriter
from executor.safepath import Place, directory_at, file_error
from executor.spawn import Spawner
from executor.wire import MiB, SearchMatch, SearchResult, SearchSkips

MAX_DEPTH: Final = 64
MAX_LIMIT: Final = 10_000
DEFAULT_LIMIT: Final = 1_000
MAX_TIMEOUT_SEC: Final = 60
DEFAULT_TIMEOUT_SEC: Final = 10
MAX_FILE_BYTES: Final = 64 * MiB
DEFAULT_FILE_BYTES: Final = 10 * MiB
_MAX_PATTERN: Final = 1000  # characters
_MAX_AT_ONCE: Final = 4
_ANSWER_BYTES: Final = 32 * MiB
_GRACE_SEC: Final = 3.0  # beyond the deadline that the process keeps by itself, its start included
_CODE: Final = f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]; import search_child; search_child.main()"


class SearchTerms(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    name: str | None  # a glob for the last component
    content: str | None
    regex: bool
    ignore_case: bool
    depth: int
    limit: int
    timeout_sec: int
    max_file_bytes: int
    after: str | None


class SearchService:
    def __init__(self, files: FileService, spawner: Spawner) -> None:
        self._files = files
        self._spawner = spawner
        self._under_way = 0

    async def search(self, terms: SearchTerms, user: str | None = None) -> SearchResult:
        """A page of what is found. Raises InvalidRequest, FileMissing, NotADirectory, PermissionDenied, RateLimited."""
        place = self._files.roots.place(terms.path)
        who = self._files.threads.named(user)
        job = _job_of(terms) | {"user": self._spawner.identity(who, nofile=1024)}
        with self._slot():
            async with self._directory(place, who) as fd, self._process(fd) as process:
                gathered = _Gathered(place)
                try:
                    async with asyncio.timeout(terms.timeout_sec + _GRACE_SEC):
                        await process.stdin.write(json.dumps(job).encode())
                        process.stdin.end()
                        await gathered.read_all(process.stdout)
                except TimeoutError:
                    return gathered.cut_off()
                return gathered.result()

    @asynccontextmanager
    async def _directory(self, place: Place, who: CommandUser) -> AsyncIterator[int]:
        """Opened as the user, for the process to begin at."""

        def open_it() -> int:
            with directory_at(place) as fd:
                return os.dup(fd)

        fd = await self._files.threads.run(who, open_it)
        try:
            yield fd
        finally:
            os.close(fd)

    @asynccontextmanager
    async def _process(self, fd: int) -> AsyncIterator[_Process]:
        loop = asyncio.get_running_loop()
        starting = loop.run_in_executor(None, _Process, fd)
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_end_unwanted)
            raise
        try:
            process.attach(self._spawner)
            yield process
        finally:
            process.close()

    @contextmanager
    def _slot(self) -> Iterator[None]:
        if self._under_way >= _MAX_AT_ONCE:
            raise RateLimited(f"{_MAX_AT_ONCE} searches are under way here, as many as may", limit=_MAX_AT_ONCE)
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1


class _Process:
    """Made in a thread; it waits for its job, so it lives until `attach` has made the reaper expect it."""

    stdin: StdinWriter
    stdout: PipeReader

    def __init__(self, fd: int) -> None:
        (theirs_in, self._in), (self._out, theirs_out) = new_pipes(2)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CODE, str(fd)],
                stdin=theirs_in,
                stdout=theirs_out,
                stderr=subprocess.DEVNULL,
                pass_fds=(fd,),
                env={"LC_ALL": "C.UTF-8"},
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            os.close(self._in)
            os.close(self._out)
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._pidfd = -1
        if kernel.HAS_PIDFD:
            with suppress(OSError):  # then by its number, which is its own until it is collected
                self._pidfd = os.pidfd_open(self._process.pid)
        self._ended = False
        self._attached = False

    def attach(self, spawner: Spawner) -> None:
        self.stdin = StdinWriter(spawner.loop, self._in)
        self.stdout = PipeReader(spawner.loop, self._out)
        self._attached = True
        spawner.reaper.expect(self._process.pid, self._died)

    def _died(self, status: int, _user: float, _system: float, _rss: int) -> None:
        self._ended = True
        self._process.returncode = os.waitstatus_to_exitcode(status)  # collected by the reaper, not by Popen

    def close(self) -> None:
        if self._attached:
            self.stdin.close()
            self.stdout.close()
        else:
            os.close(self._in)
            os.close(self._out)
        try:
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            elif not self._ended:
                os.kill(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if self._pidfd >= 0:
            os.close(self._pidfd)
        if self._process.returncode is None:
            self._process.returncode = -signal.SIGKILL  # the reaper collects it; Popen must not wait for it too


def _end_unwanted(starting: asyncio.Future[_Process]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()


class _Gathered:
    """The process's lines as an answer."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._bytes = 0
        self._last: dict[str, Any] | None = None
        self.matches: list[SearchMatch] = []

    async def read_all(self, source: PipeReader) -> None:
        kept = b""
        while data := await source.read():
            self._bytes += len(data)
            if self._bytes > _ANSWER_BYTES:
                raise TooLarge(f"the answer is over {_ANSWER_BYTES} bytes; ask for fewer matches with `limit`",
                               limit=_ANSWER_BYTES)  # fmt: skip
            *lines, kept = (kept + data).split(b"\n")
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            said = json.loads(line)
            match = said.get("match")
            if match is None:
                self._last = said
                return
            path = self._place.path.rstrip(b"/") + b"/" + b"/".join(base64.b64decode(part) for part in match["parts"])
            self.matches.append(SearchMatch(
                path=path.decode("utf-8", "replace"), path_base64=path_base64(path), type=type_name(int(match["mode"])),
                size=int(match["size"]), line=match.get("line"), column=match.get("column"), text=match.get("text"),
            ))  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError):  # a command has the same user, and can trace it
            raise Conflict("something in the pod disturbed the search; repeat it") from None

    def result(self) -> SearchResult:
        """Raises what the process found wrong with the job."""
        last = self._last
        if last is None:
            raise Conflict("something in the pod ended the search, or there is no memory for it; repeat it")
        if "refused" in last:
            raise file_error(OSError(last["refused"], os.strerror(last["refused"])), self._place.path)
        if "bad_pattern" in last:
            raise InvalidRequest(f"query: content is no regular expression: {last['bad_pattern']}", field="content")
        try:
            end = last["end"]
            after = end["after"]
            return SearchResult(
                matches=self.matches, truncated=bool(end["truncated"]), files_searched=end["files"],
                skipped=SearchSkips(**{name: int(end[name]) for name in SearchSkips.__struct_fields__}),
                next=base64.urlsafe_b64encode(json.dumps(after).encode()).decode() if after else None,
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Conflict("something in the pod disturbed the search; repeat it") from None

    def cut_off(self) -> SearchResult:
        """Where the process did not keep its own deadline."""
        return SearchResult(matches=self.matches, truncated=True, files_searched=0, skipped=SearchSkips())


def _job_of(terms: SearchTerms) -> dict[str, object]:
    if terms.name is None and not terms.content:
        raise InvalidRequest("query: say what to look for: name, content or both", field="name")
    for field in ("name", "content"):
        text: str | None = getattr(terms, field)
        if text is None:
            continue
        if len(text) > _MAX_PATTERN:
            raise InvalidRequest(f"query: {field} is longer than {_MAX_PATTERN} characters", field=field)
        if "\0" in text:
            raise InvalidRequest(f"query: {field} holds a NUL character", field=field)
    if terms.name is not None and ("/" in terms.name or not terms.name):
        raise InvalidRequest("query: name is compared with the last component, and has no slash", field="name")
    return {
        "name": terms.name, "content": terms.content or None, "regex": terms.regex, "ignore_case": terms.ignore_case,
        "depth": terms.depth, "depth_is_wanted": terms.depth < MAX_DEPTH, "limit": terms.limit,
        "timeout_sec": terms.timeout_sec, "max_file_bytes": terms.max_file_bytes, "after": _after_of(terms.after),
    }  # fmt: skip


def _after_of(text: str | None) -> dict[str, object] | None:
    if text is None:
        return None
    try:
        after = json.loads(base64.b64decode(text, altchars=b"-_", validate=True))
        parts, line = after["parts"], after["line"]
        raw = [base64.b64decode(part, validate=True) for part in parts]
        is_good = isinstance(line, int) and line >= -1 and 0 < len(raw) <= MAX_DEPTH
        if is_good and not any(part in (b"", b".", b"..") or b"/" in part or b"\0" in part for part in raw):
            return {"parts": parts, "line": line}
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise InvalidRequest("query: after must be the `next` of another page", field="after")
