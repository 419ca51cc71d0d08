"""Object storage: what must outlive Redis and every process lies here; one Protocol over a directory and the clouds.

A body of unknown size is not put here at once but as bounded chunks (`manager.store.blobs`): a multipart upload that a
killed process leaves behind cannot be found again through every cloud's interface, an object can.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Protocol

import msgspec

from manager.errors import StoreUnavailable
from manager.model import Owner

MAX_PUT_BYTES: Final = 16 << 20
PAGE: Final = 1000
PROBE_KEY: Final = "probe"  # never written: asking for it shows whether storage answers
CALL_SEC: Final = 10.0  # until a head, a delete, a page or the first byte of an answer
MOVE_SEC: Final = 60.0  # for the bytes of one put or of one small object
_PLAIN: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\Z")
_PART_MAX: Final = 120


class ObjectChanged(Exception):
    """The object is not, or no longer, what the write was conditional on. Nothing was written."""


class ObjectMissing(Exception):
    """There is no such object, or no longer."""


class ObjectMisnamed(StoreUnavailable):
    """A listing met a name that others gave and no reader can ask for, such as one with `//` or a line's end in it."""


class ObjectInfo(msgspec.Struct, frozen=True):
    key: str
    size: int
    etag: str  # changes with the content; one of a listing is only for `same_version`
    modified_at: float  # seconds since the epoch by the storage's own clock; a whole second in some clouds


class Object(msgspec.Struct, frozen=True):
    data: bytes
    etag: str


def same_version(listed: str, etag: str) -> bool:
    """Whether a listing's etag is that of an object that was read: in listings quotes or generations may be missing."""
    return listed.partition(" ")[0].strip('"') == etag.partition(" ")[0].strip('"')


class Objects(Protocol):
    """Keys are parts of `key_part` with `/` between them. Every method has a deadline and raises StoreUnavailable."""

    describe: str  # for people: what and where it is

    async def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        """The etag of what was written: all of it or nothing, also when the machine fails. At most MAX_PUT_BYTES.

        Raises ObjectChanged where a condition does not hold, unless the very same bytes are there: that cannot be told
        from an own earlier try whose answer was lost. So whoever takes turns by a condition writes something unique.
        After StoreUnavailable or a cancellation it may or may not have been written."""
        ...

    async def get(self, key: str, *, limit: int) -> Object | None:
        """The whole object; None where there is none. Raises ObjectTooLarge over `limit` bytes."""
        ...

    def stream(self, key: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes, None]:
        """The bytes from `start` to before `end` in pieces of at most some MiB. Raises ObjectMissing."""
        ...

    async def head(self, key: str) -> ObjectInfo | None: ...

    def list(self, prefix: str, after: str = "") -> AsyncGenerator[list[ObjectInfo], None]:
        """All objects under `prefix` (which ends in `/`, or is empty) by key, from after the key `after`, in pages.

        What is written or deleted meanwhile may or may not be among them."""
        ...

    async def delete(self, key: str) -> None:
        """No error where there is none."""
        ...

    async def close(self) -> None: ...


class ObjectTooLarge(StoreUnavailable):
    """An object of ours is larger than anything of its kind: it is not read."""

    retryable = False


def key_part(text: str) -> str:
    """One part of a key that stands for exactly this text: safe as a file's name, never empty, `.` or `..`."""
    if _PLAIN.match(text) and len(text) <= _PART_MAX:
        return text
    raw = text.encode("utf-8", "surrogatepass")
    escaped = "".join(chr(byte) if _PLAIN.match(chr(byte)) else f"={byte:02x}" for byte in raw)
    if not escaped or len(escaped) > _PART_MAX:
        return f"{escaped[:40]}=={hashlib.sha256(raw).hexdigest()}"
    return escaped


def owner_prefix(owner: Owner) -> str:
    """`<tenant>/<project>/`: what starts, behind its kind, every key of a project."""
    return f"{key_part(owner.tenant)}/{key_part(owner.project)}/"


async def delete_under(objects: Objects, prefix: str) -> None:
    """Deletes all objects under `prefix`, which ends in `/`. Raises StoreUnavailable, having deleted some."""
    async for page in objects.list(prefix):
        for info in page:
            await objects.delete(info.key)


@asynccontextmanager
async def answered(what: str, seconds: float, missing: str | None = None) -> AsyncIterator[None]:
    """Makes a deadline that has passed and an error of the system StoreUnavailable.

    `missing`: the key whose absence is an answer; it becomes ObjectMissing."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as why:
        raise StoreUnavailable(f"object storage did not answer within {seconds:.0f} s ({what})") from why
    except OSError as why:
        if missing is not None and isinstance(why, FileNotFoundError | NotADirectoryError):
            raise ObjectMissing(missing) from why
        raise StoreUnavailable(f"object storage failed ({what}): {why.strerror or why}") from why
