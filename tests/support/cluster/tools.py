"""The programs of a Kubernetes control plane, built once from Go modules and kept outside the work tree.

`tests/cluster/tools/go.mod` names their versions. `python -m tests.support.cluster.tools` builds what is missing and
says where it lies; the tests only look. Built programs are kept in `$XDG_CACHE_HOME/sojourn/cluster-tools` (else below
`~/.cache`), one directory for each state of go.mod; the Go compiler's own cache is where `go env GOCACHE` says.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, TextIO

_CLUSTER: Final = Path(__file__).resolve().parents[2] / "cluster"
SOURCE: Final = _CLUSTER / "tools"


@dataclass(frozen=True)
class Tools:
    """Programs that are built and kept together."""

    what: str
    source: Path  # of go.mod
    programs: Mapping[str, str]  # program -> the package it is built from
    tags: str = ""
    cgo: bool | None = None  # None: where there is a C compiler
    # (module, file in it) -> the file of `source` that is built in its place
    replaced: Mapping[tuple[str, str], str] = field(default_factory=dict)


CONTROL_PLANE: Final = Tools(
    "a Kubernetes control plane",
    SOURCE,
    {
        "etcd": "go.etcd.io/etcd/server/v3",
        "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
        "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
        "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
        "helm": "helm.sh/helm/v4/cmd/helm",
    },
)
# Of a real node; built only where one is asked for.
KUBELET: Final = Tools("the kubelet", SOURCE, {"kubelet": "k8s.io/kubernetes/cmd/kubelet"})
RUNTIME: Final = Tools(
    "containerd",
    _CLUSTER / "runtime",
    {
        "containerd": "github.com/containerd/containerd/v2/cmd/containerd",
        "containerd-shim-runc-v2": "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
        "ctr": "github.com/containerd/containerd/v2/cmd/ctr",
    },
    "no_btrfs,no_zfs,no_devmapper",
    cgo=False,
)
# Debian's is too old for pods with a user namespace of their own.
RUNC: Final = Tools("runc", _CLUSTER / "runc", {"runc": "github.com/opencontainers/runc"}, "seccomp", cgo=True)
# Holds its NetworkPolicies.
POLICIES: Final = Tools(
    "kube-network-policies",
    _CLUSTER / "policies",
    {"kube-network-policies": "sigs.k8s.io/kube-network-policies/cmd"},
    cgo=False,
)
# Its Services.
PROXY: Final = Tools("kube-proxy", _CLUSTER / "proxy", {"kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy"}, cgo=False)
# Its pods with a kernel of their own.
GVISOR: Final = Tools(
    "gVisor",
    _CLUSTER / "gvisor",
    {"runsc": "gvisor.dev/gvisor/runsc", "containerd-shim-runsc-v1": "gvisor.dev/gvisor/shim"},
    cgo=False,
    replaced={("github.com/containerd/containerd/v2", "pkg/sys/oom_linux.go"): "oom_linux.go"},
)
NODE: Final = (KUBELET, RUNTIME, RUNC, POLICIES, PROXY, GVISOR)
# Where the Go command names a program after its directory.
_BUILT_AS: Final = {"server": "etcd", "cmd": "kube-network-policies", "shim": "containerd-shim-runsc-v1"}

HOW_TO_GET: Final = (
    "set KUBECONFIG to a cluster for tests (kind, k3s), or install Go (https://go.dev/dl) and run `make test-cluster`, "
    "which builds a control plane once (about ten minutes on two cores) and keeps it"
)
_BUILDING: Final = "building-"
_KEEP_SEC: Final = 30 * 86_400.0
_NICE: Final = 10
_SAY_EVERY_SEC: Final = 30.0  # where nobody watches a terminal


class NoTools(Exception):
    """The programs are not there and could not be built; the message says why and what helps."""


def versions() -> tuple[str, str]:
    """The Go release that go.mod asks for, and Kubernetes' version, such as v1.37.2."""
    text = (SOURCE / "go.mod").read_text()
    go = re.search(r"^go (\S+)$", text, re.MULTILINE)
    kubernetes = re.search(r"^\s*(?:require )?k8s\.io/kubernetes (v\S+)", text, re.MULTILINE)
    assert go is not None
    assert kubernetes is not None
    return go[1], kubernetes[1]


def wanted() -> list[Tools]:
    """What this run's tests need."""
    return [CONTROL_PLANE, *(NODE if os.environ.get("SOJOURN_REAL_NODE") else ())]


