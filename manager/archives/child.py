"""Runs the conversion: a spooled archive in, the bytes of a layer out, by child processes that end with the caller."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO, Final, Literal

import msgspec

from executor.gunzip import FREE_BYTES, MAX_RATIO
from executor.layerwire import RAW_BEGIN, RAW_END, raw_blocks
from executor.tarread import Fault, TarLimits

Kind = Literal["tar", "gzip", "zstd", "zip"]

LIMITS: Final = TarLimits(entries=200_000, total_bytes=16 << 30)
CONVERT_SEC: Final = 900.0
PIECE_BYTES: Final = 256 * 1024
_WORDS_BYTES: Final = 16 * 1024
_MAGIC: Final[tuple[tuple[bytes, Kind], ...]] = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"PK\x03\x04", "zip"),
    (b"PK\x05\x06", "zip"),
)
_ENV: Final = {"LANG": "C.UTF-8", "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


class ArchiveRefused(Exception):
    """Nothing of the archive may be used. `member`: whose fault it is, "" where none is known."""

    def __init__(self, why: str, fault: Fault = "malformed", member: str = "", limit: int | None = None) -> None:
        super().__init__(why)
        self.fault, self.member, self.limit = fault, member, limit


class NoZstd(Exception):
    """This machine has no `zstd` program, which the archive needs."""


class _Report(msgspec.Struct):
    entries: int = 0
    bytes: int = 0
    fault: Fault | None = None
    message: str = ""
    member: str = ""
    limit: int | None = None


@dataclass
class Layer:
    """`pieces`: a zstd stream of one plain tar. The counts are there once it has ended."""

    pieces: AsyncGenerator[bytes, None]
    entries: int = 0
    file_bytes: int = 0


def kind_of(head: bytes) -> Kind:
    """By the first bytes: what nobody knows is a tar, or refused as none."""
    return next((kind for magic, kind in _MAGIC if head.startswith(magic)), "tar")


@asynccontextmanager
async def layer_of(archive: BinaryIO, limits: TarLimits = LIMITS) -> AsyncIterator[Layer]:
    """The layer that the archive makes; `archive` is a file of ours that nobody else writes to.

    Raises ArchiveRefused and NoZstd, here and while it is read: a layer that did not end is none."""
    fd = archive.fileno()
    size = os.fstat(fd).st_size
    kind = kind_of(os.pread(fd, 8, 0))
    os.lseek(fd, 0, os.SEEK_SET)
    # What unpacks to more than so much of its size is a bomb, whatever packed it.
    total = min(limits.total_bytes, max(FREE_BYTES, size * MAX_RATIO))
    async with AsyncExitStack() as stack:
        pipes = stack.enter_context(ExitStack())
        has_zstd = shutil.which("zstd", path=_ENV["PATH"]) is not None
        source: int = fd
        unpacking: asyncio.subprocess.Process | None = None
        if kind == "zstd":
            if not has_zstd:
                raise NoZstd("this manager's machine has no `zstd` program: give the archive as gzip or plain tar")
            source, theirs = _pipe(pipes)
            unpacking = await _started(stack, ["unzstd"], fd, theirs)
        words = ["tar" if kind == "zstd" else kind, str(limits.entries), str(total)]
        if not has_zstd:
            last = converting = await _started(stack, words, source, asyncio.subprocess.PIPE)
        else:
            plain, theirs = _pipe(pipes)
            converting = await _started(stack, words, source, theirs)
            last = await _started(stack, ["zstd"], plain, asyncio.subprocess.PIPE)
        pipes.close()  # only the processes hold them now: each hears of the end of the one before or behind it
        layer = Layer(_nothing())
        layer.pieces = _pieces(layer, converting, unpacking, last, bounded_by_ratio=total < limits.total_bytes)
        stack.push_async_callback(layer.pieces.aclose)
        yield layer


async def _pieces(
    layer: Layer,
    converting: asyncio.subprocess.Process,
    unpacking: asyncio.subprocess.Process | None,
    last: asyncio.subprocess.Process,
    *,
    bounded_by_ratio: bool,
) -> AsyncGenerator[bytes, None]:
    processes = dict.fromkeys(each for each in (unpacking, converting, last) if each is not None)
    words = {each: asyncio.create_task(_words(each), name="archive-words") for each in processes}
    try:
        assert last.stdout is not None
        async with asyncio.timeout(CONVERT_SEC):
            raw = last is converting  # no zstd here: a stream that only says that it is one
            if raw:
                yield RAW_BEGIN
            while piece := await last.stdout.read(PIECE_BYTES):
                yield raw_blocks(piece) if raw else piece
            if raw:
                yield RAW_END
            for process in words:
                await process.wait()
            told = {process: await task for process, task in words.items()}
        if unpacking is not None and unpacking.returncode not in (0, -signal.SIGPIPE):
            said = " ".join(told[unpacking].decode("utf-8", "replace").replace("/*stdin*\\", "").split()).strip(": ")
            raise ArchiveRefused(f"no zstd stream that can be unpacked here: {said[:300] or 'zstd gave up'}")
        report = _report(told[converting])
        if converting.returncode != 0:
            raise _refusal(report, converting.returncode, bounded_by_ratio)
        if last.returncode != 0:
            raise RuntimeError(f"zstd ended with {last.returncode}: {told[last][:300]!r}")
        layer.entries, layer.file_bytes = report.entries, report.bytes
    except TimeoutError:
        raise ArchiveRefused(f"it takes longer than {CONVERT_SEC:.0f} s to unpack", "limit") from None
    finally:
        for task in words.values():
            task.cancel()
        await asyncio.wait(list(words.values()))


def _refusal(report: _Report, status: int | None, bounded_by_ratio: bool) -> Exception:
    if report.fault is None:
        if status in (-signal.SIGXCPU, -signal.SIGKILL):
            return ArchiveRefused("it takes too much time or memory to unpack", "limit")
        return RuntimeError(f"the reader of archives ended with {status}")
    if report.fault == "limit" and bounded_by_ratio and "all files together" in report.message:
        return ArchiveRefused(f"it unpacks to more than {MAX_RATIO} times its size", "limit", report.member, MAX_RATIO)
    return ArchiveRefused(report.message, report.fault, report.member, report.limit)


def _report(words: bytes) -> _Report:
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(words.strip().rpartition(b"\n")[2] or b"{}", type=_Report)
    return _Report()


async def packed(tar: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """A zstd stream of `tar`, compressed by the program where this machine has it. Raises what `tar` raises."""
    if shutil.which("zstd", path=_ENV["PATH"]) is None:
        yield RAW_BEGIN
        async with aclosing(tar):
            async for piece in tar:
                yield raw_blocks(piece)
        yield RAW_END
        return
    async with AsyncExitStack() as stack:
        process = await _started(stack, ["zstd"], asyncio.subprocess.PIPE, asyncio.subprocess.PIPE)
        assert process.stdout is not None
        saying = asyncio.create_task(_words(process), name="pack-words")
        feeding = asyncio.create_task(_feed(process, tar), name="pack-feed")
        try:
            while piece := await process.stdout.read(PIECE_BYTES):
                yield piece
            await feeding  # raises what went wrong with the tar
            if await process.wait() != 0:
                raise RuntimeError(f"zstd ended with {process.returncode}: {(await saying)[:300]!r}")
        finally:
            for task in (feeding, saying):
                task.cancel()
            await asyncio.wait([feeding, saying])
            if not feeding.cancelled():
                feeding.exception()  # seen here, in case that whoever reads has gone


async def _feed(process: asyncio.subprocess.Process, tar: AsyncGenerator[bytes, None]) -> None:
    """Its input, ended in any case: a stream without its end is never taken for a layer."""
    assert process.stdin is not None
    try:
        async with aclosing(tar):
            async for piece in tar:
                process.stdin.write(piece)
                await process.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        pass  # it gave up: its exit says so
    finally:
        process.stdin.close()


# ── processes ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _pipe(stack: ExitStack) -> tuple[int, int]:
    reading, writing = os.pipe()
    stack.callback(os.close, reading)
    stack.callback(os.close, writing)
    return reading, writing


async def _started(stack: AsyncExitStack, words: list[str], stdin: int, stdout: int) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-m", "manager.archives", *words),
        stdin=stdin,
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
        env=_ENV,
        cwd="/",
        start_new_session=True,
        limit=2 * PIECE_BYTES,
    )
    stack.push_async_callback(_ended, process)
    return process


async def _ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await asyncio.shield(process.wait())
    process._transport.close()  # type: ignore[attr-defined]  # its pipes, also where nobody read them to the end


async def _words(process: asyncio.subprocess.Process) -> bytes:
    """The last of what it says on its error output."""
    assert process.stderr is not None
    kept = b""
    while more := await process.stderr.read(4096):
        kept = (kept + more)[-_WORDS_BYTES:]
    return kept


async def _nothing() -> AsyncGenerator[bytes, None]:
    return
    yield b""
