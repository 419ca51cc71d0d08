"""Loading the application: once for all who wait, and again after it failed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from executor import mount
from executor.errors import ExecutorError, RateLimited


class FakeApplication:
    closed = 0

    async def close(self) -> None:
        self.closed += 1

    async def drain(self, seconds: float) -> None: ...


def core() -> Any:
    return SimpleNamespace(lease=SimpleNamespace(on_claim=None))


async def test_a_failed_load_is_told_as_a_typed_error_and_the_next_call_tries_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[type[Exception] | None] = [MemoryError, ImportError, RuntimeError, None]
    application = FakeApplication()

    async def open_application(_core: Any) -> FakeApplication:
        return application

    def load() -> Any:
        kind = tries.pop(0)
        if kind is not None:
            raise kind("none left")
        return SimpleNamespace(open_application=open_application)

    monkeypatch.setattr(mount, "_import_application", load)
    one = mount.Mount(core())
    for _ in range(3):
        first, second = one.load(), one.load()
        assert first is second
        with pytest.raises(RateLimited):
            await first
        assert one.application is None
    opened: object = await one.load()
    assert opened is application
    await one.close()
    assert application.closed == 1


async def test_a_failure_that_nobody_thought_of_is_logged_and_answered_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> Any:
        raise AttributeError("the program was replaced under a running pod")

    monkeypatch.setattr(mount, "_import_application", load)
    one = mount.Mount(core())
    with pytest.raises(ExecutorError) as failed:
        await one.load()
    assert (failed.value.code, failed.value.status) == ("internal", 500)
    assert "mount_failed" in caplog.text
    await one.close()


async def test_a_claim_loads_it_a_moment_later_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = 0
    loaded = asyncio.Event()
    application = FakeApplication()

    async def open_application(_core: Any) -> FakeApplication:
        nonlocal loads
        loads += 1
        loaded.set()
        return application

    monkeypatch.setattr(mount, "_import_application", lambda: SimpleNamespace(open_application=open_application))
    monkeypatch.setattr(mount, "CALM_SEC", 0.0)
    owner = core()
    one = mount.Mount(owner)
    owner.lease.on_claim()
    owner.lease.on_claim()
    async with asyncio.timeout(30):
        await loaded.wait()
        await one.load()
    owner.lease.on_claim()
    await one.close()
    assert (loads, application.closed) == (1, 1)
