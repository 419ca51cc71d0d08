"""Which modules go into the bundle: the executor, its locked dependencies, and what of the standard library they need.

The standard library's part is found twice and joined: by reading the bytecode (imports within functions and branches
too), and by importing everything in a fresh interpreter (what C extensions import is in no bytecode)."""

from __future__ import annotations

import importlib.metadata
import json
import modulefinder
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
STDLIB: Final = Path(sysconfig.get_path("stdlib")).resolve()
DISTRIBUTION: Final = "sojourn-server"

# Never part of a running executor; the imports that lead to them stand in branches for developers or other systems.
# frozenlist's extension alone needs the C++ library, of 2 MB; its Python serves the few lists that there are.
UNWANTED: Final = (
    "_codecs_cn", "_codecs_hk", "_codecs_iso2022", "_codecs_jp", "_codecs_kr", "_codecs_tw", "_multibytecodec",
    "_pytest", "aiohttp.pytest_plugin", "aiohttp.test_utils", "aiohttp.worker", "cgi", "curses", "distutils",
    "doctest", "ensurepip", "frozenlist._frozenlist", "ftplib", "gunicorn", "idlelib", "lib2to3",
    "multidict._testcapi", "multiprocessing", "pdb", "pip", "pkg_resources", "psutil._psaix", "psutil._psbsd",
    "psutil._psosx", "psutil._pssunos", "psutil._pswindows", "pydoc", "pytest", "setuptools", "sqlite3", "test",
    "tkinter", "unittest", "xmlrpc",
)  # fmt: skip
# Found by name at run time: codecs. Those of East Asian character sets need C tables of 1 MB, which are left out.
BY_NAME: Final = ("encodings",)


class Unlocked(Exception):
    """What is installed here is not what the lock names: the bundle would hold what was never tested."""


@dataclass(frozen=True)
class Module:
    name: str
    source: Path  # a .py file or a C extension
    package: bool

    @property
    def extension(self) -> bool:
        return self.source.suffix == ".so"

    @property
    def standard(self) -> bool:
        return STDLIB in self.source.parents and "site-packages" not in self.source.parts

    def target(self) -> Path:
        """Where it lies below the directory that is searched, bytecode without its source."""
        path = Path(*self.name.split("."))
        if self.extension:
            return path.parent / self.source.name
        return path / "__init__.pyc" if self.package else path.with_suffix(".pyc")


def dependencies() -> list[importlib.metadata.Distribution]:
    """The executor's, and theirs, by name. Raises Unlocked."""
    locked = dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", (ROOT / "requirements" / "run.txt").read_text(), re.MULTILINE))
    found: dict[str, importlib.metadata.Distribution] = {}
    wanted = [DISTRIBUTION]
    while wanted:
        for requirement in importlib.metadata.requires(wanted.pop()) or ():
            name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")
            if "extra ==" in requirement or name in found:
                continue
            try:
                distribution = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:  # of another Python version or system
                continue
            if distribution.version != locked.get(name):
                raise Unlocked(f"{name} is {distribution.version} here and {locked.get(name)} in requirements/run.txt")
            found[name] = distribution
            wanted.append(name)
    return [found[name] for name in sorted(found)]


def modules() -> list[Module]:
    """Everything that the bundle imports, sorted. Raises Unlocked."""
    ours = _modules_below(ROOT, "executor")
    for distribution in dependencies():
        for file in distribution.files or ():
            if len(file.parts) == 2 and file.name == "__init__.py":
                ours |= _modules_below(Path(str(distribution.locate_file("."))), file.parts[0])
            elif len(file.parts) == 1 and file.suffix == ".py":
                where = Path(str(distribution.locate_file(file))).resolve()
                ours[file.stem] = Module(file.stem, where, package=False)
    for name in BY_NAME:
        ours |= _modules_below(STDLIB, name)
    names = sorted(ours)
    found = dict(ours)
    for standard in (_read(names), _measured(names)):
        for name, module in standard.items():
            if module.standard and not _unwanted(name):
                found.setdefault(name, module)
    return [found[name] for name in sorted(found)]


def _unwanted(name: str) -> bool:
    return any(name == one or name.startswith(one + ".") for one in UNWANTED)


def _modules_below(directory: Path, package: str) -> dict[str, Module]:
    found = {}
    for path in sorted((directory / package).rglob("*")):
        if path.suffix not in (".py", ".so"):
            continue
        parts = path.relative_to(directory).parts
        stem = path.name.split(".", 1)[0]
        name = ".".join(parts[:-1] if stem == "__init__" else (*parts[:-1], stem))
        if stem == "__main__" and package != "executor":
            continue
        # aiohttp ships C extensions beside the Python that they stand in for: the extension is what is imported
        if not _unwanted(name) and (name not in found or path.suffix == ".so"):
            found[name] = Module(name, path.resolve(), package=stem == "__init__")
    return found


def _search_path() -> list[str]:
    return [str(ROOT), *dict.fromkeys((sysconfig.get_path("platlib"), sysconfig.get_path("purelib"))), *sys.path]


def _read(names: list[str]) -> dict[str, Module]:
    finder = modulefinder.ModuleFinder(path=_search_path(), excludes=list(UNWANTED))
    for name in [*names, "runpy"]:
        try:
            finder.import_hook(name)
        except (ImportError, SyntaxError):  # a C extension whose package was not imported: measured instead
            continue
    found = {}
    for name, module in finder.modules.items():
        source, below = getattr(module, "__file__", None), getattr(module, "__path__", None)
        if source:
            found[name] = Module(name, Path(source).resolve(), package=below is not None)
    return found


_MEASURE: Final = """
import importlib, json, sys
names, sys.path[:0] = json.loads(sys.argv[1]), json.loads(sys.argv[2])
for name in names:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
found = {}
for name, module in sys.modules.items():
    spec = getattr(module, "__spec__", None)
    # a frozen module has its file beside the others
    where = getattr(module, "__file__", None) or (spec and spec.has_location and spec.origin)
    if where:
        found[name] = (where, hasattr(module, "__path__"))
print(json.dumps(found))
"""


def _measured(names: list[str]) -> dict[str, Module]:
    argv = [sys.executable, "-I", "-S", "-c", _MEASURE, json.dumps(names), json.dumps(_search_path())]
    listed = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout
    return {
        name: Module(name, Path(file).resolve(), package=package)
        for name, (file, package) in json.loads(listed).items()
        if name != "__main__" and Path(file).suffix in (".py", ".so")
    }
