"""How the executor is started in a pod: its interpreter, its package, its environment."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from manager.errors import IsolationUnavailable

_SYSTEM = Path("/usr")


@dataclass(frozen=True)
class Entry:
    """The executor's program, found once."""

    python: str
    package: Path  # the directory `executor`
    programs: tuple[str, ...]  # what a pod must see of this machine beside its system
    path_entry: str | None  # where the interpreter does not find the package by itself
    search_path: str  # PATH in the pod
    flags: tuple[str, ...] = ("-I",)  # of the interpreter

    def command(self, rlimits: Iterable[tuple[int, int]] = (), beside: Sequence[str] = ()) -> tuple[str, ...]:
        """Argv. `rlimits` are (resource, limit) to start with; `beside`: a program in Python, with arguments, to run
        beside the executor."""
        limits = list(rlimits)
        if self.path_entry is None and not limits and not beside:
            return (self.python, *self.flags, "-m", "executor")
        lines = ["import runpy, sys"]
        if limits:
            lines.append("import resource")
            lines += [f"resource.setrlimit({number}, ({limit}, {limit}))" for number, limit in limits]
        if beside:
            argv = [self.python, "-I", "-S", "-B", *beside]
            lines.append(f"import os; os.posix_spawn({self.python!r}, {argv!r}, {{}})")
        if self.path_entry is not None:
            lines.append(f"sys.path.insert(0, {self.path_entry!r})")
        lines.append("runpy.run_module('executor', run_name='__main__', alter_sys=True)")
        return (self.python, *self.flags, "-c", "; ".join(lines))


def bundle_entry(bundle: Path, at: str) -> Entry:
    """The executor as the bundle in the directory `bundle`, which pods see at `at`.

    Raises IsolationUnavailable where it is not there."""
    if not os.access(bundle / "sojourn-executor", os.X_OK):
        raise IsolationUnavailable(
            f"pods with an image need the executor as a bundle, and there is none in {bundle}: `make bundle` makes it, "
            "SOJOURN_EXECUTOR_BUNDLE says where it is"
        )
    return Entry(f"{at}/bin/python3", bundle, (), None, "", ("-I", "-S"))


def find_entry(data_dir: Path, package: Path | None = None, *, isolated: bool = True) -> Entry:
    """The running interpreter with the installed `executor`, or the one in the directory `package`.

    Raises IsolationUnavailable where `isolated` pods could not have it without seeing what they must not."""
    if package is None:
        found = importlib.util.find_spec("executor")
        if found is None or not found.submodule_search_locations:
            raise IsolationUnavailable("the package `executor` is not installed beside the manager; install it whole")
        package = Path(next(iter(found.submodule_search_locations))).resolve()
    roots = _interpreter_roots()
    if isolated:
        for root in roots:
            _check_root(root, data_dir)
    programs = [str(root) for root in roots]
    programs += [link for link in _links(sys.executable) if not _inside(Path(link), [_SYSTEM, *roots])]
    inside = _inside(package, [_SYSTEM, *roots]) and package.parent.name in ("site-packages", "dist-packages")
    if not _inside(package, [_SYSTEM, *roots]):
        programs.append(str(package))
    search_path = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
    base = Path(sys.base_prefix)
    if not _inside(base, [_SYSTEM]):
        search_path += f":{base}/bin"  # where this is the machine's only Python, commands have it too
    return Entry(sys.executable, package, tuple(programs), None if inside else str(package.parent), search_path)


def _interpreter_roots() -> list[Path]:
    """The directories of the interpreter and its libraries that are outside the system, none inside another."""
    roots: list[Path] = []
    candidates = {Path(prefix) for prefix in (sys.base_prefix, sys.prefix, sys.base_exec_prefix, sys.exec_prefix)}
    candidates |= {candidate.resolve() for candidate in candidates}
    for candidate in sorted(candidates, key=lambda path: len(path.parts)):
        if not _inside(candidate, [_SYSTEM, *roots]):
            roots.append(candidate)
    return roots


def _check_root(root: Path, data_dir: Path) -> None:
    for private in (Path.home(), data_dir.resolve()):
        if _inside(private, [root]):
            raise IsolationUnavailable(
                f"the interpreter's directory {root} holds {private}, which pods must not see; run the manager from a "
                "virtual environment of its own (`make` sets one up)"
            )


def _links(executable: str) -> list[str]:
    """Every hop from `executable` to the file itself."""
    hops = [executable]
    while len(hops) < 16 and os.path.islink(hops[-1]):
        target = os.path.join(os.path.dirname(hops[-1]), os.readlink(hops[-1]))
        hops.append(os.path.normpath(target))
    return hops


def _inside(path: Path, directories: Iterable[Path]) -> bool:
    return any(path == directory or directory in path.parents for directory in directories)
