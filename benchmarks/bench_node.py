"""What do a warm session, a warm pod and a warm node save, on a real node?

A control plane, kubelet, containerd, runc and gVisor of this run's own, the image that images/base makes, and `manager
serve`: how long the first command of a new task takes where its pod has to be made and where one is warm, how long the
next one takes in the same sandbox, and how long the image takes to get onto the node. As root.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

if __name__ == "__main__":  # started as a file, the tree's root is not where imports are looked for
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import machine
from benchmarks.harness.cluster import NoControlPlane, served
from manager.model import Owner
from manager.store.embedded import embedded_valkey
from sojourn import AsyncClient
from tests.support.cluster import control_plane, debian, real_node, tools
from tests.support.cluster.accounts import Account, account
from tests.support.cluster.api import KubeApi, connected
from tests.support.cluster.waiting import until_async
from tests.support.server_process import Stack

NAMESPACE = "sandbox-jobs"
OWNER = Owner("bench", "node")
IMAGE = "test.invalid/sojourn/base:12"
ISOLATIONS = ("namespaces", "gvisor")
CALM_SEC = 3.0  # from a warm pod's readiness to the next claim
READY_SEC = 180.0
_CONFIG = """
[[targets]]
name = "main"
provider = "kubernetes"
namespace = "{namespace}"
kubeconfig = "{kubeconfig}"
[projects."bench/node"]
profiles = ["cold", "warm"]
"""
_PROFILE = """
[[profiles]]
name = "{name}"
image = "{image}"
isolation = "{isolation}"
cpu = 0.6
memory = "256Mi"
keep_workspace = false
pool = {{ size = {pool} }}
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", type=int, default=8, help="new tasks for each figure (8)")
    parser.add_argument("--next", type=int, default=100, help="further commands of one task (100)")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends what was started too
    try:
        with tempfile.TemporaryDirectory(prefix="sojourn-node-") as name:
            report = asyncio.run(_measure(flags, Path(name)))
    except NoControlPlane as why:
        print(why, file=sys.stderr)
        return 2
    print(json.dumps(report, indent=2) if flags.json else _table(report))
    return 0


async def _measure(flags: argparse.Namespace, directory: Path) -> dict[str, object]:
    lacking = real_node.missing() or debian.missing()
    programs = [tools.find(each) for each in (tools.CONTROL_PLANE, *tools.NODE)]
    found = [directory for directory in programs if directory is not None]
    if lacking or len(found) != len(programs):
        raise NoControlPlane(
            f"no real node: {lacking or 'run `SOJOURN_REAL_NODE=1 make test-cluster`, which builds what it needs'}"
        )
    _say("building the image")
    archive = debian.base_image(directory, IMAGE)
    report: dict[str, object] = {"machine": machine.describe(), "image_bytes": archive.stat().st_size}
    async with AsyncExitStack() as stack:
        plane = stack.enter_context(control_plane.running(found[0]))
        admin = await stack.enter_async_context(connected(plane.admin_kubeconfig))
        node = await stack.enter_async_context(real_node.real_node(plane, admin, found[1:]))
        await admin.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        default = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"
        await until_async(lambda: admin.find(default), "the control plane has made the account that pods need")
        await admin.create("/apis/node.k8s.io/v1/runtimeclasses", {"metadata": {"name": "gvisor"}, "handler": "runsc"})
        rights = await account(plane, admin, NAMESPACE)
        began = time.monotonic()
        image = node.load(archive, IMAGE)
        report["import_sec"] = time.monotonic() - began
        redis_url = await stack.enter_async_context(embedded_valkey(directory / "store"))
        env = {
            "SOJOURN_REDIS_URL": redis_url, "SOJOURN_MANAGER_SECRET": "m" * 36,
            "SOJOURN_KEY_PEPPER": "p" * 36, "SOJOURN_OBJECTS": f"file://{directory / 'objects'}",
            "SOJOURN_HOST": "127.0.0.1", "SOJOURN_METRICS_PORT": "0",
        }  # fmt: skip
        for isolation in ISOLATIONS:  # one after the other: the node has room for three of its pods
            config = directory / f"{isolation}.toml"
            config.write_text(_config(rights, image, isolation))
            try:
                own = {**env, "SOJOURN_CONFIG": str(config)}
                async with served(directory, own, OWNER) as (server, key), AsyncClient(server.address, key) as client:
                    report[isolation] = await _times(client, server, key, isolation, flags)
            finally:
                await admin.call("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods", query={"gracePeriodSeconds": "1"})
                await until_async(lambda: _empty(admin), "all pods are gone", READY_SEC)
    return report


def _config(rights: Account, image: str, isolation: str) -> str:
    pools = {"sandboxes-default": 0, "cold": 0, "warm": 1}  # the first is one that every target has
    return _CONFIG.format(namespace=NAMESPACE, kubeconfig=rights.kubeconfig) + "".join(
        _PROFILE.format(name=name, image=image, isolation=isolation, pool=pool) for name, pool in pools.items()
    )


async def _empty(admin: KubeApi) -> bool:
    return not await admin.list(f"/api/v1/namespaces/{NAMESPACE}/pods")


async def _times(
    client: AsyncClient, server: Stack, key: str, isolation: str, flags: argparse.Namespace
) -> dict[str, float]:
    """Milliseconds: medians."""
    found: dict[str, list[float]] = {"new pod": [], "warm pod": [], "next command": []}
    for number in range(flags.new):
        _say(f"{isolation}: new task {number + 1} of {flags.new}")
        for kind in ("cold", "warm"):
            await _pool_full(server, key)
            await asyncio.sleep(CALM_SEC)
            task = client.task(f"{isolation}-{kind}-{number}", profile=kind)
            began = time.perf_counter()
            result = await task.exec(["true"], check=True)
            found["new pod" if kind == "cold" else "warm pod"].append(1000 * (time.perf_counter() - began))
            assert result.where.provisioned == kind, result
            if kind == "warm" and number == 0:
                for _ in range(flags.next):
                    began = time.perf_counter()
                    await task.exec(["true"], check=True)
                    found["next command"].append(1000 * (time.perf_counter() - began))
            await task.delete()
    return {name: median(times) for name, times in found.items()}


async def _pool_full(server: Stack, key: str) -> None:
    async with asyncio.timeout(READY_SEC):
        while True:
            pools = (await server.call("GET", "/api/v1/pools", None, {"X-Api-Key": key}))["pools"]
            if any(pool["ready"] for pool in pools if pool["profile"] == "warm"):
                return
            await asyncio.sleep(0.2)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _table(report: dict[str, object]) -> str:
    lines = [f"{'first command of a task':<14}", f"{'':<14}{'new pod':>12}{'warm pod':>12}{'next command':>14}"]
    for isolation in ISOLATIONS:
        times = report[isolation]
        assert isinstance(times, dict)
        lines.append(
            f"{isolation:<14}{times['new pod']:>9.0f} ms{times['warm pod']:>9.1f} ms{times['next command']:>11.1f} ms"
        )
    size, took = report["image_bytes"], report["import_sec"]
    assert isinstance(size, int)
    assert isinstance(took, float)
    lines.append(
        f"an image of {size / (1 << 20):.0f} MiB (not packed) is on the node after {took:.1f} s, without any pull"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
