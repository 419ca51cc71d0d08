"""Images of local pods: root directories, and archives and layouts on disk, unpacked once. All calls block.

A profile's `image` is `host` or one of these, with the names that skopeo, podman and buildah give them:

    rootfs:/path            a directory that holds a system; it is only ever read
    oci:/path               an OCI image layout
    oci-archive:/path.tar   the same as one file
    docker-archive:/path.tar    what `docker save` writes
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import re
import secrets
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Protocol

import msgspec

from manager.errors import CapacityExhausted, ImagePullFailed
from manager.providers.local.bwrap import MASKED, UNWRITABLE, SystemLayout
from manager.providers.local.removal import remove_tree
from manager.providers.local.unpack import Unpacker, entries, resolve

HOST: Final = "host"
KINDS: Final = ("rootfs", "oci", "oci-archive", "docker-archive")
BUNDLE_PATH: Final = "/opt/sojourn"  # the executor in a pod with an image
KEPT_SEC: Final = 7 * 86_400  # an unpacked image that no pod has used for so long is removed
DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NEW: Final = ".new-"
_ABANDONED_SEC: Final = 3600
_MAX_DOCUMENT_BYTES: Final = 16 << 20
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}\Z")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
# Ours in every pod: what the image has there is not seen.
_OWN: Final = ("/proc", "/dev", "/sys", "/tmp", "/run", "/workspace", "/var/tmp", "/var/lib/sojourn", BUNDLE_PATH)
_OWN_ETC: Final = ("passwd", "group", "hostname", "hosts", "resolv.conf")
# On the way to what is ours: made anew, with everything else of the image's in it.
_SPLIT: Final = ("/etc", "/opt", "/var", "/var/lib")


@dataclass(frozen=True)
class Image:
    root: Path
    env: dict[str, str]  # what its maker has set for commands, PATH among it

    @property
    def shell(self) -> str:
        return next((path for path in ("/bin/bash", "/bin/sh") if self._is_file(path)), "/bin/sh")

    def text(self, path: str) -> str:
        """Of a small file of it; "" where there is none."""
        found = resolve(self.root, path)
        if found is None or not found.is_file():
            return ""
        with open(found, "rb") as file:
            return file.read(1 << 20).decode("utf-8", "replace")

    def _is_file(self, path: str) -> bool:
        found = resolve(self.root, path)
        return found is not None and found.is_file()


def check(image: str) -> tuple[str, Path]:
    """Kind and place of an image that is not `host`. Raises ImagePullFailed."""
    kind, _, path = image.partition(":")
    if kind not in KINDS or not path.startswith("/"):
        known = ", ".join(f"{one}:/path" for one in KINDS)
        raise ImagePullFailed(f"image {image!r} cannot be had here; a local target takes {HOST}, {known}")
    return kind, Path(path)


def open_image(image: str, cache: Path) -> Image:
    """The image, unpacked into `cache` where it has not been before. Raises ImagePullFailed, CapacityExhausted."""
    kind, path = check(image)
    try:
        if kind == "rootfs":
            if not path.is_dir():
                raise ImagePullFailed(f"image {image!r}: there is no such directory")
            return Image(path.resolve(), {"PATH": DEFAULT_PATH})
        with _opened(kind, path) as source:
            return _unpacked(source, cache)
    except (KeyError, EOFError, tarfile.TarError, msgspec.DecodeError, UnicodeError, OSError) as why:
        if isinstance(why, OSError) and why.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityExhausted(f"no room to unpack image {image!r}") from why
        raise ImagePullFailed(f"image {image!r} cannot be read: {why}") from why


def layout(root: Path) -> SystemLayout:
    """What of the image a pod sees, and where."""
    directories: list[str] = []
    binds: list[str] = []
    links: list[tuple[str, str]] = []
    own = {*_OWN, *(f"/etc/{name}" for name in _OWN_ETC)}

    def split(directory: str) -> None:
        for entry in sorted(entries(root, directory), key=lambda entry: entry.name):
            path = f"{directory}/{entry.name}"
            if path in own or (path in _SPLIT and entry.is_dir(follow_symlinks=False)):
                continue
            if entry.is_symlink():
                if path not in _SPLIT:
                    links.append((path, os.readlink(entry.path)))
            elif entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False):
                binds.append(path)

    split("")
    for directory in _SPLIT:
        directories.append(directory)
        if (root / directory[1:]).is_dir() and not (root / directory[1:]).is_symlink():
            split(directory)
    return SystemLayout(
        tuple(links), tuple(binds), root=str(root), directories=tuple(directories), empty=("/sys",),
        masked=tuple(path for path in MASKED if os.path.exists(path)),
        unwritable=tuple(path for path in UNWRITABLE if os.path.exists(path)),
    )  # fmt: skip


def sweep(cache: Path, used: Iterable[str]) -> None:
    """Removes what was left half unpacked, and what no living pod of `used` roots has and none has had for long."""
    living = set(used)
    with contextlib.suppress(FileNotFoundError):
        for place in list(cache.iterdir()):
            age = time.time() - place.stat().st_mtime
            unused = str(place / "rootfs") not in living and age > KEPT_SEC
            if unused or (place.name.startswith(_NEW) and age > _ABANDONED_SEC):
                remove_tree(place)


# ── archives and layouts ────────────────────────────────────────────────────────────────────────────────────────


class _Source(Protocol):
    def open(self, name: str) -> IO[bytes]: ...


@dataclass(frozen=True)
class _Directory:
    path: Path

    def open(self, name: str) -> IO[bytes]:
        return open(self.path / name, "rb")


@dataclass(frozen=True)
class _Archive:
    tar: tarfile.TarFile

    def open(self, name: str) -> IO[bytes]:
        file = self.tar.extractfile(name)
        if file is None:
            raise KeyError(f"{name} is no file in it")
        return file


class _Descriptor(msgspec.Struct, rename="camel"):
    digest: str
    media_type: str = ""
    platform: dict[str, object] = {}


class _Index(msgspec.Struct):
    manifests: list[_Descriptor]


class _Manifest(msgspec.Struct):
    config: _Descriptor
    layers: list[_Descriptor]


class _Saved(msgspec.Struct, rename="pascal"):
    config: str
    layers: list[str]


class _Settings(msgspec.Struct, rename="pascal"):
    env: list[str] | None = None


class _Config(msgspec.Struct):
    config: _Settings | None = None


@dataclass(frozen=True)
class _Parts:
    key: str  # names the content
    config: _Config
    layers: list[str]  # names in the source
    digests: list[str]  # of them, "" where the source tells none


@contextlib.contextmanager
def _opened(kind: str, path: Path) -> Iterator[_Opened]:
    if kind == "oci":
        source: _Source = _Directory(path)
        yield _oci(source), source
        return
    with tarfile.open(path, "r:*") as tar:
        source = _Archive(tar)
        yield (_oci(source) if kind == "oci-archive" else _saved(source)), source


_Opened = tuple[_Parts, _Source]


def _oci(source: _Source) -> _Parts:
    index = msgspec.json.decode(_document(source, "index.json"), type=_Index)
    descriptor = _chosen(index)
    while "index" in descriptor.media_type or "manifest.list" in descriptor.media_type:
        descriptor = _chosen(msgspec.json.decode(_blob(source, descriptor.digest), type=_Index))
    manifest = msgspec.json.decode(_blob(source, descriptor.digest), type=_Manifest)
    config = msgspec.json.decode(_blob(source, manifest.config.digest), type=_Config)
    digests = [layer.digest for layer in manifest.layers]
    return _Parts(descriptor.digest, config, [_blob_name(digest) for digest in digests], digests)


def _saved(source: _Source) -> _Parts:
    images = msgspec.json.decode(_document(source, "manifest.json"), type=list[_Saved])
    if not images:
        raise ImagePullFailed("the archive holds no image")
    saved = images[0]
    raw = _document(source, saved.config)  # it names the layers by their digests
    key = hashlib.sha256(raw + "\0".join(saved.layers).encode()).hexdigest()
    return _Parts(f"saved:{key}", msgspec.json.decode(raw, type=_Config), saved.layers, [""] * len(saved.layers))


def _chosen(index: _Index) -> _Descriptor:
    """This machine's, or the only one."""
    wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
    for descriptor in index.manifests:
        if descriptor.platform.get("architecture", wanted) == wanted:
            return descriptor
    raise ImagePullFailed(f"there is no image for {wanted} in it")


