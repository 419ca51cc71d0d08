"""A real node beside a control plane of the tests' own: kubelet, containerd, runc and gVisor, as root.

They run in process, mount and network namespaces of their own, so that all processes, mounts, devices and rules end
with the test run, however it ends. Pods have no way to a real network. What the machine cannot do is said by `missing`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.support.children import die_with_parent, run_directory
from tests.support.cluster import node_images
from tests.support.cluster.api import KubeApi
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.node_names import DOMAIN, cluster_names
from tests.support.cluster.node_network import NodeNetwork, api_service, policies_account
from tests.support.cluster.waiting import condition_of, until_async

NAME: Final = "real-node"
PAUSE: Final = "test.invalid/sojourn/pause:1"
_CNI: Final = Path("/usr/lib/cni")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_PARENT: Final = Path("/var/tmp")
_DIRECTORY: Final = "sojourn-realnode"
_LINK: Final = "sjnode-"
_CGROUP: Final = "sojourn-node-"
_READY_SEC: Final = 120.0
_TAIL_BYTES: Final = 4000

_CONTAINERD: Final = """\
version = 3
root = "{at}/root"
state = "{at}/state"
disabled_plugins = ["io.containerd.nri.v1.nri"]
[grpc]
address = "{at}/containerd.sock"
[ttrpc]
address = "{at}/containerd.sock.ttrpc"
[plugins."io.containerd.cri.v1.images"]
snapshotter = "overlayfs"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{pause}"
[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
disable_apparmor = true
[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runsc]
runtime_type = "io.containerd.runsc.v1"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runsc.options]
TypeUrl = "io.containerd.runsc.v1.options"
ConfigPath = "{at}/runsc.toml"
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{cni}"]
conf_dir = "{at}/cni"
"""

_SHIM: Final = """\
binary_name = "{at}/runsc"
root = "{at}/runsc-root"
[runsc_config]
platform = "systrap"
network = "sandbox"
"""

# runsc takes a pod's network for the machine's own where this directory has its files, which newer kernels show in all
# networks.
_RUNSC: Final = """\
#!/bin/sh
exec unshare --mount --propagation slave sh -c 'mount -t tmpfs none /proc/sys/net/core && exec "$0" "$@"' {runsc} "$@"
"""

_KUBELET: Final = """\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://{at}/containerd.sock
address: {address}
authentication: {{anonymous: {{enabled: false}}, webhook: {{enabled: false}}, x509: {{clientCAFile: {ca}}}}}
authorization: {{mode: AlwaysAllow}}
cgroupDriver: cgroupfs
cgroupRoot: /{cgroup}
failCgroupV1: false
failSwapOn: false
makeIPTablesUtilChains: false
healthzPort: 0
oomScoreAdj: 0
evictionHard: {{memory.available: 50Mi}}
podLogsDir: {at}/logs
resolvConf: ""
clusterDNS: [{names}]
clusterDomain: {domain}
"""


@dataclass(frozen=True)
class RealNode:
    name: str
    directory: Path
    ctr: Path
    network: NodeNetwork

    def load(self, archive: Path, name: str) -> str:
        """Imports an archive with an image called `name`; how pods name it by its digest."""
        self._ctr("images", "import", "--local", str(archive))
        digest = next(line.split()[2] for line in self._ctr("images", "ls").splitlines() if line.startswith(name + " "))
        pinned = f"{name.rpartition(':')[0]}@{digest}"
        self._ctr("images", "tag", "--force", name, pinned)
        return pinned

    def run(self, pod: dict[str, Any], *command: str) -> str:
        """What a command says in the pod's first container, as `kubectl exec` runs it."""
        container = pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
        pipes = ("--exec-id", secrets.token_hex(4), "--fifo-dir", f"{self.directory}/fifo")
        return self._ctr("tasks", "exec", *pipes, container, *command)

    def logs(self) -> str:
        """The ends of what the pods' containers have said."""
        return "".join(
            f"\n--- {log.relative_to(self.directory / 'logs')}\n{log.read_text(errors='replace')[-_TAIL_BYTES:]}"
            for log in sorted((self.directory / "logs").rglob("*.log"))
        )

    def _ctr(self, *arguments: str) -> str:
        command = [str(self.ctr), "-a", f"{self.directory}/containerd.sock", "-n", "k8s.io", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"ctr {' '.join(arguments)}: {done.stderr}"
        return done.stdout


def missing() -> str:
    """What this machine lacks; empty where nothing is known to be."""
    if os.geteuid() != 0:
        return "root"
    needed = ("ip", "unshare", "iptables-legacy")
    programs = [name for name in needed if shutil.which(name) is None]
    programs += [f"{_CNI}/{name}" for name in ("ptp", "host-local", "loopback") if not (_CNI / name).exists()]
    return ", ".join(programs)


@contextlib.asynccontextmanager
async def real_node(plane: ControlPlane, api: KubeApi, programs: Sequence[Path]) -> AsyncIterator[RealNode]:
    """A node that is ready. Its pods must be gone before its end."""
    assert plane.authority is not None
    # /var/tmp: containers' file systems cannot lie on a tmpfs everywhere.
    async with contextlib.AsyncExitStack() as stack:
        at = stack.enter_context(run_directory(_DIRECTORY, _PARENT))
        at.chmod(0o711)  # the root of a pod with a user namespace is somebody else, who has to get to its files
        _remove_left_behind()
        link, cgroup = (prefix + at.name.removeprefix(f"{_DIRECTORY}-") for prefix in (_LINK, _CGROUP))
        network = NodeNetwork.choose(link, plane)
        await stack.enter_async_context(policies_account(at, api, plane))
        stack.enter_context(_cgroup(cgroup))
        network.write(at, NAME)
        (at / "containerd.toml").write_text(_CONTAINERD.format(at=at, pause=PAUSE, cni=_CNI))
        settings = _KUBELET.format(
            at=at, address=network.address, ca=plane.authority.pair.certificate, cgroup=cgroup, names=network.outside,
            domain=DOMAIN,
        )  # fmt: skip
        (at / "kubelet.yaml").write_text(settings)
        kubeconfig = plane.certificate_kubeconfig(f"system:node:{NAME}", ["system:nodes"], network.server)
        kubelet = (
            f"kubelet --config={at}/kubelet.yaml --kubeconfig={kubeconfig} --hostname-override={NAME} "
            f"--node-ip={network.address} --root-dir={at}/kubelet --cert-dir={at}/pki"
        )
        script = (
            f"{network.setup(at, NAME)}"
            f"containerd -c {at}/containerd.toml >{at}/containerd.log 2>&1 & "
            f"while ! ctr -a {at}/containerd.sock version >/dev/null 2>&1; do sleep 0.2; done; "
            f"{kubelet} >{at}/kubelet.log 2>&1 & wait"
        )
        path = ":".join([*map(str, programs), os.environ["PATH"]])
        ctr, runsc = shutil.which("ctr", path=path), shutil.which("runsc", path=path)
        assert ctr is not None
        assert runsc is not None
        (at / "runsc.toml").write_text(_SHIM.format(at=at))
        (at / "runsc").write_text(_RUNSC.format(runsc=runsc))
        (at / "runsc").chmod(0o755)
        process = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "--net", "--kill-child", "sh", "-c", script],
            env={"PATH": path, "HOME": str(at)}, cwd=at, stdin=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        try:
            async with network.joined(process), cluster_names(network.outside, api), api_service(network.outside, api):
                await until_async(lambda: _is_ready(api, process), "the node is ready", _READY_SEC)
                node = RealNode(NAME, at, Path(ctr), network)
                node.load(node_images.pause(at / "pause.tar", PAUSE), PAUSE)
                yield node
        except AssertionError as why:
            raise AssertionError(f"{why}{_tails(at)}") from why
        finally:
            process.kill()
            process.wait()
            await api.delete(f"/api/v1/nodes/{NAME}")


