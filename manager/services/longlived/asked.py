"""What is asked of a long-lived sandbox, and what of it is refused."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Final

import msgspec

from executor.wire import bad_env
from manager.errors import InvalidRequest
from manager.model import Owner, SandboxRecord

NAME_MAX_BYTES: Final = 200
METADATA_MAX: Final = 64  # entries
METADATA_MAX_BYTES: Final = 16 << 10
ENV_MAX_BYTES: Final = 64 << 10
TIME_MAX_SEC: Final = 365 * 86_400


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a new sandbox is to be."""

    profile: str | None
    autostop_sec: int
    ttl_sec: int
    autostart: bool = False
    name: str = ""
    env: Mapping[str, str] = {}
    metadata: Mapping[str, str] = {}
    origin: str = ""  # what its first content comes from, in words that are the same for the same content


class Changes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is to be different from now on; None: left as it is."""

    name: str | None = None
    metadata: Mapping[str, str] | None = None
    autostop_sec: int | None = None
    ttl_sec: int | None = None
    autostart: bool | None = None

    def of(self, record: SandboxRecord) -> SandboxRecord:
        """The record with them. Raises InvalidRequest where it may not be like that."""
        changed = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        if self.metadata is not None:
            changed["metadata"] = dict(self.metadata)
        after = msgspec.structs.replace(record, **changed)
        _check_named(after.name, after.metadata)
        _check_times(after.autostop_sec, after.ttl_sec)
        return after

    @property
    def named(self) -> str:
        """The fields that change, for the audit log."""
        return ",".join(name for name, value in msgspec.structs.asdict(self).items() if value is not None)


def id_of(owner: Owner, key: str) -> str:
    """The sandbox that this idempotency key of the owner's makes."""
    digest = hashlib.sha256(b"sojourn-sandbox\0")
    for part in (owner.tenant, owner.project, key):
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(4, "big") + raw)
    return "s" + base64.b32encode(digest.digest()).decode().lower()[:26]


def check(asked: Asked) -> None:
    """Raises InvalidRequest."""
    what = bad_env(dict(asked.env))
    if what is not None:
        raise InvalidRequest(f"env {what}", field="env")
    if sum(len(name.encode()) + len(value.encode()) for name, value in asked.env.items()) > ENV_MAX_BYTES:
        raise InvalidRequest(f"env has at most {ENV_MAX_BYTES} bytes in all", field="env")
    _check_named(asked.name, asked.metadata)
    _check_times(asked.autostop_sec, asked.ttl_sec)


def _check_named(name: str, metadata: Mapping[str, str]) -> None:
    if len(_bytes(name)) > NAME_MAX_BYTES or not name.isprintable():
        raise InvalidRequest(f"a name has at most {NAME_MAX_BYTES} bytes of printable text", field="name")
    size = sum(len(_bytes(key)) + len(_bytes(value)) for key, value in metadata.items())
    if len(metadata) > METADATA_MAX or size > METADATA_MAX_BYTES:
        raise InvalidRequest(
            f"metadata has at most {METADATA_MAX} entries and {METADATA_MAX_BYTES} bytes in all", field="metadata"
        )


def _check_times(autostop_sec: int, ttl_sec: int) -> None:
    for field, value in (("autostop_sec", autostop_sec), ("ttl_sec", ttl_sec)):
        if not 1 <= value <= TIME_MAX_SEC:
            raise InvalidRequest(f"{field} must be a whole number of seconds from 1 to {TIME_MAX_SEC}", field=field)


def _bytes(text: str) -> bytes:
    """Raises InvalidRequest for what no UTF-8 can carry."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("names and metadata must be valid Unicode") from None
