"""Directories to and from a sandbox, as tar streams in constant memory.

What comes out of a sandbox is a stranger's: it is unpacked by our own reader, which follows no link and lets none lead
out of the target, into a hidden directory beside it; only a whole archive is put in place. Links that lead out of the
directory, and things without content (FIFOs, sockets, devices), are left out both ways, and told of.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import msgspec

from sojourn.errors import SojournError, UnexpectedAnswer
from sojourn.tarpack import COMMENT_MARK, Packer
from sojourn.tarread import TarLimits, TarReader, TarRefused, leads_out
from sojourn.transport import Transport
from sojourn.types import Left, Transferred
from sojourn.untar import Merge, Unpacking, WouldReplace

ARCHIVE_SEC: Final = 6 * 3600.0
MERGE_SEC: Final = 3600.0
DEFAULT_MAX_BYTES: Final = 64 << 30
MAX_ENTRIES: Final = 5_000_000

Progress = Callable[[int], None]  # called with the bytes so far; from a thread of the client's

_REASONS: Final = {
    "changed": "changed while it was read", "unreadable": "may not be read", "special": "has no content",
    "links": "leads out of the directory", "too_deep": "too deep",
}  # fmt: skip


async def upload_dir(
    transport: Transport, task: str, local: str | os.PathLike[str], remote: str, progress: Progress | None
) -> Transferred:
    packer, fd = await asyncio.to_thread(_open_to_pack, Path(local))
    try:
        async with aclosing(_packed(packer, progress)) as body:
            await transport.call(
                "PUT", f"{task}/archive", retry="unsent", data=body, params={"path": remote},
                headers={"Content-Type": "application/x-tar"}, deadline_sec=ARCHIVE_SEC,
            )  # fmt: skip
    finally:
        os.close(fd)
    return Transferred(entries=packer.entries, bytes=packer.file_bytes, left=_left_of(packer.report()))


def _open_to_pack(local: Path) -> tuple[Packer, int]:
    if os.open not in os.supports_dir_fd:
        raise SojournError("directories can be copied from Linux and macOS only: this system has no openat()")
    fd = os.open(local, os.O_RDONLY | os.O_DIRECTORY)
    return Packer(fd, max_bytes=1 << 62, skip_link=leads_out), fd


async def _packed(packer: Packer, progress: Progress | None) -> AsyncGenerator[bytes, None]:
    chunks = packer.chunks()
    try:
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            yield chunk
            if progress is not None:
                progress(packer.file_bytes)
    finally:
        await asyncio.to_thread(chunks.close)


async def download_dir(
    transport: Transport,
    task: str,
    remote: str,
    local: str | os.PathLike[str],
    max_bytes: int,
    progress: Progress | None,
) -> Transferred:
    if os.open not in os.supports_dir_fd:
        raise SojournError("directories can be copied to Linux and macOS only: this system has no openat()")
    arrival = await asyncio.to_thread(_Arrival, Path(local), max_bytes)
    try:
        async with transport.open("GET", f"{task}/archive", params={"path": remote}) as response:
            async for data in response.content.iter_any():
                await asyncio.to_thread(arrival.feed, data)
                if progress is not None:
                    progress(arrival.reader.total_bytes)
        return await asyncio.to_thread(arrival.put_in_place)
    finally:
        await asyncio.shield(asyncio.to_thread(arrival.close))


class _Arrival:
    """An archive on its way into a local directory: all of it, or nothing."""

    def __init__(self, local: Path, max_bytes: int) -> None:
        """Raises NotADirectoryError, FileNotFoundError where there is no directory to make it in."""
        self._local = local
        self._is_new = not local.exists()
        if not self._is_new and not local.is_dir():
            raise NotADirectoryError(f"{local} is there and is no directory")
        where = local.absolute().parent if self._is_new else local
        self._stage = Path(tempfile.mkdtemp(prefix=".sojourn-", suffix=".part", dir=where))
        self._fd = os.open(self._stage, os.O_RDONLY | os.O_DIRECTORY)
        limits = TarLimits(entries=MAX_ENTRIES, total_bytes=max_bytes, file_bytes=max_bytes)
        self.reader = TarReader(limits, skip_outward_links=True)
        self._unpacking = Unpacking(self._fd, 0o022)

    def feed(self, data: bytes) -> None:
        try:
            self._unpacking.take(self.reader.feed(data))
        except TarRefused as why:
            raise UnexpectedAnswer(f"the sandbox's archive is refused: {why}") from None

    def put_in_place(self) -> Transferred:
        try:
            self.reader.finish()
        except TarRefused as why:
            raise UnexpectedAnswer(f"the sandbox's archive is refused: {why}") from None
        self._unpacking.close()
        if self._is_new:
            os.rename(self._stage, self._local)  # onto an empty directory at most
            self._unpacking.set_late_modes(self._fd)
            os.fchmod(self._fd, (self._unpacking.top_mode or 0) | 0o700)
        else:
            target = os.open(self._local, os.O_RDONLY | os.O_DIRECTORY)
            try:
                merge = Merge(MERGE_SEC)
                merge.check(self._fd, target)
                merge.run(self._fd, target)
                self._unpacking.set_late_modes(target)
            except WouldReplace as why:
                raise FileExistsError(f"{self._local}: {why}; nothing was written") from None
            finally:
                os.close(target)
        left = _left_of(_report_of(self._unpacking.comment))
        left += [Left(path=_text(name), reason=_REASONS["links"]) for name in self.reader.skipped_names]
        entries = self.reader.entries - self.reader.skipped_links
        return Transferred(entries=entries, bytes=self.reader.total_bytes, left=left)

    def close(self) -> None:
        self._unpacking.close()
        os.close(self._fd)
        if self._stage.exists():
            shutil.rmtree(self._stage)  # no directory in it has lost its owner's rights yet


def _report_of(comment: bytes) -> dict[str, Any]:
    """What the sandbox's side says that it left out; {} where it says nothing that can be read."""
    text = comment.decode("utf-8", "replace")
    if not text.startswith(COMMENT_MARK):
        return {}
    try:
        report: dict[str, Any] = msgspec.json.decode(text[len(COMMENT_MARK) :], type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    return report


def _left_of(report: dict[str, Any]) -> list[Left]:
    left = []
    for key, reason in _REASONS.items():
        named = report.get(key)
        names = named.get("names") if isinstance(named, dict) else None
        if isinstance(names, list):
            left += [Left(path=name, reason=reason) for name in names if isinstance(name, str)]
    return left


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")