def _remove_left_behind() -> None:
    """Groups of runs that were killed: the directory of the same name is gone."""
    for group in (*_CGROUPS.glob(f"{_CGROUP}*"), *_CGROUPS.glob(f"*/{_CGROUP}*")):
        if not (_PARENT / f"{_DIRECTORY}-{group.name.removeprefix(_CGROUP)}").exists():
            _remove_groups(group)


async def _is_ready(api: KubeApi, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, f"the node ended with {process.returncode}"
    node = await api.find(f"/api/v1/nodes/{NAME}")
    return node is not None and condition_of(node, "Ready") == "True" and not node["spec"].get("taints")


def _tails(at: Path) -> str:
    return "".join(
        f"\n--- end of {log.name}\n{log.read_bytes()[-_TAIL_BYTES:].decode(errors='replace')}"
        for log in sorted(at.glob("*.log"))
    )


@contextlib.contextmanager
def _cgroup(name: str) -> Iterator[None]:
    """A group of the node's own in every hierarchy."""
    hierarchies = [_CGROUPS] if (_CGROUPS / "cgroup.procs").exists() else [*_CGROUPS.iterdir()]
    for hierarchy in hierarchies:
        (hierarchy / name).mkdir(exist_ok=True)
    for file in ("cpuset.cpus", "cpuset.mems"):
        if (own := _CGROUPS / "cpuset" / name / file).exists():
            own.write_text((_CGROUPS / "cpuset" / file).read_text())
    try:
        yield
    finally:
        for hierarchy in hierarchies:
            _remove_groups(hierarchy / name)


def _remove_groups(top: Path) -> None:
    """The kernel takes a moment to let go of processes that were killed."""
    give_up = time.monotonic() + 20
    while top.exists() and time.monotonic() < give_up:
        for directory, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)
        time.sleep(0.05)
