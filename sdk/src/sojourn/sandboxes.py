"""Long-lived sandboxes: made once, used by their id until they are ended or their time is over."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

from sojourn.paths import piece, sandbox_path
from sojourn.processes import new_process_id
from sojourn.tasks import AsyncPlace
from sojourn.transport import Transport, decode
from sojourn.types import LongLivedSandbox, LongLivedSandboxList, Snapshot, SnapshotList

_ALL: Final = "/sandbox/sandboxes/v1"
_SNAPSHOTS: Final = "/sandbox/snapshots/v1"
_PAGE: Final = 200
WAIT_SEC: Final = 60.0
_MARGIN_SEC: Final = 60.0  # a call may take so much longer than the server was asked to wait


class AsyncSandbox(AsyncPlace):
    """A handle on one long-lived sandbox. Making the handle calls nobody."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        super().__init__(transport, sandbox_id, sandbox_path(sandbox_id), {})

    async def info(self) -> LongLivedSandbox:
        """Its state, pod and lease. Raises NotFound."""
        answer = await self._transport.call("GET", self._path, retry="safe")
        return decode(answer.body, LongLivedSandbox)

    async def change(
        self,
        *,
        name: str | None = None,
        metadata: Mapping[str, str] | None = None,
        autostop_sec: int | None = None,
        ttl_sec: int | None = None,
        autostart: bool | None = None,
    ) -> LongLivedSandbox:
        """What is given is different from now on. `ttl_sec` counts from its creation, `metadata` replaces all of it."""
        given = {
            "name": name, "metadata": None if metadata is None else dict(metadata), "autostop_sec": autostop_sec,
            "ttl_sec": ttl_sec, "autostart": autostart,
        }  # fmt: skip
        body = {field: value for field, value in given.items() if value is not None}
        answer = await self._transport.call("PATCH", self._path, retry="safe", json=body)
        return decode(answer.body, LongLivedSandbox)

    async def stop(self, *, wait_sec: float = WAIT_SEC) -> LongLivedSandbox:
        """Keeps its workspace and gives pod and slot back. No error where it is stopped.

        After `wait_sec` the state may still be `stopping`. Where its workspace cannot be kept it runs on."""
        return await self._move("stop", wait_sec)

    async def resume(self, *, wait_sec: float = WAIT_SEC) -> LongLivedSandbox:
        """Starts it where it is stopped or has failed: a slot, a pod, and its workspace as it was last kept.

        After `wait_sec` the state may still be `starting`. Raises QuotaExceeded; then it stays stopped."""
        return await self._move("start", wait_sec)

    async def _move(self, what: str, wait_sec: float) -> LongLivedSandbox:
        path = f"{self._path}/{what}?wait_sec={wait_sec:.0f}"
        answer = await self._transport.call("POST", path, retry="safe", deadline_sec=wait_sec + _MARGIN_SEC)
        return decode(answer.body, LongLivedSandbox)

    async def snapshot(self, name: str = "", *, wait_sec: float = WAIT_SEC) -> Snapshot:
        """What is in its workspace now, for good. It runs on."""
        answer = await self._transport.call(
            "POST", f"{self._path}/snapshots", retry="unsent", json={"name": name}, deadline_sec=wait_sec + _MARGIN_SEC
        )
        return decode(answer.body, Snapshot)

    async def fork(
        self,
        *,
        name: str = "",
        autostop_sec: int | None = None,
        ttl_sec: int | None = None,
        autostart: bool = False,
        env: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        wait_sec: float = WAIT_SEC,
    ) -> AsyncSandbox:
        """A new sandbox with what is in this one's workspace now. This one runs on."""
        body = _asked(
            name=name, autostop_sec=autostop_sec, ttl_sec=ttl_sec, autostart=autostart, env=env, metadata=metadata,
            wait_sec=wait_sec,
        )  # fmt: skip
        return await _made(self._transport, f"{self._path}/fork", body, wait_sec)

    async def delete(self, *, purge: bool = False, force: bool = False, wait_sec: float = WAIT_SEC) -> None:
        """Ends it for good. No error where that was done already; NotFound where it never was.

        `purge`: nothing of it is kept. `force`: also where its workspace cannot be kept."""
        query = f"?wait_sec={wait_sec:.0f}" + ("&purge=true" if purge else "") + ("&force=true" if force else "")
        await self._transport.call("DELETE", self._path + query, retry="safe", deadline_sec=wait_sec + _MARGIN_SEC)


