"""Images for a real node that need no builder: a static busybox, the executor's bundle, and the embedded store."""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from images.bundle import elf
from manager.store.embedded import server_binary
from tests.support.images import Entry, directory, file, layer, link

_TOOLS: Final = ("sh", "cat", "cp", "echo", "env", "id", "ls", "nc", "ps", "sleep", "true", "wget")
_PASSWD: Final = b"root:x:0:0::/:/bin/sh\nsandbox:x:1000:1000::/workspace:/bin/sh\n"


def pause(at: Path, name: str) -> Path:
    """What holds a pod's namespaces: it sleeps."""
    return _archive(at, name, [], ["/bin/sleep", "inf"])


def bare(at: Path, name: str) -> Path:
    """An image with a shell and a user `sandbox`, and no executor."""
    return _archive(at, name, [], ["/bin/sh"])


def executor(at: Path, name: str, bundle: Path) -> Path:
    """An image with the executor, as the directory `bundle`, in /opt/sojourn."""
    entries: list[Entry] = [directory("opt"), directory("opt/sojourn")]
    for path in sorted(bundle.rglob("*")):
        place = f"opt/sojourn/{path.relative_to(bundle)}"
        if path.is_symlink():
            entries.append(link(place, str(path.readlink())))
        elif path.is_dir():
            entries.append(directory(place))
        else:
            entries.append(file(place, path.read_bytes(), mode=path.stat().st_mode & 0o755))
    return _archive(at, name, entries, ["/opt/sojourn/sojourn-executor"])


def valkey(at: Path, name: str) -> Path:
    """An image with the Valkey that the embedded store runs."""
    server = server_binary()
    entries = [file("bin/valkey-server", server.read_bytes(), mode=0o755), *_libraries([server])]
    return _archive(at, name, entries, ["/bin/valkey-server"])


def _libraries(programs: Iterable[Path]) -> list[Entry]:
    """The loader and the libraries of programs, where the loader looks for them."""
    found: dict[str, Path] = {}
    loader = next(place for program in programs if (place := elf.loader_of(program)) is not None)
    for program in programs:
        if elf.is_elf(program):
            found.update(elf.needed_by(program, loader))
    entries = [file(f"lib/{name}", path.read_bytes(), mode=0o755) for name, path in sorted(found.items())]
    return [file(str(loader).lstrip("/"), loader.read_bytes(), mode=0o755), *entries]


def _archive(at: Path, name: str, more: Sequence[Entry], command: list[str]) -> Path:
    busybox = Path(shutil.which("busybox") or "/bin/busybox").read_bytes()
    base: list[Entry] = [directory(place) for place in ("bin", "dev", "etc", "proc", "sys", "workspace")]
    base += [directory("tmp", mode=0o1777), file("bin/busybox", busybox, mode=0o755), file("etc/passwd", _PASSWD)]
    base += [file("etc/group", b"root:x:0:\nsandbox:x:1000:\n"), *(link(f"bin/{tool}", "busybox") for tool in _TOOLS)]
    content = layer(*base, *more)
    config = {
        "architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/bin"], "Cmd": command},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(content).hexdigest()}"]},
    }  # fmt: skip
    saved = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    at.write_bytes(
        layer(
            file("layer.tar", content),
            file("config.json", json.dumps(config).encode()),
            file("manifest.json", json.dumps(saved).encode()),
        )
    )
    assert tarfile.is_tarfile(at)
    return at