def _document(source: _Source, name: str) -> bytes:
    with source.open(name) as file:
        content = file.read(_MAX_DOCUMENT_BYTES + 1)
    if len(content) > _MAX_DOCUMENT_BYTES:
        raise ImagePullFailed(f"{name} is too large")
    return content


def _blob_name(digest: str) -> str:
    if not _DIGEST.match(digest):
        raise ImagePullFailed(f"{digest!r} is no digest that is known here")
    return f"blobs/{digest.replace(':', '/')}"


def _blob(source: _Source, digest: str) -> bytes:
    content = _document(source, _blob_name(digest))
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest:
        raise ImagePullFailed(f"{digest} has another content")
    return content


def _unpacked(opened: _Opened, cache: Path) -> Image:
    parts, source = opened
    place = cache / parts.key.replace(":", "-")
    image = Image(place / "rootfs", _environment(parts.config))
    if not place.is_dir():
        cache.mkdir(mode=0o700, exist_ok=True)
        fresh = cache / f"{_NEW}{secrets.token_hex(8)}"
        root = fresh / "rootfs"
        root.mkdir(parents=True)
        try:
            unpacker = Unpacker(root)
            for name, digest in zip(parts.layers, parts.digests, strict=True):
                with source.open(name) as layer:
                    _unpack(unpacker, layer, digest)
            root.chmod(0o755)
            fresh.chmod(0o755)
            with contextlib.suppress(FileExistsError, OSError):  # another manager was faster
                fresh.rename(place)
        finally:
            remove_tree(fresh)
    os.utime(place)  # used now
    return image


