"""A project's quota, over the HTTP interface: S33 and S34 of the threats.

SOJOURN_TEST_QUOTA_ROUNDS says how many rounds of two hundred creates there are (2)."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
from collections import Counter
from typing import Any, cast

from executor.wire import ExecRequest
from manager.config import ProjectPolicy
from manager.errors import QuotaExceeded
from manager.model import BindingState, PodState
from manager.providers.base import Provider
from manager.services.core import Services
from manager.services.tasks import TaskExecAnswer
from manager.store.base import Store
from tests.support.api import Api, api
from tests.support.memory_provider import MemoryProvider
from tests.support.world import ACME, SHOP, SMALL, principal, services_over, until, world

ROUNDS = int(os.environ.get("SOJOURN_TEST_QUOTA_ROUNDS", "2"))
TEN = ProjectPolicy(profiles=(SMALL.name,), concurrency=10)


class Count:
    """The most pods of the project that ever were there at once."""

    def __init__(self, provider: MemoryProvider) -> None:
        self._provider = provider
        self.most = 0

    async def look_forever(self) -> None:
        while True:
            pods = await self._provider.list()
            claimed = sum(pod.state is PodState.CLAIMED for pod in pods)
            self.most = max(self.most, claimed)
            await asyncio.sleep(0.001)


async def all_ended(surface: Api) -> bool:
    """Retires what there is: a start whose caller has hung up may only now be over."""
    for binding in await surface.world.store.list_bindings(ACME):
        await surface.call("DELETE", f"/sandbox/task/{binding.task_id}")
    quota = (await surface.call("GET", "/api/v1/quotas")).json["quotas"][0]
    return quota["slots_held"] == 0 and not surface.world.provider.claimed


async def test_two_hundred_creates_at_once_never_hold_more_than_the_limit() -> None:
    """S34"""
    async with api(projects={ACME: TEN}) as surface:
        count = Count(surface.world.provider)
        looking = asyncio.create_task(count.look_forever(), name="count-pods")
        for round_ in range(ROUNDS):
            calls = [asyncio.create_task(surface.exec(f"{round_}-{number}")) for number in range(200)]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            for call in calls[::7]:  # callers that hang up in the middle of it
                call.cancel()
            replies = await asyncio.gather(*calls, return_exceptions=True)
            codes = Counter(reply.code for reply in replies if not isinstance(reply, BaseException))
            assert set(codes) == {None, "quota_exceeded"}
            assert codes[None] <= 10
            quota = (await surface.call("GET", "/api/v1/quotas")).json["quotas"][0]
            assert quota["slots_held"] <= quota["slots_limit"] == 10
            await until(lambda: all_ended(surface), 60)
        looking.cancel()
        assert 0 < count.most <= 10


class Line:
    """One manager's way to what outlives it. While it is cut, nothing is answered that the manager asks: it is dead."""

    def __init__(self, to: Any) -> None:
        self._to, self._whole = to, asyncio.Event()
        self._whole.set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._to, name)
        if not inspect.iscoroutinefunction(found):
            return found

        async def call(*args: Any, **named: Any) -> Any:
            await self._whole.wait()
            answer = await found(*args, **named)
            await self._whole.wait()
            return answer

        return call

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()


async def test_managers_that_are_killed_in_the_middle_of_creates_let_nobody_pass_the_limit() -> None:
    """What they held is free once their pods are gone, and never before."""
    async with world(policies={ACME: TEN}, loops=True) as made:
        count = Count(made.provider)
        looking = asyncio.create_task(count.look_forever(), name="count-pods")

        def creates(services: Services, name: str, number: int) -> list[asyncio.Task[TaskExecAnswer]]:
            request = ExecRequest(command=["true"])
            return [
                asyncio.create_task(services.tasks.exec(principal(), f"{name}-{n}", request)) for n in range(number)
            ]

        async def settled() -> bool:
            bindings = await made.store.list_bindings(ACME)
            bound = {binding.pod for binding in bindings if binding.state is BindingState.BOUND}
            return len(bound) == len(bindings) and bound == {pod.name for pod in made.provider.claimed}

        async def retired() -> bool:
            for binding in await made.store.list_bindings(ACME):
                await made.services.sandboxes.retire(ACME, binding.task_id)
            return not made.provider.claimed and (await made.store.held(ACME)).slots == 0

        for round_ in range(ROUNDS):
            lines = Line(made.store), Line(made.provider)
            killed = services_over(cast(Store, lines[0]), cast(Provider, lines[1]), f"k{round_}", policies={ACME: TEN})
            await killed.start()
            theirs, ours = creates(killed, f"{round_}-k", 100), creates(made.services, f"{round_}-l", 100)
            calls = made.store.calls.count("begin_binding")
            after = random.randrange(200)
            await until(lambda: made.store.calls.count("begin_binding") >= calls + min(after, 20))  # noqa: B023
            for line in lines:
                line.cut()
            answers = await asyncio.gather(*ours, return_exceptions=True)
            assert all(isinstance(answer, TaskExecAnswer | QuotaExceeded) for answer in answers)
            made.store.offset_sec += killed.sandboxes.claim_sec + 1
            await until(settled)
            again = await asyncio.gather(*creates(made.services, f"{round_}-m", 20), return_exceptions=True)
            assert all(isinstance(answer, TaskExecAnswer | QuotaExceeded) for answer in again)
            assert (await made.store.held(ACME)).slots == len(made.provider.claimed) == 10
            for call in theirs:
                call.cancel()
            for line in lines:
                line.mend()  # as if it had only stood still
            await asyncio.gather(*theirs, return_exceptions=True)
            await killed.close()
            await until(retired)
        looking.cancel()
        assert count.most == 10


