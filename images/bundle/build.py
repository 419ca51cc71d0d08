"""`python -m images.bundle.build` (`make bundle`): the executor as a directory for any image, and archives.

The directory holds its own Python, loader and C library; `sojourn-executor` in it needs nothing from the image, and the
directory may lie anywhere. The same tree and Python give the same bytes."""

from __future__ import annotations

import argparse
import ctypes
import gzip
import importlib.metadata
import lzma
import os
import platform
import py_compile
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Final

from images.bundle import elf
from images.bundle.contents import DISTRIBUTION, ROOT, STDLIB, Module, Unlocked, dependencies, modules

NAME: Final = "sojourn-executor"
START: Final = ("-I", "-S", "-m", "executor")
LAUNCHERS: Final = {  # path -> (directories below the bundle's top, arguments that come first)
    NAME: (0, START),
    "bin/python3": (1, ()),
}
CC_FLAGS: Final = (
    "-Os", "-static", "-nostdlib", "-ffreestanding", "-fno-builtin", "-fno-stack-protector", "-fno-pie", "-no-pie",
    "-fno-asynchronous-unwind-tables", "-fno-tree-loop-distribute-patterns", "-Wall", "-Werror", "-s",
    "-Wl,--build-id=none", "-Wl,-z,noexecstack",
)  # fmt: skip
# Opened by name at run time, so that nothing lists it as needed: pthread_exit ends the process without it.
OPENED_BY_NAME: Final = ("libgcc_s.so.1",)
DICTIONARY_BYTES: Final = 32 << 20  # holds the whole bundle; what unpacks it needs as much memory


class CannotBuild(Exception):
    """This machine lacks something; the message says what, and where it comes from."""


def build(out: Path) -> Path:
    """Makes `out`/sojourn-executor anew; the directory's path. Raises CannotBuild, Unlocked."""
    loader = _loader()
    compiler = _compiler()
    out.mkdir(parents=True, exist_ok=True)
    bundle = out / NAME
    with tempfile.TemporaryDirectory(dir=out, prefix=".building-") as temporary:
        made = Path(temporary) / NAME
        made.mkdir()
        for name, (depth, start) in LAUNCHERS.items():
            _make_launcher(compiler, made / name, loader.name, depth, start)
        copied = _copy_modules(made)
        _copy_binaries(made, loader, copied)
        _copy_licences(made)
        _settle(made)
        shutil.rmtree(bundle, ignore_errors=True)
        made.rename(bundle)
    return bundle


def _loader() -> Path:
    loader = elf.loader_of(_python())
    if loader is None or not loader.name.startswith("ld-linux"):
        raise CannotBuild(f"the bundle is made from a Python that uses glibc; {sys.executable} does not")
    helped = subprocess.run([loader, "--help"], capture_output=True, text=True, timeout=60, check=False).stdout
    if "--argv0" not in helped:
        raise CannotBuild(f"{loader} is older than glibc 2.33; build on Debian 12, Ubuntu 22.04, RHEL 9 or later")
    return loader


def _python() -> Path:
    return Path(str(getattr(sys, "_base_executable", sys.executable))).resolve()


def _compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise CannotBuild(
        "the launcher is compiled, and this machine has no C compiler: neither $CC nor cc, gcc or clang "
        "(Debian, Ubuntu: apt-get install gcc)"
    )


def _make_launcher(compiler: str, target: Path, loader: str, depth: int, start: tuple[str, ...]) -> None:
    target.parent.mkdir(exist_ok=True)
    defines = {
        "LOADER": f'"{loader}"',
        "DEPTH": str(depth),
        "START": "".join(f'"{argument}",' for argument in start),
    }
    argv = [compiler, *CC_FLAGS, *(f"-D{name}={value}" for name, value in defines.items())]
    argv += ["-o", str(target), str(Path(__file__).with_name("launcher.c"))]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise CannotBuild(f"{compiler} does not compile the launcher:\n{done.stderr}")


