"""Plays the kubelet where there is none: NOT a real node, and every node it registers is labelled so.

It registers nodes, runs for each pod that the real scheduler binds to one of them the real executor as a local process
(or, without `processes`, only says that it runs), reports status, honours deletion with its grace, and makes faults on
demand. What a real node adds (containers, images, cgroups, networks, mounts) it does not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp

from tests.support.children import run_directory
from tests.support.cluster import pod_status
from tests.support.cluster.api import STRATEGIC, ApiError, KubeApi
from tests.support.cluster.pod_files import PodFiles
from tests.support.cluster.pod_process import (
    PORT,
    Launch,
    Placed,
    PodProcess,
    Program,
    environment,
    executor,
    workspace_claim,
)
from tests.support.cluster.pod_status import Ended

Object = dict[str, Any]
ENOUGH: Final[Mapping[str, str]] = {"cpu": "1000", "memory": "4Ti", "ephemeral-storage": "4Ti", "pods": "10000"}
_HEARTBEAT_SEC: Final = 5.0
_RETRY_SEC: Final = 0.5
_TRY_SEC: Final = 60.0
_AT_ONCE: Final = 32  # calls to the API server
_PROBE_SEC: Final = 5.0  # the answer to one probe
_UNREADY_PROBE_SEC: Final = 0.1  # between probes until the first that succeeds
_RESTART_SEC: Final = 1.0


OpenAgent = Callable[..., Awaitable["NodeAgent"]]  # the fixture `open_agent`; arguments are `node_agent`'s


class RunningPod:
    """One pod on a node of ours."""

    def __init__(self, pod: Object) -> None:
        self.pod = pod  # as last seen
        self.ip = ""
        self.process: PodProcess | None = None
        self.directory: Path | None = None
        self.deleting = asyncio.Event()
        self.gone = asyncio.Event()
        self.ending: Ended | None = None  # a fault's word on how the container ends
        self.exited = asyncio.Event()  # stands for the process's end where there is no process, or by a fault
        self.ready: bool | None = None  # as reported; None: it does not run

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.pod['metadata']['namespace']}/pods/{self.name}"

    @property
    def node(self) -> str:
        return str(self.pod["spec"]["nodeName"])


class NodeAgent:
    """Open one with `node_agent`. Pods are named by their names, which tests keep unique."""

    STORAGE_CLASS: Final = "directories-of-the-tests"

    def __init__(
        self,
        api: KubeApi,
        version: str,
        directory: Path,
        *,
        processes: bool,
        programs: Mapping[str, Program],
        ready_sec: float,
    ) -> None:
        self.nodes: dict[str, bool | None] = {}  # name -> Ready, as reported
        self.pods: dict[str, RunningPod] = {}  # by uid
        self.api = api
        self._version = version
        self._processes = processes
        self._programs = programs
        self._ready_sec = ready_sec
        self._capacity: dict[str, Mapping[str, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.errors: list[BaseException] = []  # of the agent itself
        self._calls = asyncio.Semaphore(_AT_ONCE)
        self._addresses: set[str] = set()
        self._volumes: set[Path] = set()
        self._faults = asyncio.Condition()
        self._pull_errors: dict[str, str] = {}  # image -> message
        self._held: Callable[[Object], bool] = lambda pod: False
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PROBE_SEC))
        self._directory = directory

    # Nodes

    async def add_node(
        self, name: str = "", *, capacity: Mapping[str, str] | None = None, labels: Mapping[str, str] | None = None
    ) -> str:
        """Registers a node and returns its name once pods can be scheduled to it. `capacity` replaces some of ENOUGH,
        such as pods: "2"."""
        name = name or f"test-node-{secrets.token_hex(4)}"
        self._capacity[name] = {**ENOUGH, **(capacity or {})}
        await self.api.create("/api/v1/nodes", pod_status.node(name, labels or {}))
        await self._report_node(name, True)
        await self._renew(name)
        give_up = time.monotonic() + 60
        while (await self.api.get(f"/api/v1/nodes/{name}"))["spec"].get("taints"):
            assert time.monotonic() < give_up, f"the control plane did not take the node {name} for ready"
            await asyncio.sleep(0.05)
        return name

    async def storage_class(self) -> None:
        """Makes STORAGE_CLASS: the controller manager provisions its volumes as directories of this machine."""
        path = "/apis/storage.k8s.io/v1/storageclasses"
        if await self.api.find(f"{path}/{self.STORAGE_CLASS}") is None:
            body = {"metadata": {"name": self.STORAGE_CLASS}, "provisioner": "kubernetes.io/host-path"}
            await self.api.create(path, body)

    async def _report_node(self, name: str, ready: bool | None) -> None:
        self.nodes[name] = ready
        status = pod_status.node_status(self._capacity[name], self._version, ready)
        await self.api.patch(f"/api/v1/nodes/{name}/status", {"status": status}, STRATEGIC)

    async def _renew(self, name: str) -> None:
        path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": pod_status.now_micro()}
        try:
            await self.api.patch(f"{path}/{name}", {"spec": spec})
        except ApiError as why:
            if why.status != 404:
                raise
            await self.api.create(path, {"metadata": {"name": name}, "spec": spec})

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_SEC)
            for name, ready in list(self.nodes.items()):
                if ready is not None:
                    with contextlib.suppress(ApiError, aiohttp.ClientError, TimeoutError):
                        await self._renew(name)

    # Faults

    async def not_ready(self, node: str) -> None:
        """The node's kubelet says that it is not ready; its pods go on."""
        await self._report_node(node, False)

    async def lose(self, node: str) -> None:
        """The node is not heard from any more and its pods do not answer; they are not deleted either.

        What the control plane says of such a node and its pods after its grace period (50 s) is said here at once."""
        await self._report_node(node, None)
        for run in self._on(node):
            if run.process is not None:
                run.process.stop(going=False)
            if run.ready:
                await self._patch(run, pod_status.unheard())

    async def recover(self, node: str) -> None:
        """Ends `not_ready` or `lose`."""
        for run in self._on(node):
            if run.process is not None:
                run.process.stop(going=True)
            if run.ready:
                run.ready = False  # as the control plane has it
        await self._report_node(node, True)
        async with self._faults:
            self._faults.notify_all()

    async def pull_error(self, image: str, message: str | None = "not found") -> None:
        """Pods with that image do not start, until `message` is None."""
        async with self._faults:
            self._pull_errors.pop(image, None)
            if message is not None:
                self._pull_errors[image] = message
            self._faults.notify_all()

    async def hold(self, held: Callable[[Object], bool] = lambda pod: False) -> None:
        """Pods for which `held` says so stay at ContainerCreating, until it does not."""
        async with self._faults:
            self._held = held
            self._faults.notify_all()

    def oom(self, pod: str) -> None:
        """The kernel kills the pod's container for its memory."""
        self._end(pod, Ended(137, "OOMKilled"))

    def evict(self, pod: str, message: str = "The node was low on resource: memory.") -> None:
        """The node evicts the pod: it stays as a Failed object."""
        self._end(pod, Ended(137, "Evicted", message, evicted=True))

    def exit(self, pod: str, code: int) -> None:
        """The container ends by itself."""
        self._end(pod, Ended.with_code(code))

    def _end(self, pod: str, how: Ended) -> None:
        run = self.running(pod)
        run.ending = how
        if run.process is not None:
            run.process.kill()
        run.exited.set()

    def running(self, pod: str) -> RunningPod:
        found = [run for run in self.pods.values() if run.name == pod]
        assert found, f"no pod {pod} on the tests' nodes; there are {[run.name for run in self.pods.values()]}"
        return found[-1]

    def _on(self, node: str) -> list[RunningPod]:
        return [run for run in self.pods.values() if run.node == node]

    # Pods

    async def _follow(self) -> None:
        """Lists and watches all pods that are bound, for ever."""
        selector = {"fieldSelector": "spec.nodeName!="}
        while True:
            try:
                listed = await self.api.get("/api/v1/pods", **selector)
                there = {pod["metadata"]["uid"] for pod in listed["items"]}
                for uid in self.pods.keys() - there:
                    self.pods[uid].gone.set()
                for pod in listed["items"]:
                    self._saw(pod)
                async for kind, pod in self.api.watch(
                    "/api/v1/pods", listed["metadata"]["resourceVersion"], **selector
                ):
                    if kind in ("ADDED", "MODIFIED"):
                        self._saw(pod)
                    elif kind == "DELETED" and (run := self.pods.get(pod["metadata"]["uid"])):
                        run.gone.set()
                    elif kind == "ERROR":
                        break
            except (ApiError, aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(_RETRY_SEC)

    def _saw(self, pod: Object) -> None:
        if pod["spec"].get("nodeName") not in self.nodes:
            return
        uid = pod["metadata"]["uid"]
        if uid not in self.pods:
            self.pods[uid] = RunningPod(pod)
            self._start(self._live(uid, self.pods[uid]), f"pod-{pod['metadata']['name']}")
        self.pods[uid].pod = pod
        if "deletionTimestamp" in pod["metadata"]:
            self.pods[uid].deleting.set()

    def _start(self, work: Any, name: str) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(error)

    async def _live(self, uid: str, run: RunningPod) -> None:
        """One pod's life on its node."""
        try:
            await _first(self._containers(run), run.deleting.wait(), run.gone.wait())
            await self._finish(run)
        finally:
            if run.process is not None:
                run.process.kill()
                await run.process.exit_code()
            if run.directory is not None:
                shutil.rmtree(run.directory, ignore_errors=True)
            self._addresses.discard(run.ip)
            self.pods.pop(uid, None)

    async def _containers(self, run: RunningPod) -> None:
        """Starts the first container and, where the pod's policy says so, again; returns when the pod is deleted."""
        restarts, before = 0, None
        await self._report(run, pod_status.waiting(run.pod, "ContainerCreating")) if self._processes else None
        while True:
            await self._startable(run)
            run.exited.clear()
            run.ending = None
            ended = await self._run_once(run, restarts, before)
            policy = run.pod["spec"].get("restartPolicy", "Always")
            if ended.evicted or policy == "Never" or (policy == "OnFailure" and ended.code == 0):
                break
            restarts, before = restarts + 1, ended
            status = pod_status.running(run.pod, run.ip, ready=False, restarts=restarts, before=ended)
            status["containerStatuses"][0] |= {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "started": False}
            await self._report(run, status)
            await asyncio.sleep(_RESTART_SEC)
        await self._report(run, pod_status.over(run.pod, ended))
        await asyncio.Event().wait()  # its object stays until somebody deletes it

    async def _startable(self, run: RunningPod) -> None:
        """Waits while a fault keeps the container from starting."""
        said = ""
        while True:
            images = [container["image"] for container in run.pod["spec"]["containers"]]
            wrong = next((image for image in images if image in self._pull_errors), None)
            if wrong is not None and said != self._pull_errors[wrong]:
                said = self._pull_errors[wrong]
                await self._report(run, pod_status.waiting(run.pod, "ImagePullBackOff", said))
            async with self._faults:
                if wrong in self._pull_errors or self._held(run.pod):
                    await self._faults.wait()
                elif self.nodes.get(run.node) is not None:
                    return
                else:
                    await self._faults.wait()

    async def _run_once(self, run: RunningPod, restarts: int, before: Ended | None) -> Ended:
        """One run of the first container, to its end."""
        container = run.pod["spec"]["containers"][0]
        run.ip = run.ip or self._address()
        probes: asyncio.Task[None] | None = None
        try:
            if self._processes:
                launch = await self._launch(run, container)
                assert run.directory is not None
                run.process = await PodProcess.start(launch, run.directory / "log")
                await self._report(
                    run, pod_status.running(run.pod, run.ip, ready=False, restarts=restarts, before=before)
                )
            # Only now: two reports on their way at once could arrive in either order.
            probes = asyncio.create_task(self._probe(run, container, restarts, before), name=f"probe-{run.name}")
            if run.process is not None:
                code = await run.process.exit_code()
            else:
                await run.exited.wait()
                code = 0
        finally:
            if probes is not None:
                probes.cancel()
                await asyncio.gather(probes, return_exceptions=True)
            run.ready = None
        run.process = None
        return run.ending or Ended.with_code(code)

    async def _launch(self, run: RunningPod, container: Object) -> Launch:
        if run.directory is None:
            run.directory = self._directory / f"{run.name}-{secrets.token_hex(4)}"
            run.directory.mkdir(mode=0o711)
        claim = workspace_claim(run.pod)
        program = self._programs.get(container["name"])
        files = PodFiles(self.api, run.pod, run.directory, self._volume)
        placed = Placed(
            pod=run.pod, ip=run.ip, env=environment(run.pod, container, run.ip, await files.secrets_of(container)),
            directory=run.directory, volume=await self._volume(run.pod, claim) if claim is not None else None,
            mounts=await files.mounts_of(container) if program is not None else {},
        )  # fmt: skip
        return (program or executor)(placed)

    async def _volume(self, pod: Object, claim: str) -> Path:
        namespace = pod["metadata"]["namespace"]
        found = await self.api.get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim}")
        volume = await self.api.get(f"/api/v1/persistentvolumes/{found['spec']['volumeName']}")
        directory = Path(volume["spec"]["hostPath"]["path"])
        self._volumes.add(directory)
        directory.parent.chmod(0o711)  # commands have another user
        return directory

    async def _probe(self, run: RunningPod, container: Object, restarts: int, before: Ended | None) -> None:
        """Reports Ready as the container's readiness probe says, for ever."""
        probe = container.get("readinessProbe", {})
        if not self._processes:
            await asyncio.sleep(self._ready_sec)
        while True:
            fine = not self._processes or (run.process is not None and await self._answers(run, container, probe))
            if fine != bool(run.ready):
                await self._report(
                    run, pod_status.running(run.pod, run.ip, ready=fine, restarts=restarts, before=before)
                )
            run.ready = fine
            await asyncio.sleep(float(probe.get("periodSeconds", 10)) if fine else _UNREADY_PROBE_SEC)

    async def _answers(self, run: RunningPod, container: Object, probe: Object) -> bool:
        how = probe.get("httpGet") or probe.get("tcpSocket")
        if how is None:
            return True
        port = how.get("port", PORT)
        for named in container.get("ports", []):
            if named.get("name") == port:
                port = named["containerPort"]
        try:
            if "tcpSocket" in probe:
                with socket.socket() as probing:
                    probing.setblocking(False)
                    async with asyncio.timeout(_PROBE_SEC):
                        await asyncio.get_running_loop().sock_connect(probing, (run.ip, port))
                return True
            async with self._http.get(f"http://{run.ip}:{port}{probe['httpGet'].get('path', '/')}") as answer:
                return answer.status < 400
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def _finish(self, run: RunningPod) -> None:
        """Ends the container within its grace and confirms the deletion; a lost node does so once it is back."""
        async with self._faults:
            await self._faults.wait_for(lambda: run.gone.is_set() or self.nodes.get(run.node) is not None)
        if run.process is not None:
            await run.process.end(0 if run.gone.is_set() else run.pod["metadata"].get("deletionGracePeriodSeconds", 30))
        if not run.gone.is_set():
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": run.pod["metadata"]["uid"]}}
            await self._tried(lambda: self.api.delete(run.path, **options))

    async def _report(self, run: RunningPod, status: Object) -> None:
        if self.nodes.get(run.node) is not None:
            await self._patch(run, status)

    async def _patch(self, run: RunningPod, status: Object) -> None:
        body = {"metadata": {"uid": run.pod["metadata"]["uid"]}, "status": status}
        await self._tried(lambda: self.api.patch(f"{run.path}/status", body, STRATEGIC))

    async def _tried(self, call: Callable[[], Awaitable[object]]) -> None:
        """The call, and again where the API server has no time for it. No error where the pod is gone or another's."""
        give_up = time.monotonic() + _TRY_SEC
        while True:
            try:
                async with self._calls:
                    await call()
                return
            except ApiError as why:
                others = why.status == 409 and "uid" in str(why).lower()  # else: changed meanwhile, to be tried again
                if why.status == 404 or others:
                    return
                if (why.status < 500 and why.status not in (409, 429)) or time.monotonic() > give_up:
                    raise
            except (aiohttp.ClientError, TimeoutError):
                if time.monotonic() > give_up:
                    raise
            await asyncio.sleep(_RETRY_SEC)

    def _address(self) -> str:
        """A loopback address of the pod's own, on which nobody listens."""
        for _ in range(1000):
            address = f"127.{128 + secrets.randbelow(127)}.{secrets.randbelow(256)}.{1 + secrets.randbelow(254)}"
            if address in self._addresses:
                continue
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((address, PORT))
                except OSError:
                    continue
            self._addresses.add(address)
            return address
        raise AssertionError("no free loopback address")

    def start(self) -> None:
        self._start(self._follow(), "node-agent-pods")
        self._start(self._heartbeats(), "node-agent-heartbeats")

    async def close(self) -> None:
        """Ends all processes and takes the nodes away. Raises what went wrong in the agent itself."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()
        for name in self.nodes:
            with contextlib.suppress(ApiError, aiohttp.ClientError, TimeoutError):
                await self.api.delete(f"/api/v1/nodes/{name}")
                await self.api.delete(f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{name}")
        for directory in self._volumes:
            shutil.rmtree(directory, ignore_errors=True)
        if self.errors:
            raise BaseExceptionGroup("the tests' node agent failed", self.errors)


async def _first(*works: Any) -> None:
    """Until one of them is over; the others are cancelled and waited for. An error of the first is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


@contextlib.asynccontextmanager
async def node_agent(
    api: KubeApi,
    version: str,
    *,
    processes: bool = True,
    programs: Mapping[str, Program] | None = None,
    ready_sec: float = 0.0,
) -> AsyncIterator[NodeAgent]:
    """An agent without nodes yet. `programs`: what to run for containers of that name, instead of the executor.
    `ready_sec`: without `processes`, how long a pod takes to be ready."""
    with run_directory("sojourn-node") as directory:
        directory.chmod(0o711)  # commands have another user
        agent = NodeAgent(
            api, version, directory, processes=processes, programs=programs or {}, ready_sec=ready_sec
        )  # fmt: skip
        try:
            agent.start()
            yield agent
        finally:
            await agent.close()