async def test_a_refused_create_says_how_much_is_held_and_when_to_come_again() -> None:
    async with api(projects={ACME: ProjectPolicy(profiles=(SMALL.name,), concurrency=1)}) as surface:
        assert (await surface.exec("first")).status == 200
        reply = await surface.exec("second")
        assert (reply.status, reply.code) == (429, "quota_exceeded")
        assert reply.json["error"]["details"].items() >= {"held": 1, "limit": 1}.items()
        assert 1 <= int(reply.headers["Retry-After"]) <= 60
        assert (await surface.exec("first")).status == 200  # who has a slot needs no other
        await surface.call("DELETE", "/sandbox/task/first")
        assert (await surface.exec("second")).status == 200


async def test_a_flood_of_one_project_is_refused_with_a_time_to_wait_and_holds_nobody_else_up() -> None:
    """S33: its requests are bounded by themselves; others are answered as before."""
    async with api(project_requests=5) as surface:
        go = asyncio.Event()

        async def hook(call: str) -> None:
            if call == "create":
                await go.wait()

        surface.world.provider.hook = hook
        waiting = [asyncio.create_task(surface.exec(f"t{number}")) for number in range(5)]
        await until(lambda: sum(surface.services.in_flight._of.values()) == 5)
        flood = await asyncio.gather(*(surface.call("GET", "/api/v1/quotas") for _ in range(50)))
        assert {(reply.status, reply.code, reply.headers["Retry-After"]) for reply in flood} == {
            (429, "rate_limited", "1")
        }
        for role in ("foreign", "sibling"):
            assert (await surface.call("GET", "/api/v1/quotas", role=role)).status == 200
        assert (await surface.call("GET", "/healthz", role=None)).status == 200
        go.set()
        assert {reply.status for reply in await asyncio.gather(*waiting)} == {200}
        assert (await surface.call("GET", "/api/v1/quotas")).status == 200
        assert surface.services.in_flight._of == {}


async def test_a_key_that_asks_faster_than_it_may_is_told_when_to_come_again_and_slows_nobody() -> None:
    """S33: two seconds' worth at once, then as many as its rate; another key and project have their own."""
    async with api(key_requests_per_sec=20) as surface:
        flood = await asyncio.gather(*(surface.call("GET", "/api/v1/quotas") for _ in range(200)))
        refused = [reply for reply in flood if reply.status != 200]
        assert len(flood) - len(refused) >= 40
        assert {(reply.status, reply.code) for reply in refused} <= {(429, "rate_limited")}
        assert all(1 <= int(reply.headers["Retry-After"]) <= 2 for reply in refused)
        for role in ("foreign", "sibling"):
            assert (await surface.call("GET", "/api/v1/quotas", role=role)).status == 200
        await asyncio.sleep(1)
        assert (await surface.call("GET", "/api/v1/quotas")).status == 200


async def test_a_project_sees_its_own_quota_and_no_other() -> None:
    async with api(projects={ACME: TEN}) as surface:
        await surface.exec("one")
        mine = (await surface.call("GET", "/api/v1/quotas")).json["quotas"]
        assert [(one["tenant"], one["project"], one["slots_held"], one["slots_limit"]) for one in mine] == [
            (ACME.tenant, ACME.project, 1, 10)
        ]
        foreign = (await surface.call("GET", "/api/v1/quotas", role="foreign")).json["quotas"]
        assert [(one["tenant"], one["slots_held"]) for one in foreign] == [("other", 0)]


async def test_after_the_store_was_emptied_running_sandboxes_are_counted_before_any_is_started() -> None:
    """S34, F17"""
    async with world(policies={ACME: ProjectPolicy(profiles=(SMALL.name,), concurrency=2)}) as made:
        await made.run("a")
        await made.run("b")
        made.store.forget_everything()  # FLUSHALL
        answers = await asyncio.gather(*(made.run(f"new {number}") for number in range(20)), return_exceptions=True)
        assert all(isinstance(answer, QuotaExceeded) for answer in answers)
        assert (await made.store.held(ACME)).slots == 2
        assert len(made.provider.pods) == 2
        assert (await made.run("a")).facts.provisioned == "bound"
        await made.run("theirs", owner=SHOP)


async def test_who_finds_the_store_empty_together_looks_once() -> None:
    async with world() as made:
        made.store.forget_everything()
        made.store.calls.clear()
        await asyncio.gather(*(made.run(f"t{number}") for number in range(10)))
        assert made.store.calls.count("settle") == 1
