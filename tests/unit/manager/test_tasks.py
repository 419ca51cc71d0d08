"""A task session: run once, answer from the right pod, and say what became of the last one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from executor.wire import ExecRequest, Exit, Heartbeat, OutputFrame, ProcessInfo, Started
from manager.errors import (
    ExecutorRefused,
    ExecutorUnreachable,
    IdempotencyMismatch,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    SandboxGone,
    SandboxReplaced,
    StoreUnavailable,
)
from manager.model import NOTE_TOKEN, BindingState, PodEnded
from manager.services.idempotency import process_id
from tests.support.world import ACME, SHOP, World, principal, running, services_over, until, world

ME = principal()


@pytest.fixture
async def here() -> AsyncIterator[World]:
    async with world() as made:
        yield made


async def call(
    here: World,
    method: str,
    path: str,
    query: str = "",
    body: AsyncIterator[bytes] | bytes | None = None,
    **kwargs: str,
) -> bytes:
    """The body of a forwarded call on task `t`."""
    async with here.services.tasks.forward(ME, "t", method, path, query, {}, body, **kwargs) as answer:  # type: ignore[arg-type]
        return b"".join([chunk async for chunk in answer.response.body])


# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_command_answers_with_its_output_and_where_it_ran(here: World) -> None:
    answer = await here.run("t", "echo", "hello")
    binding = await here.binding("t")
    assert answer.result.stdout == "hello"
    assert (answer.facts.sandbox_id, answer.facts.pod_id) == (binding.sandbox_id, binding.pod)
    assert (answer.facts.provisioned, answer.facts.workspace) == ("cold", "fresh")
    again = await here.run("t", "echo", "again")
    assert (again.facts.provisioned, again.facts.workspace, again.facts.previous) == ("bound", "kept", None)


async def test_a_streamed_command_ends_with_its_exit(here: World) -> None:
    request = ExecRequest(command=["echo", "hello"])
    async with here.services.tasks.stream(ME, "t", request) as stream:
        events = [event async for event in stream.events if not isinstance(event, Heartbeat)]
    assert [type(event) for event in events] == [Started, OutputFrame, Exit]
    assert isinstance(events[1], OutputFrame)
    assert events[1].data == b"hello"
    assert stream.facts.provisioned == "cold"
    assert here.services.leases.operations(stream.facts.sandbox_id) == 0


async def test_a_stream_counts_as_work_until_it_is_left(here: World) -> None:
    async with here.services.tasks.stream(ME, "t", ExecRequest(command=["wait"])) as stream:
        async for event in stream.events:
            assert isinstance(event, Started)
            break
        assert here.services.leases.operations(stream.facts.sandbox_id) == 1
    assert here.services.leases.operations(stream.facts.sandbox_id) == 0


async def test_a_request_that_cannot_be_run_provides_no_sandbox(here: World) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await here.services.tasks.exec(ME, "t", ExecRequest(command=["a\0b"]))
    assert refused.value.details == {"field": "command"}
    assert here.provider.pods == []


# ── pods that end ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_pod_found_dead_before_the_command_was_sent_is_replaced_and_the_command_runs(here: World) -> None:
    first = await here.run("t")
    await here.provider.lose_silently(first.facts.pod_id)
    answer = await here.run("t", "echo", "x", key="k1")
    assert answer.result.stdout == "x"
    assert answer.facts.pod_id != first.facts.pod_id
    assert answer.facts.workspace == "fresh"
    assert answer.facts.previous is not None
    assert answer.facts.previous.reason == "lost"


async def test_a_streamed_command_also_gets_another_pod(here: World) -> None:
    first = await here.run("t")
    await here.provider.lose_silently(first.facts.pod_id)
    async with here.services.tasks.stream(ME, "t", ExecRequest(command=["echo", "x"])) as stream:
        assert isinstance([event async for event in stream.events][-1], Exit)
    assert stream.facts.pod_id != first.facts.pod_id


async def test_an_executor_that_is_away_while_its_pod_lives_is_unreachable_and_no_second_pod_is_made(
    here: World,
) -> None:
    await here.run("t")
    await (await here.executor("t")).stop()
    with pytest.raises(ExecutorUnreachable):
        await here.run("t")
    assert len(here.provider.pods) == 1


async def test_a_pod_that_ends_under_a_command_is_said_to_be_gone_with_the_id_and_nothing_is_run_again(
    here: World,
) -> None:
    """F21"""
    await here.run("t")
    executor = await here.executor("t")
    command = asyncio.create_task(here.run("t", "wait", key="k1"))
    await executor.waiting.wait()
    await here.provider.lose_silently(executor.pod)
    with pytest.raises(SandboxGone) as lost:
        await command
    assert lost.value.details["id"] == process_id(ACME, "t", "k1")
    assert lost.value.details["reason"] == "lost"
    with pytest.raises(OutcomeUnknown):
        await here.run("t", "wait", key="k1")
    assert [len(one.runs) for one in here.provider.executors.values()] == [2, 0]


async def test_a_stream_whose_pod_ends_is_told_that_it_is_gone(here: World) -> None:
    async with here.services.tasks.stream(ME, "t", ExecRequest(command=["wait"])) as stream:
        assert isinstance(await anext(stream.events), Started)
        await here.provider.lose_silently(stream.facts.pod_id)
        with pytest.raises(SandboxGone) as lost:
            await anext(stream.events)
    assert (lost.value.details["id"], lost.value.details["reason"]) == (stream.process_id, "lost")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_container_that_ends_before_its_node_tells_of_it_is_waited_for_to_say_why(
    here: World, streamed: bool
) -> None:
    """F21: the connection breaks first, the reason comes later."""
    await here.run("t")
    executor = await here.executor("t")
    asked = asyncio.Event()

    async def told(call: str) -> None:
        if call == "get":
            asked.set()

    async def command() -> None:
        if not streamed:
            await here.run("t", "wait")
        async with here.services.tasks.stream(ME, "t", ExecRequest(command=["wait"])) as stream:
            async for _ in stream.events:
                pass

    running = asyncio.create_task(command())
    await executor.waiting.wait()
    here.provider.hook = told
    await executor.stop()
    async with asyncio.timeout(60):
        await asked.wait()  # the pod is there, and alive as far as anybody can tell
    (pod,) = here.provider.pods
    await here.provider.lose(executor.pod, "oom")
    here.services.watches["here"].drop(pod, "oom")  # as the watch tells it
    with pytest.raises(SandboxGone) as lost:
        await running
    assert lost.value.details["reason"] == "oom"
    assert (await here.run("t")).facts.previous is not None


async def test_a_command_whose_connection_broke_in_a_pod_that_lives_stays_unknown(here: World) -> None:
    await here.run("t")
    executor = await here.executor("t")
    running = asyncio.create_task(here.run("t", "wait"))
    await executor.waiting.wait()
    await executor.stop()
    with pytest.raises(OutcomeUnknown):
        await running
    assert len(here.provider.pods) == 1


async def test_an_answer_from_a_pod_whose_sandbox_was_ended_is_refused(here: World) -> None:
    await here.run("t")
    executor = await here.executor("t")
    bound = here.services.sandboxes.bound_of(await here.binding("t"))

    async def moved() -> None:
        # The binding ends between the request and the answer; the pod, a liar, answers all the same.
        await here.store.end_binding(bound.binding, PodEnded(reason="expired", at=1.0))
        here.services.ended.add(executor.pod, PodEnded(reason="expired", at=1.0))

    executor.before_exec = moved
    with pytest.raises(SandboxGone) as refused:
        await here.run("t", "echo", "forged")
    assert refused.value.details["reason"] == "expired"
    assert refused.value.details["at"] == "1970-01-01T00:00:01.000Z"
    assert here.services.tasks.stale_results_rejected == 1


async def test_a_pod_that_answers_at_anothers_address_is_not_believed(here: World) -> None:
    await here.run("t")
    await here.run("u")
    executor, other = await here.executor("t"), await here.executor("u")
    executor.pod = other.pod  # it now refuses the name it is called by
    with pytest.raises(ExecutorUnreachable):
        await here.run("t")
    assert len(here.provider.pods) == 2


# ── run once ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_fifty_calls_with_one_key_run_once_and_answer_the_same_also_through_two_managers(here: World) -> None:
    async with running(services_over(here.store, here.provider, "m2")) as other:
        request = ExecRequest(command=["echo", "once"])
        both = [here.services, other] * 25
        answers = await asyncio.gather(
            *(services.tasks.exec(ME, "t", request, idempotency_key="k1") for services in both)
        )
    assert {answer.result.id for answer in answers} == {process_id(ACME, "t", "k1")}
    assert len((await here.executor("t")).runs) == 1


async def test_the_same_key_with_another_body_is_a_mismatch(here: World) -> None:
    await here.run("t", "echo", "one", key="k1")
    with pytest.raises((IdempotencyMismatch, ExecutorRefused)) as refused:
        await here.run("t", "echo", "two", key="k1")
    assert (refused.value.code, refused.value.status) == ("idempotency_mismatch", 422)
    assert (await here.executor("t")).commands == [["echo", "one"]]


async def test_in_a_later_pod_the_mark_is_made_before_the_command_runs(here: World) -> None:
    await here.run("t", key="first")
    await here.services.sandboxes.retire(ACME, "t")
    await here.run("t", "echo", "two", key="second")
    with pytest.raises(OutcomeUnknown):
        await here.run("t", key="first")
    with pytest.raises(IdempotencyMismatch):
        await here.run("t", "echo", "three", key="second")
    assert (await here.executor("t")).commands == [["echo", "two"]]
    assert (await here.run("t", "echo", "two", key="second")).result.stdout == "two"


async def test_a_key_older_than_the_outcome_is_kept_is_not_run_again(here: World) -> None:
    await here.run("t", "echo", "one", key="k1")
    await here.services.marks.flush()
    record = here.store._records[ACME, "t"]
    record.binding = msgspec.structs.replace(record.binding, created_at=record.binding.created_at - 4000)
    mark_key, mark = next(iter(here.store._marks.items()))
    pod, at = mark.pod.split(" ")
    here.store._marks[mark_key] = msgspec.structs.replace(mark, pod=f"{pod} {float(at) - 4000:.0f}")
    executor = await here.executor("t")
    executor._outcomes.clear()  # as after its hour
    here.services.sandboxes.invalidate(record.binding)
    with pytest.raises(OutcomeUnknown):
        await here.run("t", "echo", "one", key="k1")
    assert len(executor.runs) == 1


async def test_the_first_pods_commands_are_marked_behind_their_backs_many_at_once(here: World) -> None:
    await asyncio.gather(*(here.run("t", "echo", str(n), key=f"k{n}") for n in range(50)))
    assert "mark" not in here.store.calls
    await here.services.marks.flush()
    assert here.store.calls.count("mark_many") == 1
    assert len(here.store._marks) == 50


async def test_while_the_store_is_away_a_keyed_command_of_a_bound_task_runs_and_is_marked_later(here: World) -> None:
    await here.run("t")
    here.store.down = True
    assert (await here.run("t", "echo", "x", key="k1")).result.stdout == "x"
    assert (await here.run("t", "echo", "x", key="k1")).result.stdout == "x"
    with pytest.raises(StoreUnavailable):
        await here.services.marks.flush()
    here.store.down = False
    await here.services.marks.flush()
    assert len(here.store._marks) == 1
    assert len((await here.executor("t")).runs) == 2  # the one without a key, and this one once


async def test_a_key_whose_mark_still_waits_is_known_to_be_used_when_its_pod_has_ended(here: World) -> None:
    await here.run("t", "echo", "x", key="k1")
    assert here.store._marks == {}
    await here.services.sandboxes.retire(ACME, "t")
    with pytest.raises(OutcomeUnknown):
        await here.run("t", "echo", "x", key="k1")
    assert sum(len(executor.runs) for executor in here.provider.executors.values()) == 1


async def test_when_too_many_marks_wait_keyed_commands_wait_for_the_store_too(here: World) -> None:
    here.services.marks._most = 1
    await here.run("t", key="k1")
    here.store.down = True
    with pytest.raises(StoreUnavailable):
        await here.run("t", key="k2")
    here.store.down = False
    assert len((await here.executor("t")).runs) == 1


async def test_marks_are_made_before_a_manager_ends_and_after_an_outage_by_themselves() -> None:
    async with world(loops=True) as here:
        await here.run("t")
        here.store.down = True
        await here.run("t", key="k1")
        here.store.down = False
        await until(lambda: len(here.store._marks) == 1)
        await here.run("t", key="k2")
    assert len(here.store._marks) == 2


async def test_keys_of_two_owners_and_of_two_tasks_are_independent(here: World) -> None:
    ids = {
        (await here.run("t", "echo", "a", key="k")).result.id,
        (await here.run("t", "echo", "b", owner=SHOP, key="k")).result.id,
        (await here.run("u", "echo", "c", key="k")).result.id,
    }
    assert len(ids) == 3
    assert not any("k1" in one or "acme" in one for one in ids)


@pytest.mark.parametrize("key", ["", "x" * 256, "a\nb", "a\0b"])
async def test_a_bad_key_is_refused(here: World, key: str) -> None:
    with pytest.raises(InvalidRequest):
        await here.run("t", key=key)


# ── If-Sandbox-Pod ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_expected_pod_is_used_or_nothing_is_run(here: World) -> None:
    first = await here.run("t")
    request = ExecRequest(command=["echo", "x"])
    tasks = here.services.tasks
    assert (await tasks.exec(ME, "t", request, pod_expected=first.facts.pod_id)).result.stdout == "x"
    with pytest.raises(SandboxReplaced):
        await tasks.exec(ME, "t", request, pod_expected="pother")
    with pytest.raises(SandboxReplaced):
        await tasks.exec(ME, "never used", request, pod_expected=first.facts.pod_id)
    await tasks.retire(ACME, "t")
    with pytest.raises(SandboxGone):
        await tasks.exec(ME, "t", request, pod_expected=first.facts.pod_id)
    assert here.provider.pods == []
    await here.run("t")
    with pytest.raises(SandboxReplaced):
        await call(here, "GET", "/v1/usage", pod_expected=first.facts.pod_id)


# ── processes, files, usage ─────────────────────────────────────────────────────────────────────────────────────────


async def test_files_go_through_both_ways_with_the_headers_that_belong_to_them(here: World) -> None:
    async def content() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 100_000

    await call(here, "PUT", "/v1/files", "path=a%20b", content())
    assert (await here.executor("t")).files == {"a b": b"x" * 300_000}
    async with here.services.tasks.forward(ME, "t", "GET", "/v1/files", "path=a%20b", {}, None) as answer:
        body = b"".join([chunk async for chunk in answer.response.body])
    assert body == b"x" * 300_000
    assert set(answer.response.headers) == {"Content-Length", "Content-Type", "ETag"}


async def test_reading_provides_nothing(here: World) -> None:
    for method, path in [("GET", "/v1/usage"), ("GET", "/v1/files"), ("HEAD", "/v1/files"), ("DELETE", "/v1/files")]:
        with pytest.raises(NotFound):
            await call(here, method, path, "path=a")
    with pytest.raises(NotFound):
        await call(here, "POST", "/v1/processes/abc/signal", body=b"{}")
    assert here.provider.pods == []


async def test_what_was_in_a_pod_that_ended_is_gone_with_reason_and_time(here: World) -> None:
    await here.run("t")
    await here.services.tasks.retire(ACME, "t")
    for method, path in [
        ("GET", "/v1/processes/abc"), ("GET", "/v1/files"), ("DELETE", "/v1/files"), ("POST", "/v1/processes/a/stdin"),
    ]:  # fmt: skip
        with pytest.raises(SandboxGone) as gone:
            await call(here, method, path, "path=a")
        assert gone.value.details["reason"] == "destroyed"
        assert gone.value.details["at"].endswith("Z")
    assert here.provider.pods == []
    await call(here, "PUT", "/v1/files", "path=a", b"x")
    assert len(here.provider.pods) == 1


async def test_a_read_that_finds_its_pod_dead_is_gone_too(here: World) -> None:
    first = await here.run("t")
    await here.provider.lose_silently(first.facts.pod_id)
    with pytest.raises(SandboxGone):
        await call(here, "GET", "/v1/usage")
    assert (await here.binding("t")).state is BindingState.ENDED


async def test_errors_of_the_executor_keep_their_code(here: World) -> None:
    await here.run("t")
    with pytest.raises(ExecutorRefused) as refused:
        await call(here, "GET", "/v1/files", "path=none")
    assert (refused.value.code, refused.value.status) == ("file_not_found", 404)


async def test_a_process_is_started_once_for_one_key(here: World) -> None:
    body = msgspec.json.encode({"command": ["wait"]})
    first = await call(here, "POST", "/v1/processes", body=body, idempotency_key="k1")
    again = await call(here, "POST", "/v1/processes", body=body, idempotency_key="k1")
    assert msgspec.json.decode(first, type=ProcessInfo).id == process_id(ACME, "t", "k1")
    assert first == again
    executor = await here.executor("t")
    assert len(executor.runs) == 1
    executor.release()


@pytest.mark.parametrize("body", [b"", b"{", b'{"command": 1}', b'{"command": ["x"], "else": 1}', b"[" * 100_000])
async def test_a_body_that_is_no_process_is_refused_and_provides_nothing(here: World, body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        await call(here, "POST", "/v1/processes", body=body)
    assert here.provider.pods == []


@pytest.mark.parametrize("path", ["/v1/bind", "/v1/lease", "/v1/exec", "/metrics", "/v1", "/v1/", "v1/files"])
async def test_calls_between_us_and_the_executor_are_not_forwarded(here: World, path: str) -> None:
    await here.run("t")
    with pytest.raises(NotFound):
        await call(here, "GET", path)


async def test_reading_output_renews_nothing_and_writing_a_file_does(here: World) -> None:
    await here.run("t")
    await here.services.leases.flush()
    before = here.services.leases.flushes
    with pytest.raises(ExecutorRefused):
        await call(here, "GET", "/v1/processes/abc")
    await call(here, "GET", "/v1/usage")
    await here.services.leases.flush()
    assert here.services.leases.flushes == before
    await call(here, "PUT", "/v1/files", "path=a", b"x")
    await here.services.leases.flush()
    assert here.services.leases.flushes == before + 1


# ── the task itself ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_task_shows_what_it_is_doing(here: World) -> None:
    tasks = here.services.tasks
    with pytest.raises(NotFound):
        await tasks.get(ME, "t")
    await here.run("t")
    view = await tasks.get(ME, "t")
    assert (view.stage, view.profile, view.target) == ("idle", "small", "here")
    assert view.lease is not None
    command = asyncio.create_task(here.run("t", "wait"))
    executor = await here.executor("t")
    await executor.waiting.wait()
    assert (await tasks.get(ME, "t")).stage == "active"
    executor.release()
    await command
    executor.running = 1
    assert (await tasks.get(ME, "t")).stage == "active"
    await tasks.retire(ACME, "t")
    view = await tasks.get(ME, "t")
    assert (view.stage, view.pod_id, view.lease) == ("reclaimed", None, None)
    assert view.ended is not None
    assert view.ended.reason == "destroyed"


async def test_a_project_sees_its_own_tasks_only(here: World) -> None:
    for task_id in ("b", "a"):
        await here.run(task_id)
    await here.run("c", owner=SHOP)
    tasks = here.services.tasks
    assert [view.task_id for view in await tasks.list(ME)] == ["b", "a"]
    with pytest.raises(NotFound):
        await tasks.get(ME, "c")


async def test_no_secret_of_ours_is_in_a_pods_marks(here: World) -> None:
    await here.run("t", key="k1")
    (pod,) = here.provider.pods
    token = await here.binding("t")
    assert pod.annotations[NOTE_TOKEN] == token.token
    told = msgspec.json.encode((pod.labels, pod.annotations, (await here.executor("t")).bound)).decode()
    assert "a secret of the tests" not in told
    assert "Bearer" not in told


async def test_two_hundred_commands_at_once_all_answer(here: World) -> None:
    answers = await asyncio.gather(*(here.run(f"t{n % 10}", "echo", str(n)) for n in range(200)))
    assert [answer.result.stdout for answer in answers] == [str(n) for n in range(200)]
    assert len(here.provider.pods) == 10
    await until(lambda: here.services.leases.operations_total == 0)
