"""A real Kubernetes control plane on this machine: etcd, kube-apiserver, kube-controller-manager, kube-scheduler.

Everything listens on one loopback address of the run's own, so that no port is shared with anybody. RBAC and the audit
log are on. There is no kubelet: see `node_agent`. All of it ends with the process that started it, also when that one
is killed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.children import die_with_parent, run_directory
from tests.support.cluster.audit import POLICY
from tests.support.cluster.certificates import Authority, Pair

READY_SEC: Final = 120.0
_END_SEC: Final = 20.0
_LOG_TAIL_BYTES: Final = 3000
MEMORY: Final = "1GiB"  # each program; from there on Go collects garbage instead of growing
SERVER_PORT: Final = 6443
_SHARED_MEMORY: Final = Path("/dev/shm")


@dataclass(frozen=True)
class ControlPlane:
    """A cluster to test against."""

    server: str  # https://...
    admin_kubeconfig: Path  # may do everything
    directory: Path  # for kubeconfigs of this run; private
    authority: Authority | None = None  # of a control plane of our own
    address: str = ""  # the loopback address of a control plane of our own
    audit_log: Path | None = None  # of a control plane of our own

    @property
    def own(self) -> bool:
        """Whether this run made it: only then is there an audit log, and are nodes the tests' own."""
        return self.authority is not None

    def certificate_kubeconfig(self, user: str, groups: Sequence[str] = (), server: str = "") -> Path:
        """For a user that a certificate names, at `server` where it is given; only on a control plane of our own."""
        assert self.authority is not None
        pair = self.authority.sign(user, groups)
        files = {"client-certificate": str(pair.certificate), "client-key": str(pair.key)}
        return self._write(user, files, server=server)

    def token_kubeconfig(self, name: str, token: str, namespace: str, server: str = "", ca: Path | None = None) -> Path:
        """For whom the token names, at `server` (such as a proxy) where it is given, whose CA then is `ca`."""
        return self._write(name, {"token": token}, namespace, server, ca)

    def _write(
        self, name: str, user: Mapping[str, str], namespace: str = "default", server: str = "", ca: Path | None = None
    ) -> Path:
        cluster = dict(yaml.safe_load(self.admin_kubeconfig.read_text())["clusters"][0]["cluster"])
        if ca is not None:
            cluster = {"server": cluster["server"], "certificate-authority": str(ca)}
        if server:
            cluster["server"] = server
        return _write_kubeconfig(self.directory, name, cluster, user, namespace)


def _write_kubeconfig(
    directory: Path, name: str, cluster: Mapping[str, str], user: Mapping[str, str], namespace: str
) -> Path:
    path = directory / f"{name.replace(':', '-')}-{secrets.token_hex(4)}.kubeconfig"
    path.touch(mode=0o600)
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": dict(cluster)}],
        "users": [{"name": name, "user": dict(user)}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": name, "namespace": namespace}}],
    }  # fmt: skip
    path.write_text(json.dumps(config, indent=1))  # JSON is YAML
    return path


@contextlib.contextmanager
def existing(kubeconfig: Path) -> Iterator[ControlPlane]:
    """Somebody's cluster, as its kubeconfig says."""
    with tempfile.TemporaryDirectory(prefix="sojourn-kubeconfig-") as directory:
        config = _self_contained(yaml.safe_load(kubeconfig.read_text()), kubeconfig.parent)
        own = Path(directory, "admin.kubeconfig")
        own.touch(mode=0o600)
        own.write_text(json.dumps(config))
        yield ControlPlane(config["clusters"][0]["cluster"]["server"], own, Path(directory))


def _self_contained(config: Any, beside: Path) -> Any:
    """Only the current context, with absolute paths."""
    context = next(entry for entry in config["contexts"] if entry["name"] == config["current-context"])
    for section, key in (("clusters", "cluster"), ("users", "user")):
        config[section] = [entry for entry in config[section] if entry["name"] == context["context"][key]]
        for name in ("certificate-authority", "client-certificate", "client-key"):
            if name in config[section][0][key]:
                config[section][0][key][name] = str(beside / config[section][0][key][name])
    return config | {"contexts": [context]}


@contextlib.contextmanager
def running(tools: Path, memory: str = MEMORY) -> Iterator[ControlPlane]:
    """A control plane from the programs in `tools`, ready; ended, with its data, on the way out."""
    parent = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
    with run_directory("sojourn-plane", parent) as directory, contextlib.ExitStack() as stack:
        yield _Maker(tools, directory, stack, memory).make()


def free_loopback_address() -> str:
    """One that nobody listens on at the API server's port: 127.x.y.1 with x from 64 to 127."""
    for _ in range(100):
        address = f"127.{64 + secrets.randbelow(64)}.{secrets.randbelow(256)}.1"
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, SERVER_PORT))
            except OSError:
                continue
        return address
    raise AssertionError("no free loopback address")