class AsyncSandboxes:
    """The project's long-lived sandboxes."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(
        self,
        *,
        profile: str | None = None,
        autostop_sec: int | None = None,
        ttl_sec: int | None = None,
        autostart: bool = False,
        name: str = "",
        env: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        source: Mapping[str, str] | None = None,
        wait_sec: float = WAIT_SEC,
    ) -> AsyncSandbox:
        """A new one, empty or with what is in the source: running, or after `wait_sec` perhaps still being made,
        which its first command then waits for.

        `source` is `{"archive_url": "https://..."}` (and `sha256`), `{"prefix": "s3://bucket/path/"}` or
        `{"snapshot_id": ...}`. It is stopped when it was quiet for `autostop_sec`, and ended `ttl_sec` after its
        creation. Raises QuotaExceeded, UnknownProfile, and what source and data plane cannot give."""
        body = _asked(
            name=name, autostop_sec=autostop_sec, ttl_sec=ttl_sec, autostart=autostart, env=env, metadata=metadata,
            wait_sec=wait_sec,
        )  # fmt: skip
        if profile is not None:
            body["profile"] = profile
        if source is not None:
            body["source"] = dict(source)
        return await _made(self._transport, _ALL, body, wait_sec)

    async def snapshots(self) -> list[Snapshot]:
        """The project's snapshots, those of destroyed sandboxes' last content too."""
        found: list[Snapshot] = []
        query = {"limit": str(_PAGE)}
        while True:
            answer = await self._transport.call("GET", _SNAPSHOTS, retry="safe", params=query)
            page = decode(answer.body, SnapshotList)
            found += page.snapshots
            if page.next is None:
                return found
            query["after"] = page.next

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """Raises NotFound. What other snapshots and sandboxes share with it stays."""
        await self._transport.call("DELETE", f"{_SNAPSHOTS}/{piece(snapshot_id)}", retry="unsent")

    async def list(self, *, state: str | None = None, name: str | None = None) -> list[LongLivedSandbox]:
        """All of them but destroyed ones, unless `state` asks for those."""
        return [one async for one in self.iterate(state=state, name=name)]

    async def iterate(
        self, *, state: str | None = None, name: str | None = None
    ) -> AsyncGenerator[LongLivedSandbox, None]:
        """The same, page by page."""
        query: dict[str, str] = {"limit": str(_PAGE)}
        query |= {key: value for key, value in (("state", state), ("name", name)) if value is not None}
        while True:
            answer = await self._transport.call("GET", _ALL, retry="safe", params=query)
            page = decode(answer.body, LongLivedSandboxList)
            for one in page.sandboxes:
                yield one
            if page.next is None:
                return
            query["after"] = page.next


def _asked(**given: Any) -> dict[str, Any]:
    """The body of a call that makes a sandbox."""
    return {
        field: dict(value) if isinstance(value, Mapping) else value
        for field, value in given.items()
        if value is not None
    }


async def _made(transport: Transport, path: str, body: dict[str, Any], wait_sec: float) -> AsyncSandbox:
    """Once, however often the call has to be sent."""
    answer = await transport.call(
        "POST", path, retry="safe", json=body, headers={"Idempotency-Key": new_process_id()},
        deadline_sec=wait_sec + _MARGIN_SEC,
    )  # fmt: skip
    return AsyncSandbox(transport, decode(answer.body, LongLivedSandbox).sandbox_id)
