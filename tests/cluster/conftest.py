"""A cluster to test on: the one that KUBECONFIG names, else a control plane of this run's own.

On our own, RBAC and the audit log are on and nodes are played by the tests' node agent. On somebody's cluster there are
real nodes and no audit log; tests that need what only one of the two has say so by their fixtures.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.cluster import control_plane, tools
from tests.support.cluster.accounts import Account, account
from tests.support.cluster.api import KubeApi, connected
from tests.support.cluster.audit import AuditLog
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.helm import Helm
from tests.support.cluster.node_agent import NodeAgent, OpenAgent, node_agent
from tests.support.cluster.pod_status import SIMULATED
from tests.support.cluster.real_node import RealNode, missing, real_node
from tests.support.cluster.waiting import until_async

_HERE = Path(__file__).parent
_NO_CLUSTER = f"NO KUBERNETES CLUSTER TO TEST ON: {tools.HOW_TO_GET}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of the run also waits for the control plane."""
    for item in items:
        if _HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(control_plane.READY_SEC * 2 + 120))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One loud line beside the skipped tests."""
    if not os.environ.get("KUBECONFIG") and tools.find() is None:
        terminalreporter.write_line(_NO_CLUSTER, red=True, bold=True)


@pytest.fixture(scope="session")
def plane() -> Iterator[ControlPlane]:
    if named := os.environ.get("KUBECONFIG"):
        with control_plane.existing(Path(named)) as found:
            yield found
        return
    directory = tools.find()
    if directory is None:
        if os.environ.get("SOJOURN_REQUIRE_CLUSTER"):
            pytest.fail(_NO_CLUSTER, pytrace=False)
        pytest.skip("no cluster to test on")
    with control_plane.running(directory) as made:
        yield made


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """For what needs no cluster."""
    directory = tools.find()
    if directory is None:
        pytest.skip("no helm: `make test-cluster` builds it")
    return Helm(directory / "helm", tmp_path_factory.mktemp("helm"))


@pytest.fixture
def own_plane(plane: ControlPlane) -> ControlPlane:
    """For what needs the audit log or nodes of the tests' own."""
    if not plane.own:
        pytest.skip("needs a control plane of the tests' own: run without KUBECONFIG")
    return plane


@pytest.fixture
async def admin(plane: ControlPlane) -> AsyncIterator[KubeApi]:
    """Access that may do everything."""
    async with connected(plane.admin_kubeconfig) as api:
        yield api


@pytest.fixture
async def audit(own_plane: ControlPlane, admin: KubeApi) -> AuditLog:
    assert own_plane.audit_log is not None
    return AuditLog(own_plane.audit_log, admin)


@pytest.fixture
async def new_namespace(admin: KubeApi) -> AsyncIterator[Callable[[], Awaitable[str]]]:
    """Makes namespaces that end, with all in them, after the test."""
    made: list[str] = []

    async def make() -> str:
        name = f"test-{secrets.token_hex(5)}"
        await admin.create("/api/v1/namespaces", {"metadata": {"name": name}})
        made.append(name)
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        await until_async(lambda: admin.find(account), f"the control plane has made {account}, which pods need")
        return name

    yield make
    for name in made:
        await admin.call("DELETE", f"/api/v1/namespaces/{name}/pods", {"gracePeriodSeconds": 0})
        await admin.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
async def namespace(new_namespace: Callable[[], Awaitable[str]]) -> str:
    return await new_namespace()


@pytest.fixture
async def manager_account(plane: ControlPlane, admin: KubeApi, namespace: str) -> Account:
    """A ServiceAccount with the rights that a manager has, in `namespace` only."""
    return await account(plane, admin, namespace)


class TheirNodes:
    """Stands where a node agent does on somebody's cluster: its own nodes run the pods, and nobody breaks them."""

    async def add_node(self, name: str = "", **special: object) -> str:
        if name or special:
            pytest.skip("needs nodes of the tests' own: run without KUBECONFIG")
        return ""

    def __getattr__(self, what: str) -> Any:
        pytest.skip(f"needs nodes of the tests' own ({what}): run without KUBECONFIG")


@pytest.fixture
async def open_agent(plane: ControlPlane, admin: KubeApi) -> AsyncIterator[OpenAgent]:
    """Node agents (without a node yet) that end after the test; arguments are `node_agent`'s. On somebody's cluster its
    own nodes, where they can run the tests' pods."""
    if not plane.own:
        simulated = await admin.list("/api/v1/nodes", labelSelector=f"{SIMULATED}=true", limit="1")
        if not os.environ.get("SOJOURN_TEST_IMAGE") and not simulated:
            pytest.skip("needs SOJOURN_TEST_IMAGE: an image with the executor, by digest, that the cluster can pull")

        async def theirs(**options: object) -> NodeAgent:
            if options.keys() - {"processes"}:
                pytest.skip("needs nodes of the tests' own: run without KUBECONFIG")
            return cast("NodeAgent", TheirNodes())

        yield theirs
        return
    async with contextlib.AsyncExitStack() as stack:
        api = await stack.enter_async_context(
            connected(plane.certificate_kubeconfig("test-node-agent", ["system:masters"]))
        )

        async def opened(**options: object) -> NodeAgent:
            return await stack.enter_async_context(node_agent(api, tools.versions()[1], **options))  # type: ignore[arg-type]

        yield opened


@pytest.fixture
async def agent(open_agent: OpenAgent) -> NodeAgent:
    """A node agent with one node that has room for everything."""
    found = await open_agent()
    await found.add_node()
    return found


@pytest.fixture
async def node(own_plane: ControlPlane, admin: KubeApi) -> AsyncIterator[RealNode]:
    """A real node, where SOJOURN_REAL_NODE asks for one. Name it before `namespace`, so that its pods end first."""
    if not os.environ.get("SOJOURN_REAL_NODE"):
        pytest.skip("a real node is started only with SOJOURN_REAL_NODE=1")
    if lacking := missing():
        pytest.fail(f"a real node needs {lacking}", pytrace=False)
    programs = [tools.find(each) for each in tools.NODE]
    found = [directory for directory in programs if directory is not None]
    if len(found) != len(programs):
        pytest.fail("a real node needs its programs: run `SOJOURN_REAL_NODE=1 make test-cluster`", pytrace=False)
    async with real_node(own_plane, admin, found) as made:
        yield made


@pytest.fixture
async def gvisor(node: RealNode, admin: KubeApi) -> AsyncIterator[str]:
    """The name of a RuntimeClass whose pods run in gVisor."""
    classes, name = "/apis/node.k8s.io/v1/runtimeclasses", f"gvisor-{secrets.token_hex(4)}"
    await admin.create(classes, {"metadata": {"name": name}, "handler": "runsc"})
    yield name
    await admin.delete(f"{classes}/{name}")
