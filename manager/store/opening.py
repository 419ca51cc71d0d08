"""The one line of configuration that says where objects lie, made Objects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from manager.store.cloud import SETTINGS_OF, open_cloud
from manager.store.directory import DirectoryObjects
from manager.store.objects import PROBE_KEY, Objects

OBJECTS_DIR: Final = "objects"


def open_objects(url: str | None, data_dir: Path, credentials: Mapping[str, str] | None = None) -> Objects:
    """Objects at `file:///directory`, `s3://bucket/prefix`, `gs://...` or `az://...`; None: in the data directory.

    Raises ValueError where the URL says nothing, StoreUnavailable where a directory cannot be used."""
    if url is None:
        return DirectoryObjects(data_dir / OBJECTS_DIR)
    parts = urlsplit(url)
    if parts.scheme in SETTINGS_OF:
        return open_cloud(url, credentials)
    return DirectoryObjects(Path(unquote(parts.path)))


async def answering(url: str | None, data_dir: Path) -> tuple[str, bool]:
    """Where objects lie, for people, and whether that is this machine alone; makes no directory.

    Raises ValueError, StoreUnavailable."""
    directory = data_dir / OBJECTS_DIR if url is None else Path(unquote(urlsplit(url).path))
    if url is None or urlsplit(url).scheme == "file":
        return f"directory {directory}", True
    objects = open_objects(url, data_dir)
    try:
        await objects.head(PROBE_KEY)
    finally:
        await objects.close()
    return objects.describe, False