def home(tools: Tools = CONTROL_PLANE) -> Path:
    """Where the programs of this state of go.mod are kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    state = hashlib.sha256(platform.machine().encode())
    for file in (tools.source / "go.mod", tools.source / "go.sum"):
        state.update(file.read_bytes())
    state.update(repr((tools.programs, _flags(tools), tools.cgo)).encode())
    for own in tools.replaced.values():
        state.update((tools.source / own).read_bytes())
    return cache / "sojourn" / "cluster-tools" / state.hexdigest()[:16]


def find(tools: Tools = CONTROL_PLANE) -> Path | None:
    """The directory with all programs, if they are built."""
    directory = home(tools)
    if not all(os.access(directory / name, os.X_OK) for name in tools.programs):
        return None
    with suppress(OSError):  # as a mark of its use; it may be somebody else's
        os.utime(directory)
    return directory


def build(out: TextIO, tools: Tools = CONTROL_PLANE) -> Path:
    """The directory with all programs, built if they are missing; progress goes to `out`. Raises NoTools."""
    if (found := find(tools)) is not None:
        return found
    directory = home(tools)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(directory.parent / "lock", out):
        if (found := find(tools)) is not None:
            return found
        if shutil.which("go") is None:
            raise NoTools(f"Go is not installed: {HOW_TO_GET}")
        started = time.monotonic()
        _forget_old(directory.parent)
        with tempfile.TemporaryDirectory(prefix=_BUILDING, dir=directory.parent) as made:
            try:
                _go_build(tools, Path(made), out)
            except NoTools as why:  # a download may have been cut; what is compiled is kept
                out.write(f"cluster tools: {why}\ncluster tools: once more\n")
                _go_build(tools, Path(made), out)
            for name in os.listdir(made):
                if name in _BUILT_AS:
                    os.rename(Path(made, name), Path(made, _BUILT_AS[name]))
            directory.mkdir(exist_ok=True)
            for name in tools.programs:
                os.rename(Path(made, name), directory / name)
        out.write(f"cluster tools: built in {time.monotonic() - started:.0f} s, kept in {directory}\n")
    return directory


def _forget_old(directory: Path) -> None:
    """Programs that nobody asked for in a month, and what builds that were killed have left."""
    for kept in directory.iterdir():
        if kept.is_dir() and (kept.name.startswith(_BUILDING) or kept.stat().st_mtime < time.time() - _KEEP_SEC):
            shutil.rmtree(kept, ignore_errors=True)


def _go_build(tools: Tools, into: Path, out: TextIO) -> None:
    packages = list(tools.programs.values())
    env = dict(os.environ) if tools.cgo is None else {**os.environ, "CGO_ENABLED": str(int(tools.cgo))}
    out.write(f"cluster tools: fetching and building {tools.what} (once)\n")
    out.flush()
    listed = subprocess.run(
        ["go", "list", "-deps", f"-tags={tools.tags}", *packages], cwd=tools.source, env=env, capture_output=True,
        text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if listed.returncode:
        raise NoTools(f"`go list` failed in {tools.source}:\n{listed.stderr[-3000:]}")
    replaced = _replaced(tools, into, env)
    command = ["nice", "-n", str(_NICE), "go", "build", "-v", *_flags(tools), *replaced, "-o", str(into), *packages]
    with subprocess.Popen(
        command, cwd=tools.source, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        names = frozenset(listed.stdout.split())
        said = _counted(process.stderr, len(names), out)
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            raise
    if code:
        errors = "".join([line for line in said if line.strip() not in names][-60:])
        raise NoTools(f"`go build` failed in {tools.source} with exit code {code}:\n{errors}")


def _replaced(tools: Tools, into: Path, env: Mapping[str, str]) -> Sequence[str]:
    """The build's argument by which copies of modules, with our own files in them, are built."""
    if not tools.replaced:
        return ()
    with (into / "build.mod").open("w") as modules:
        modules.write((tools.source / "go.mod").read_text())
        for number, ((module, file), own) in enumerate(tools.replaced.items()):
            found = subprocess.run(
                ["go", "list", "-m", "-f", "{{.Dir}}", module], cwd=tools.source, env=env, capture_output=True,
                text=True, check=True, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            copy = into / f"module-{number}"
            shutil.copytree(found.stdout.strip(), copy, copy_function=shutil.copyfile, dirs_exist_ok=True)
            copy.joinpath(file).write_bytes((tools.source / own).read_bytes())
            modules.write(f"\nreplace {module} => {copy}\n")
    shutil.copyfile(tools.source / "go.sum", into / "build.sum")
    return (f"-modfile={into / 'build.mod'}",)


def _flags(tools: Tools) -> Sequence[str]:
    """The same programs wherever the tree lies, without symbols; Kubernetes' own say their version."""
    version = versions()[1]
    major, minor = version.removeprefix("v").split(".")[:2]
    at = "k8s.io/component-base/version"
    says = f"-X {at}.gitVersion={version} -X {at}.gitMajor={major} -X {at}.gitMinor={minor}"
    return "-trimpath", f"-tags={tools.tags}", f"-ldflags=-s -w {says}"


def _counted(lines: IO[str], total: int, out: TextIO) -> list[str]:
    """Passes on how many packages are done, also while one takes long; all lines, for the error."""
    said: list[str] = []
    over = threading.Event()

    def tell() -> None:
        while not over.wait(1.0 if out.isatty() else _SAY_EVERY_SEC):
            before, after = ("\r", "") if out.isatty() else ("", "\n")
            out.write(f"{before}cluster tools: {len(said)} of at most {total} packages compiled{after}")
            out.flush()

    teller = threading.Thread(target=tell, name="build-progress", daemon=True)
    teller.start()
    try:
        for line in lines:
            said.append(line)  # noqa: PERF402 (one by one, for `tell`)
    finally:
        over.set()
        teller.join()
        if out.isatty():
            out.write("\n")
    return said


@contextmanager
def _only_one(path: Path, out: TextIO) -> Iterator[None]:
    """Two builds at once would do the same work twice."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            out.write("cluster tools: another build is under way, waiting for it\n")
            out.flush()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """For `make test-cluster`. 0 also without Go, unless SOJOURN_REQUIRE_CLUSTER is set: the tests then say that they
    are skipped."""
    if os.environ.get("KUBECONFIG"):
        sys.stderr.write(f"cluster tools: not needed, the tests use KUBECONFIG={os.environ['KUBECONFIG']}\n")
        return 0
    try:
        for tools in wanted():
            sys.stderr.write(f"cluster tools: {build(sys.stderr, tools)}\n")
    except NoTools as why:
        sys.stderr.write(f"cluster tools: {why}\n")
        return 1 if shutil.which("go") or os.environ.get("SOJOURN_REQUIRE_CLUSTER") else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
