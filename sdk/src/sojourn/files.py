"""The files of a task's sandbox: small ones whole, large ones as streams in constant memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO, Final

from sojourn.errors import FileMissing, PreconditionFailed, SojournError
from sojourn.transport import Body, Patience, Transport, decode
from sojourn.types import ChmodResult, FileChange, FileEntry, FileList, SearchResult

UPLOAD_SEC: Final = 3600.0
PIECE_BYTES: Final = 1 << 20
WATCH_IDLE_SEC: Final = 60.0  # four heartbeats missed
MAX_EVENT_BYTES: Final = 64 << 10
PAGE_LIMIT: Final = 10_000  # pages of one listing; a server that gives more does not count right

Content = bytes | str | Path | BinaryIO | AsyncIterable[bytes]


class AsyncFiles:
    """Paths are absolute or relative to the workspace. Text is UTF-8."""

    def __init__(self, transport: Transport, task: str) -> None:
        self._transport = transport
        self._base = f"{task}/files"

    async def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """The file's bytes from `offset` on, at most `length`. Raises FileMissing, NotAFile, PermissionDenied.

        All of it is held in memory; `iter` is for large files."""
        async with aclosing(self.iter(path, offset=offset, length=length)) as pieces:
            return b"".join([data async for data in pieces])

    async def read_text(self, path: str) -> str:
        """The file as text. Raises UnicodeDecodeError where it is none."""
        return (await self.read(path)).decode("utf-8")

    async def iter(self, path: str, *, offset: int = 0, length: int | None = None) -> AsyncGenerator[bytes, None]:
        """The file's bytes in pieces. A broken connection is taken up where it broke, in the same version of the file.

        Raises PreconditionFailed where the file has changed meanwhile."""
        if length == 0:
            return
        end = None if length is None else offset + length
        patience = Patience(self._transport)
        etag: str | None = None
        at = offset
        while True:
            headers: dict[str, str] = {}
            if at > 0 or end is not None:
                headers["Range"] = f"bytes={at}-{'' if end is None else end - 1}"
            before = at
            try:
                async with self._transport.open("GET", self._base, params={"path": path}, headers=headers) as response:
                    if etag is not None and response.headers.get("ETag") != etag:
                        raise PreconditionFailed(f"{path} was changed while it was read", status=412)
                    etag = response.headers.get("ETag")
                    async for data in response.content.iter_any():
                        at += len(data)
                        yield data
                return
            except SojournError as why:
                if at > before:
                    patience.renew()
                await patience.bear(why)

    async def download(self, path: str, target: Path) -> int:
        """Writes the file to `target` on this machine; how many bytes it has."""
        size = 0
        with await asyncio.to_thread(target.open, "wb") as file:
            async with aclosing(self.iter(path)) as pieces:
                async for data in pieces:
                    await asyncio.to_thread(file.write, data)
                    size += len(data)
        return size

    async def write(self, path: str, content: Content, *, mode: int | None = None, if_match: str | None = None) -> None:
        """Replaces the file in one step, parent directories made as needed. A Path is a file of this machine.

        Raises PreconditionFailed where `if_match` is not the file's etag, NoSpace, PermissionDenied."""
        params = {"path": path}
        if mode is not None:
            params["mode"] = f"{mode:o}"
        headers = {} if if_match is None else {"If-Match": if_match}
        if isinstance(content, Path):
            with await asyncio.to_thread(content.open, "rb") as file:
                await self.write(path, file, mode=mode, if_match=if_match)
            return
        body: Body
        if isinstance(content, str):
            body = content.encode("utf-8")
        elif isinstance(content, bytes | AsyncIterable):
            body = content
        else:
            body = _pieces(content)
        await self._transport.call(
            "PUT", self._base, retry="safe", data=body, params=params, headers=headers, deadline_sec=UPLOAD_SEC
        )

    async def list(self, path: str = ".", *, depth: int = 1) -> list[FileEntry]:
        """What is in the directory, `depth` levels of it. Raises FileMissing, NotADirectory."""
        entries: list[FileEntry] = []
        params = {"path": path, "depth": str(depth)}
        for _ in range(PAGE_LIMIT):
            answer = await self._transport.call("GET", f"{self._base}/list", retry="safe", params=params)
            page = decode(answer.body, FileList)
            entries += page.entries
            if page.next is None:
                return entries
            params["after"] = page.next
        raise SojournError(f"the listing of {path} did not end after {PAGE_LIMIT} pages")

    async def stat(self, path: str) -> FileEntry:
        """What the path is, links not followed. Raises FileMissing."""
        answer = await self._transport.call("GET", f"{self._base}/stat", retry="safe", params={"path": path})
        return decode(answer.body, FileEntry)

    async def exists(self, path: str) -> bool:
        """Whether anything is there."""
        try:
            await self.stat(path)
        except FileMissing:
            return False
        return True

    async def delete(self, path: str, *, recursive: bool = False) -> None:
        """Removes a file or an empty directory; with `recursive` all that is in it too. Raises FileMissing."""
        params = {"path": path, "recursive": "true"} if recursive else {"path": path}
        await self._transport.call("DELETE", self._base, retry="unsent", params=params)

    async def mkdir(self, path: str, *, parents: bool = True, mode: int = 0o755) -> None:
        """Makes a directory; with `parents` one that exists is no error."""
        body = {"path": path, "parents": parents, "mode": mode}
        await self._transport.call("POST", f"{self._base}/mkdir", retry="safe" if parents else "unsent", json=body)

    async def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Renames a file or directory. Raises FileMissing, and Conflict where `target` exists and stays."""
        body = {"source": source, "target": target, "overwrite": overwrite}
        await self._transport.call("POST", f"{self._base}/move", retry="unsent", json=body)

    async def chmod(self, path: str, mode: int, *, recursive: bool = False) -> ChmodResult:
        """Sets the permission bits (0o755), with `recursive` of all below it too, links left alone."""
        body = {"path": path, "mode": mode, "recursive": recursive}
        answer = await self._transport.call("POST", f"{self._base}/chmod", retry="safe", json=body)
        return decode(answer.body, ChmodResult)

    async def search(
        self,
        path: str = ".",
        *,
        name: str | None = None,
        content: str | None = None,
        regex: bool = False,
        ignore_case: bool = False,
        limit: int = 1000,
        timeout_sec: int = 10,
        after: str | None = None,
    ) -> SearchResult:
        """A page of the files below `path` whose name fits the glob `name`, and of their lines with `content`.

        `regex`: `content` is a regular expression (Python's `re`, line by line). The result's `next`, given as `after`,
        brings the next page. Files that look binary or are large are passed over and counted."""
        params = {"path": path, "limit": str(limit), "timeout_sec": str(timeout_sec)}
        given = {"name": name, "content": content, "after": after}
        params |= {key: value for key, value in given.items() if value is not None}
        params |= {key: "true" for key, value in {"regex": regex, "ignore_case": ignore_case}.items() if value}
        answer = await self._transport.call("GET", f"{self._base}/search", retry="safe", params=params)
        return decode(answer.body, SearchResult)

    async def watch(self, path: str = ".", *, recursive: bool = True) -> AsyncGenerator[FileChange, None]:
        """Changes below the directory as they happen, the first event being `watching`, the last `ended`.

        A broken connection raises ConnectionFailed: what changed meanwhile is not told, so list the directory again."""
        params = {"path": path, "recursive": "true" if recursive else "false"}
        watch = f"{self._base}/watch"
        async with self._transport.open("GET", watch, params=params, idle_sec=WATCH_IDLE_SEC) as response:
            kept = b""
            async for data in response.content.iter_any():
                *lines, kept = (kept + data).split(b"\n")
                if len(kept) > MAX_EVENT_BYTES:
                    raise SojournError("an event of the watch is too long")
                for line in lines:
                    event = decode(line, FileChange)
                    if event.type != "heartbeat":
                        yield event


async def _pieces(file: BinaryIO) -> AsyncGenerator[bytes, None]:
    while data := await asyncio.to_thread(file.read, PIECE_BYTES):
        yield data