def _unpack(unpacker: Unpacker, layer: IO[bytes], digest: str) -> None:
    if digest:
        actual = hashlib.sha256()
        while piece := layer.read(1 << 20):
            actual.update(piece)
        if f"sha256:{actual.hexdigest()}" != digest:
            raise ImagePullFailed(f"layer {digest} has another content")
        layer.seek(0)
    magic = layer.read(4)
    layer.seek(0)
    if magic != b"\x28\xb5\x2f\xfd":
        unpacker.layer(layer)
        return
    program = shutil.which("zstd")
    if program is None:
        raise ImagePullFailed("a layer of the image is in zstd, and there is no `zstd` here to unpack it")
    # A file of its own: it may be a part of an archive, which no other program can read from.
    with tempfile.TemporaryFile(dir=unpacker.root.parent) as packed:
        shutil.copyfileobj(layer, packed, 1 << 20)
        packed.seek(0)
        with subprocess.Popen([program, "-dcq"], stdin=packed, stdout=subprocess.PIPE) as unpacking:
            assert unpacking.stdout is not None
            unpacker.layer(unpacking.stdout)
        if unpacking.returncode != 0:
            raise ImagePullFailed("a layer of the image is no zstd, or a broken one")


def _environment(config: _Config) -> dict[str, str]:
    env = {"PATH": DEFAULT_PATH}
    for entry in config.config.env or [] if config.config else []:
        name, _, value = entry.partition("=")
        if _VARIABLE.match(name) and "\0" not in value and not name.startswith(("SOJOURN_", "LD_")):
            env[name] = value
    return env