class _Maker:
    def __init__(self, tools: Path, directory: Path, stack: contextlib.ExitStack, memory: str) -> None:
        self.tools = tools
        self.memory = memory
        self.directory = directory
        self.stack = stack
        self.address = free_loopback_address()
        self.server = f"https://{self.address}:{SERVER_PORT}"
        self.authority = Authority(directory / "pki")
        self.logs: dict[str, Path] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def make(self) -> ControlPlane:
        hosts = [self.address, "127.0.0.1", "10.96.0.1", "localhost", "kubernetes.default.svc"]
        serving = self.authority.sign("kube-apiserver", hosts=hosts)
        accounts = self.authority.signing_key("service-accounts")
        audit_log = self.directory / "audit.log"
        etcd = self.directory / "etcd.sock"
        self._start_etcd(etcd)
        self._start_apiserver(etcd, serving, accounts, audit_log)
        admin = self._kubeconfig("admin", ["system:masters"])
        self._until_ready("kube-apiserver", SERVER_PORT, "/readyz")
        self._start_rest(serving, accounts)
        self._until_ready("kube-controller-manager", 10257, "/healthz")
        self._until_ready("kube-scheduler", 10259, "/healthz")
        return ControlPlane(self.server, admin, self.directory, self.authority, self.address, audit_log)

    def _start_etcd(self, socket_path: Path) -> None:
        peer = f"unix://{self.directory}/etcd-peer.sock"
        self._start(
            "etcd", f"--data-dir={self.directory / 'etcd'}", f"--listen-client-urls=unix://{socket_path}",
            f"--advertise-client-urls=unix://{socket_path}", f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}", "--unsafe-no-fsync",
            "--log-level=warn", "--quota-backend-bytes=2147483648", "--auto-compaction-retention=5m",
        )  # fmt: skip

    def _start_apiserver(self, etcd: Path, serving: Pair, accounts: Pair, audit_log: Path) -> None:
        policy = self.directory / "audit-policy.yaml"
        policy.write_text(POLICY)
        self._start(
            "kube-apiserver", f"--etcd-servers=unix://{etcd}", f"--bind-address={self.address}",
            f"--advertise-address={self.address}", f"--secure-port={SERVER_PORT}", "--endpoint-reconciler-type=none",
            f"--tls-cert-file={serving.certificate}", f"--tls-private-key-file={serving.key}",
            f"--client-ca-file={self.authority.pair.certificate}", "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction", "--anonymous-auth=false", "--allow-privileged=true",
            "--service-cluster-ip-range=10.96.0.0/16", "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={accounts.certificate}", f"--service-account-signing-key-file={accounts.key}",
            f"--audit-policy-file={policy}", f"--audit-log-path={audit_log}", "--audit-log-mode=blocking",
            "--kubelet-preferred-address-types=InternalIP", "--profiling=false",
        )  # fmt: skip

    def _start_rest(self, serving: Pair, accounts: Pair) -> None:
        serves = [
            f"--bind-address={self.address}", f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}", "--leader-elect=false", "--profiling=false",
        ]  # fmt: skip
        kubeconfig = self._kubeconfig("system:kube-controller-manager")
        self._start(
            "kube-controller-manager", *serves, f"--kubeconfig={kubeconfig}", "--use-service-account-credentials",
            f"--service-account-private-key-file={accounts.key}", f"--root-ca-file={self.authority.pair.certificate}",
            "--kube-api-qps=300", "--kube-api-burst=600", "--enable-hostpath-provisioner",
            "--controllers=*,-attachdetach", "--node-eviction-rate=100",
        )  # fmt: skip
        kubeconfig = self._kubeconfig("system:kube-scheduler")
        config = self.directory / "scheduler.yaml"
        config.write_text(
            "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"
            "leaderElection: {leaderElect: false}\nenableProfiling: false\n"
            f"clientConnection: {{kubeconfig: {kubeconfig}, qps: 500, burst: 1000}}\n"
        )
        self._start("kube-scheduler", *serves[:3], f"--config={config}")

    def _kubeconfig(self, user: str, groups: Sequence[str] = ()) -> Path:
        pair = self.authority.sign(user, groups)
        cluster = {"server": self.server, "certificate-authority": str(self.authority.pair.certificate)}
        who = {"client-certificate": str(pair.certificate), "client-key": str(pair.key)}
        return _write_kubeconfig(self.directory, user, cluster, who, "default")

    def _start(self, program: str, *arguments: str) -> None:
        log = self.directory / f"{program}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [str(self.tools / program), *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                cwd=self.directory, env={"PATH": os.defpath, "HOME": str(self.directory), "GOMEMLIMIT": self.memory},
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        self.logs[program], self.processes[program] = log, process
        self.stack.callback(_end, process)

    def _until_ready(self, program: str, port: int, path: str) -> None:
        give_up = time.monotonic() + READY_SEC
        tls = ssl.create_default_context(cafile=str(self.authority.pair.certificate))
        admin = self.authority.directory / "admin.crt"
        tls.load_cert_chain(admin, admin.with_suffix(".key"))
        last = ""
        while time.monotonic() < give_up:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise AssertionError(f"{name} ended with {process.returncode}{self._tails()}")
            connection = http.client.HTTPSConnection(self.address, port, timeout=10, context=tls)
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                last = f"{answer.status} {answer.read(4000).decode(errors='replace')}"
                if answer.status == 200:
                    return
            except (OSError, http.client.HTTPException) as why:
                last = repr(why)
            finally:
                connection.close()
            time.sleep(0.1)
        raise AssertionError(f"{program} is not ready after {READY_SEC:.0f} s: {last}{self._tails()}")

    def _tails(self) -> str:
        return "".join(
            f"\n--- end of {name}'s log\n" + log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
            for name, log in self.logs.items()
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """At once: its data is thrown away."""
    process.kill()
    process.wait(_END_SEC)
