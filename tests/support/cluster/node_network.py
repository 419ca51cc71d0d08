"""The network of a real node: a namespace of its own, joined to the test run by one cable.

Every pod hangs on the node by a cable of its own, so that the node routes whatever goes from one to another, and holds
it against the NetworkPolicies of the API server: kube-network-policies, which judges the first packet of a connection.
It would lead packets to itself by nftables, which not every kernel can queue from; here iptables does. Also judged is
what pods send to the node itself. Not judged are the node's own packets (kubelet's probes), as on any node, and what
the test run sends from `outside`, which stands for the node there.

Services are kube-proxy's; the one called `kubernetes` leads to the API server. Their names are answered by a name
server of the tests, in place of CoreDNS.

Behind the node lies a public network, 11.0.0.0/24, with two servers; nothing in it is real.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.support.children import die_with_parent
from tests.support.cluster.api import KubeApi
from tests.support.cluster.control_plane import SERVER_PORT, ControlPlane

PUBLIC: Final = "11.0.0.1"
RESOLVER: Final = "11.0.0.53"
API_NAME: Final = "kubernetes.default.svc"  # of the API server, in the certificate that it shows
_QUEUE: Final = 100  # kube-network-policies' own default
_ROOT: Final = Path(__file__).resolve().parents[3]
_ACCOUNT: Final = "/run/secrets/kubernetes.io/serviceaccount"
_NETNS_SEC: Final = 30.0

# Before anything else is started in the node's namespaces. /run is the node's own: locks, sockets, names of namespaces.
_SETUP: Final = """\
set -e
exec 2>{at}/setup.log
mount -t tmpfs tmpfs /run
mkdir -p {account}
cp {at}/account/* {account}
mount --bind {at}/hosts /etc/hosts
mkdir {at}/bin
for verb in "" -save -restore; do ln -s "$(command -v iptables-legacy$verb)" {at}/bin/iptables$verb; done
until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
echo 1 >/proc/sys/net/ipv4/ip_forward
echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6
ip link set lo up
ip addr add {address}/30 dev eth0
ip link set eth0 up
unshare --net sh -c '
    until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
    for host in {public} {resolver}; do ip addr add $host/24 dev eth0; done
    ip link set lo up
    ip link set eth0 up
    ip route add default via {router}
    exec {python} -m tests.support.cluster.outside public {public} {resolver}
' >{at}/public.log 2>&1 &
until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link add public type veth peer name eth0 netns $!
ip addr add {router}/24 dev public
ip link set public up
policy() {{ iptables-legacy -w -t mangle -A "$@"; }}
policy POSTROUTING -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT
policy POSTROUTING -m owner --uid-owner 0 -j ACCEPT
policy POSTROUTING -s {outside} -j ACCEPT
policy POSTROUTING -s {subnet} -j NFQUEUE --queue-num {queue}
policy POSTROUTING -d {subnet} -j NFQUEUE --queue-num {queue}
policy INPUT -s {subnet} -m conntrack --ctstate NEW -j NFQUEUE --queue-num {queue}
export PATH={at}/bin:$PATH
kube-proxy --config={at}/proxy.yaml >{at}/proxy.log 2>&1 &
KUBERNETES_SERVICE_HOST={name} KUBERNETES_SERVICE_PORT={port} kube-network-policies --hostname-override={node} \\
    --disable-nri --netfilter-bug-1766-fix=false --nfqueue-id={queue} --metrics-bind-address=127.0.0.1:9080 \\
    >{at}/policies.log 2>&1 &
until grep -qs '^ *{queue} ' /proc/net/netfilter/nfnetlink_queue; do sleep 0.05; done
set +e
"""

_PROXY: Final = """\
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: iptables
hostnameOverride: {node}
bindAddress: {address}
healthzBindAddress: 127.0.0.1:10256
metricsBindAddress: 127.0.0.1:10249
clientConnection: {{kubeconfig: {kubeconfig}}}
clusterCIDR: {subnet}
iptables: {{minSyncPeriod: 0s}}
conntrack: {{maxPerCore: 0, min: 0, tcpCloseWaitTimeout: 0s, tcpEstablishedTimeout: 0s}}
"""


@dataclass(frozen=True)
class NodeNetwork:
    link: str  # the cable's end in the test run's network
    outside: str  # the test run's address, where the API server is found
    address: str  # the node's
    subnet: str  # the pods'
    plane: ControlPlane

    @classmethod
    def choose(cls, link: str, plane: ControlPlane) -> NodeNetwork:
        third = secrets.randbelow(256)
        return cls(link, f"10.78.{third}.1", f"10.78.{third}.2", f"10.77.{third}.0/24", plane)

    @property
    def server(self) -> str:
        """The API server's, in the node's namespaces."""
        return f"https://{API_NAME}:{SERVER_PORT}"

    def write(self, at: Path, node: str) -> None:
        """The files below `at` that `setup` and containerd read."""
        kubeconfig = self.plane.certificate_kubeconfig("system:kube-proxy", server=self.server)
        proxy = _PROXY.format(node=node, address=self.address, kubeconfig=kubeconfig, subnet=self.subnet)
        (at / "proxy.yaml").write_text(proxy)
        (at / "hosts").write_text(f"127.0.0.1 localhost\n{self.outside} {API_NAME}\n")
        ipam = {
            "type": "host-local", "ranges": [[{"subnet": self.subnet}]], "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": f"{at}/addresses",
        }  # fmt: skip
        plugin = {"type": "ptp", "ipMasq": False, "ipam": ipam}
        (at / "cni").mkdir()
        network = {"cniVersion": "1.0.0", "name": "tests", "plugins": [plugin]}
        (at / "cni" / "10.conflist").write_text(json.dumps(network))

    def setup(self, at: Path, node: str) -> str:
        """What the shell of the node's namespaces does first; its last words leave kube-network-policies at work."""
        return _SETUP.format(
            at=at, node=node, account=_ACCOUNT, address=self.address, outside=self.outside, subnet=self.subnet,
            public=PUBLIC, resolver=RESOLVER, router=PUBLIC.rpartition(".")[0] + ".254", queue=_QUEUE, name=API_NAME,
            port=SERVER_PORT, python=f"env PYTHONPATH={shlex.quote(str(_ROOT))} {shlex.quote(sys.executable)}",
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def joined(self, process: subprocess.Popen[bytes]) -> AsyncIterator[None]:
        """The cable from here into the network of `process`, and the API server at its near end."""
        _until_own_network(process)
        _ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
        try:
            _ip("addr", "add", f"{self.outside}/30", "dev", self.link)
            _ip("link", "set", self.link, "up")
            _ip("route", "add", self.subnet, "via", self.address, "dev", self.link)
            forwarder = subprocess.Popen(
                [sys.executable, "-m", "tests.support.cluster.outside", "forward", self.outside, str(SERVER_PORT),
                 self.plane.address, str(SERVER_PORT)],
                cwd=_ROOT, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent,
            )  # fmt: skip
            try:
                yield
            finally:
                forwarder.kill()
                forwarder.wait()
        finally:
            with contextlib.suppress(AssertionError):  # it goes with the node's network
                _ip("link", "del", self.link)


@contextlib.asynccontextmanager
async def policies_account(at: Path, api: KubeApi, plane: ControlPlane) -> AsyncIterator[None]:
    """An account for kube-network-policies in `at`/account: it sees pods, namespaces and policies, and no secret."""
    assert plane.authority is not None
    name = f"network-policies-{secrets.token_hex(4)}"
    accounts = "/api/v1/namespaces/kube-system/serviceaccounts"
    bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
    await api.create(accounts, {"metadata": {"name": name}})
    binding: dict[str, Any] = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": "kube-system"}],
    }
    try:
        await api.create(bindings, binding)
        asked = await api.create(f"{accounts}/{name}/token", {"spec": {"expirationSeconds": 7200}})
        (at / "account").mkdir(mode=0o700)
        (at / "account" / "token").write_text(asked["status"]["token"])
        (at / "account" / "ca.crt").write_bytes(plane.authority.pair.certificate.read_bytes())
        yield
    finally:
        await api.delete(f"{bindings}/{name}")
        await api.delete(f"{accounts}/{name}")


@contextlib.asynccontextmanager
async def api_service(address: str, api: KubeApi) -> AsyncIterator[None]:
    """The endpoint of the Service `kubernetes`: the API server itself listens on a loopback address, which is none."""
    base = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
    await api.delete(f"{base}/kubernetes")  # of a run before
    endpoint: dict[str, Any] = {
        "metadata": {"name": "kubernetes", "labels": {"kubernetes.io/service-name": "kubernetes"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
        "ports": [{"name": "https", "port": SERVER_PORT, "protocol": "TCP"}],
    }
    await api.create(base, endpoint)
    try:
        yield
    finally:
        await api.delete(f"{base}/kubernetes")


def _until_own_network(process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + _NETNS_SEC
    here, there = os.readlink("/proc/self/ns/net"), Path(f"/proc/{process.pid}/ns/net")
    while process.poll() is None and os.readlink(there) == here:
        assert time.monotonic() < give_up, "the node's network namespace is late"
        time.sleep(0.02)
    assert process.poll() is None, "the node's namespaces could not be set up"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
