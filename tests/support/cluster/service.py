"""Plays kube-proxy for one Service, on a port of this machine: NOT a cluster's network.

The tests' pods have loopback addresses, which the API server takes for no Service's endpoints. So this does what the
control plane and kube-proxy do: a new connection goes to a pod that the Service selects, that is ready and is not being
deleted; connections that are open stay where they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp

from tests.support.cluster.api import ApiError, KubeApi
from tests.support.cluster.waiting import is_ready, until

Object = dict[str, Any]
_CHUNK_BYTES: Final = 1 << 16
_AGAIN_SEC: Final = 0.2
_ACCEPT_TURNS: Final = 20  # of the loop, by which a connection that was just accepted has come to `_connected`


class PlayedService:
    """Open one with `played`. `address`: where it listens, as host:port."""

    def __init__(self, api: KubeApi, service: Object) -> None:
        self._api, self._service = api, service
        self._pods: dict[str, Object] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    @property
    def endpoints(self) -> list[tuple[str, int]]:
        """Where a new connection may go."""
        return [
            (pod["status"]["podIP"], self._port(pod))
            for pod in self._pods.values()
            if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]
        ]

    async def some(self, number: int = 1) -> None:
        await until(lambda: len(self.endpoints) >= number, f"{self.address} has {number} endpoints")

    def _port(self, pod: Object) -> int:
        wanted = self._service["spec"]["ports"][0]["targetPort"]
        for container in pod["spec"]["containers"]:
            for port in container.get("ports", []):
                if wanted in (port.get("name"), port["containerPort"]):
                    return int(port["containerPort"])
        raise AssertionError(f"no container has the port {wanted}")

    async def _follow(self) -> None:
        path = f"/api/v1/namespaces/{self._service['metadata']['namespace']}/pods"
        selector = ",".join(f"{key}={value}" for key, value in self._service["spec"]["selector"].items())
        while True:
            with contextlib.suppress(ApiError, aiohttp.ClientError, TimeoutError):
                listed = await self._api.get(path, labelSelector=selector)
                self._pods = {pod["metadata"]["uid"]: pod for pod in listed["items"]}
                version = listed["metadata"]["resourceVersion"]
                async for kind, pod in self._api.watch(path, version, labelSelector=selector):
                    if kind == "ERROR":
                        break
                    self._pods[pod["metadata"]["uid"]] = pod
                    if kind == "DELETED":
                        del self._pods[pod["metadata"]["uid"]]
            await asyncio.sleep(_AGAIN_SEC)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._passed_on(reader, writer), name=f"connection-to-{self.address}")
        self._tasks.add(task)

        def over(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            writer.close()  # also where it was cancelled before it began

        task.add_done_callback(over)

    async def _passed_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            host, port = random.choice(self.endpoints)
            to_reader, to_writer = await asyncio.open_connection(host, port)
            writers.append(to_writer)
            await asyncio.gather(_pumped(reader, to_writer), _pumped(to_reader, writer))
        except (OSError, IndexError):
            pass  # refused, reset, or nobody there: the caller sees a connection's end
        finally:
            for each in writers:
                each.close()
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    async def close(self) -> None:
        """Once nothing listens any more."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)


async def _pumped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


@contextlib.asynccontextmanager
async def played(api: KubeApi, service: Object) -> AsyncIterator[PlayedService]:
    """`service`: as the chart renders it, or as the API server has it."""
    found = PlayedService(api, service)
    server = await asyncio.start_server(found._connected, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    found.address = f"{host}:{port}"
    following = asyncio.create_task(found._follow(), name=f"service-{service['metadata']['name']}")
    try:
        yield found
    finally:
        # What is being accepted as a server closes is never closed by Python 3.11: it is let in first, and no other.
        for listening in server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        for _ in range(_ACCEPT_TURNS):
            await asyncio.sleep(0)
        server.close()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await found.close()
        await server.wait_closed()