def _copy_modules(bundle: Path) -> list[Path]:
    """Bytecode and C extensions, in the places that this Python searches; the C extensions."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = bundle / sys.platlibdir / version
    extensions = library / "lib-dynload"
    extensions.mkdir(parents=True)  # one of the two marks that Python finds itself by; the other is os.pyc
    copied = []
    for module in modules():
        standard_extension = module.extension and module.standard
        target = (extensions if standard_extension else library) / module.target()
        target.parent.mkdir(parents=True, exist_ok=True)
        if module.extension:
            shutil.copyfile(module.source, target)
            copied.append(target)
        else:
            _compile(module, target)
    return copied


def _compile(module: Module, target: Path) -> None:
    """To bytecode that names no path of this machine and is never compared with a source."""
    shown = str(module.target().with_suffix(".py"))
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(module.source), str(target), shown, doraise=True, optimize=0, invalidation_mode=mode)


def _copy_binaries(bundle: Path, loader: Path, extensions: list[Path]) -> None:
    lib = bundle / "lib"
    lib.mkdir(exist_ok=True)
    python = lib / "python"
    shutil.copyfile(_python(), python)
    libraries: dict[str, Path] = elf.needed_by(_python(), loader)
    for extension in extensions:
        libraries |= elf.needed_by(extension, loader)
    for name in OPENED_BY_NAME:
        libraries[name] = _opened(name)
        libraries |= elf.needed_by(libraries[name], loader)
    libraries.pop(loader.name, None)
    for name, where in sorted(libraries.items()):
        shutil.copyfile(where, lib / name)
    shutil.copyfile(loader, lib / loader.name)
    own = [python, *(lib / name for name in libraries), *extensions]
    for file in own:
        elf.forget_search_paths(file)
    strip = shutil.which("strip")
    if strip is None:
        print(
            "bundle: no `strip` here, so it grows by the symbols that nobody reads (binutils has it)", file=sys.stderr
        )
    else:
        subprocess.run([strip, "--strip-unneeded", *own], capture_output=True, timeout=120, check=True)


def _opened(name: str) -> Path:
    """Where this machine has a library that is opened by its name."""
    try:
        ctypes.CDLL(name)
    except OSError as why:
        raise CannotBuild(f"this machine lacks {name}: {why}") from None
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(f"/{name}"):
            return Path(line[line.index("/") :])
    raise CannotBuild(f"cannot tell where {name} lies")


def _copy_licences(bundle: Path) -> None:
    """What is given on is given on with its terms."""
    licences = bundle / "licences"
    licences.mkdir()
    shutil.copyfile(ROOT / "LICENSE", licences / NAME)
    for distribution in dependencies():
        for file in distribution.files or ():
            if re.match(r"(licen[cs]e|copying|notice)", file.name, re.IGNORECASE) and ".dist-info" in str(file):
                target = licences / f"{distribution.name}-{file.name}"
                shutil.copyfile(str(distribution.locate_file(file)), target)
    terms = STDLIB / "LICENSE.txt"
    if terms.is_file():
        shutil.copyfile(terms, licences / "python-LICENSE.txt")
    (licences / "README").write_text(
        f"The Python interpreter {platform.python_version()} and the GNU C library "
        f"{platform.libc_ver()[1]} (LGPL 2.1 or later, https://sourceware.org/glibc) with the libraries beside them in "
        "lib/ are unchanged copies of the build system's packages, which give their source.\n"
    )


def _settle(bundle: Path) -> None:
    """Modes that let every user run it and nobody change it, and one time for all files."""
    programs = {"lib/python", *LAUNCHERS, *(f"lib/{path.name}" for path in (bundle / "lib").glob("ld-linux*"))}
    for path in sorted(bundle.rglob("*"), reverse=True):
        name = str(path.relative_to(bundle))
        path.chmod(0o755 if path.is_dir() or name in programs else 0o644)
        os.utime(path, (epoch(), epoch()))
    bundle.chmod(0o755)
    os.utime(bundle, (epoch(), epoch()))


def epoch() -> int:
    """The one time of every file in it."""
    return int(os.environ.get("SOURCE_DATE_EPOCH", "315532800"))  # 1980: older than any zip or tar refuses


def pack_compact(bundle: Path) -> Path:
    """The bundle as .tar.xz beside it."""
    filters: list[dict[str, int]] = [
        {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": DICTIONARY_BYTES}
    ]
    if platform.machine() == "x86_64":
        filters.insert(0, {"id": lzma.FILTER_X86})
    archive = _archive(bundle, "tar.xz")
    with lzma.open(archive, "wb", filters=filters) as packed:
        _tar(bundle, packed)
    return archive


def pack_common(bundle: Path) -> Path:
    """The bundle as .tar.gz beside it, for what knows no xz."""
    archive = _archive(bundle, "tar.gz")
    with archive.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        _tar(bundle, packed)
    return archive


def _archive(bundle: Path, kind: str) -> Path:
    version = importlib.metadata.version(DISTRIBUTION)
    return bundle.parent / f"{NAME}-{version}-linux-{platform.machine()}.{kind}"


def _tar(bundle: Path, into: lzma.LZMAFile | gzip.GzipFile) -> None:
    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(fileobj=into, mode="w", format=tarfile.GNU_FORMAT) as archive:
        archive.add(bundle, NAME, recursive=False, filter=plain)
        # Alike beside alike: bytecode with bytecode, machine code with machine code
        for path in sorted(bundle.rglob("*"), key=lambda path: (path.is_file(), path.suffix, str(path))):
            archive.add(path, str(Path(NAME) / path.relative_to(bundle)), recursive=False, filter=plain)


def start_sec(bundle: Path, times: int = 5) -> float:
    """The least of several starts, up to the loaded executor: it ends at once, since no token's hash is given."""
    least = float("inf")
    code = "import executor.serve, uvloop, sys; sys.stdout.write('ready')"
    for _ in range(times):
        before = time.perf_counter()
        argv = [str(bundle / "bin" / "python3"), "-I", "-S", "-c", code]
        done = subprocess.run(argv, env={}, capture_output=True, text=True, timeout=60, check=False)
        if done.stdout != "ready":
            raise CannotBuild(f"the bundle does not start:\n{done.stderr}")
        least = min(least, time.perf_counter() - before)
    return least


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bundle", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where it is put (dist)")
    parser.add_argument("--no-archives", action="store_true", help="only the directory")
    options = parser.parse_args(argv)
    try:
        bundle = build(options.out.resolve())
        seconds = start_sec(bundle)
    except (CannotBuild, Unlocked, FileNotFoundError) as why:
        print(f"bundle: {why}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    print(f"{bundle}  {size / 1e6:.1f} MB, loads in {seconds:.2f} s")
    for pack in () if options.no_archives else (pack_compact, pack_common):
        archive = pack(bundle)
        print(f"{archive}  {archive.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
