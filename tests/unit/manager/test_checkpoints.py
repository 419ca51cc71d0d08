"""What checkpoints promise, over object storage in memory and pods that are dictionaries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import msgspec
import pytest

from manager.errors import ExecutorUnreachable, ManagerError, NotFound, StoreUnavailable, TooLarge
from manager.executor_client import PodRef
from manager.model import Owner
from manager.services.checkpoints import MANIFEST_BYTES, Checkpoints, NotSaved
from manager.services.manifests import LAYERS, MAX_LAYERS, Layer, Manifest, save_prefix
from manager.services.sweeping import Sweeper
from manager.store.blobs import CHUNK_BYTES, Blob, ObjectDamaged
from manager.store.objects import Object, ObjectInfo, Objects
from tests.support.layer_pods import Files, LayerPods, Stream
from tests.support.memory_objects import MemoryCache, memory_objects

ACME, SHOP = Owner("acme", "web"), Owner("acme", "shop")
BIG = "x" * 5000


@dataclass
class Bench:
    """One manager's services over storage that may be shared with others."""

    objects: Objects
    pods: LayerPods
    checkpoints: Checkpoints
    sweeper: Sweeper

    async def restored(self, workspace: str, owner: Owner = ACME) -> Files:
        pod = self.pods.add(f"fresh-{time.monotonic_ns()}")
        await self.checkpoints.restore(owner, workspace, pod)
        return self.pods.pods[pod.name].files

    async def keys(self, prefix: str = "") -> list[str]:
        return [info.key async for page in self.objects.list(prefix) for info in page]

    async def sweep(self) -> None:
        """As two rounds of the background loop with their grace between them."""
        await self.sweeper.sweep_saves()
        for _ in range(2):
            await self.sweeper.collect_everybody()
            await self.sweeper.collect_due()


async def leading() -> bool:
    return True


def bench(
    objects: Objects | None = None, pods: LayerPods | None = None, *, renew_sec: float = 8.0, stall_sec: float = 60.0
) -> Bench:
    objects = objects or memory_objects()
    pods = pods or LayerPods()
    checkpoints = Checkpoints(
        objects, MemoryCache(), pods, renew_sec=renew_sec, stall_sec=stall_sec, chunk_bytes=1000
    )  # several chunks without megabytes
    sweeper = Sweeper(objects, checkpoints, leading, dead_sec=-2.0, grace_sec=0.0)  # whatever is marked looks dead
    return Bench(objects, pods, checkpoints, sweeper)


@pytest.fixture
def one() -> Bench:
    return bench()


def files_of(one: Bench, pod: PodRef) -> Files:
    return one.pods.pods[pod.name].files


# ── save and restore ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_saved_workspace_comes_back_in_another_pod(one: Bench) -> None:
    files = {"a": "1", "big": BIG, "d/e": ""}
    saved = await one.checkpoints.save(ACME, "w", one.pods.add("p", files))
    assert (saved.number, len(saved.layers), saved.layers[0].full) == (1, 1, True)
    assert await one.restored("w") == files


async def test_what_was_never_saved_restores_to_nothing_and_has_no_head(one: Bench) -> None:
    assert await one.checkpoints.head(ACME, "w") is None
    assert await one.checkpoints.restore(ACME, "w", one.pods.add("p")) is None
    assert await one.keys() == []


async def test_a_second_checkpoint_holds_only_what_changed(one: Bench) -> None:
    pod = one.pods.add("p", {"a": "1", "big": BIG})
    first = await one.checkpoints.save(ACME, "w", pod)
    files_of(one, pod).update(a="2", new="3")
    del files_of(one, pod)["big"]
    second = await one.checkpoints.save(ACME, "w", pod)
    assert second.layers[0] == first.layers[0]
    assert second.layers[1].blob.size < 200
    assert await one.restored("w") == {"a": "2", "new": "3"}


async def test_a_checkpoint_of_nothing_new_changes_nothing_and_leaves_nothing(one: Bench) -> None:
    pod = one.pods.add("p", {"a": "1"})
    first = await one.checkpoints.save(ACME, "w", pod)
    before = sorted(await one.keys(LAYERS))
    assert await one.checkpoints.save(ACME, "w", pod) == first
    assert sorted(await one.keys(LAYERS)) == before
    files_of(one, pod)["a"] = "2"
    assert (await one.checkpoints.save(ACME, "w", pod)).number == 2
    assert await one.restored("w") == {"a": "2"}


async def test_after_a_restore_the_next_checkpoint_holds_only_what_changed_since(one: Bench) -> None:
    await one.checkpoints.save(ACME, "w", one.pods.add("p", {"a": "1", "big": BIG}))
    again = one.pods.add("q")
    await one.checkpoints.restore(ACME, "w", again)
    files_of(one, again)["b"] = "2"
    saved = await one.checkpoints.save(ACME, "w", again)
    assert [layer.full for layer in saved.layers] == [True, False]
    assert await one.restored("w") == {"a": "1", "big": BIG, "b": "2"}


async def test_a_pod_that_does_not_know_the_state_any_more_sends_everything(one: Bench) -> None:
    pod = one.pods.add("p", {"a": "1"})
    await one.checkpoints.save(ACME, "w", pod)
    one.pods.pods["p"].known.clear()  # its executor was restarted
    files_of(one, pod)["b"] = "2"
    saved = await one.checkpoints.save(ACME, "w", pod)
    assert [layer.full for layer in saved.layers] == [True]
    assert await one.restored("w") == {"a": "1", "b": "2"}


async def test_many_layers_are_replaced_by_a_whole_one_and_the_old_ones_go(one: Bench) -> None:
    pod = one.pods.add("p", {"a": "0"})
    counts = []
    for n in range(MAX_LAYERS + 3):
        files_of(one, pod)["a"] = str(n)
        counts.append(len((await one.checkpoints.save(ACME, "w", pod)).layers))
    assert max(counts) == MAX_LAYERS
    assert counts[-1] < MAX_LAYERS
    await one.sweep()
    head = await one.checkpoints.head(ACME, "w")
    assert head is not None
    assert sorted(await one.keys(LAYERS)) == sorted(key for layer in head.layers for key in layer.blob.object_keys())
    assert await one.restored("w") == {"a": str(MAX_LAYERS + 2)}


async def test_layers_that_weigh_more_than_the_whole_are_replaced(one: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manager.services.manifests._WORTH_BYTES", 1000)
    pod = one.pods.add("p", {"a": BIG})
    await one.checkpoints.save(ACME, "w", pod)
    counts = []
    for n in range(6):
        files_of(one, pod)["a"] = f"{n}{BIG}"
        counts.append(len((await one.checkpoints.save(ACME, "w", pod)).layers))
    assert max(counts) <= 3
    assert await one.restored("w") == {"a": f"5{BIG}"}


async def test_progress_tells_bytes_and_the_total_where_it_is_known(one: Bench) -> None:
    told: list[tuple[int, int | None]] = []
    saved = await one.checkpoints.save(
        ACME, "w", one.pods.add("p", {"big": BIG}), progress=lambda done, total: told.append((done, total))
    )
    assert told[-1:] == [(saved.stored_bytes, None)]
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    await one.checkpoints.restore(ACME, "w", one.pods.add("q"), progress=lambda done, total: told.append((done, total)))
    assert told[-1:] == [(saved.stored_bytes, saved.stored_bytes)]


async def test_a_layer_of_the_managers_own_is_all_that_is_in_the_workspace(one: Bench) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b'{"full": true, "set": {"a": "1"}, "removed": []}'

    made = await one.checkpoints.add_layer(ACME, "w", body(), lambda: (1, 1), limit=1000)
    assert made.number == 1
    assert await one.restored("w") == {"a": "1"}


# ── what others may not do ──────────────────────────────────────────────────────────────────────────────────────────


async def test_another_projects_workspace_and_snapshots_are_not_there(one: Bench) -> None:
    """S21: the id alone finds nothing."""
    await one.checkpoints.save(ACME, "w", one.pods.add("p", {"a": "1"}))
    snapshot = await one.checkpoints.snapshot(ACME, "w")
    assert await one.checkpoints.head(SHOP, "w") is None
    assert await one.checkpoints.get_snapshot(SHOP, snapshot.snapshot_id) is None
    assert await one.checkpoints.list_snapshots(SHOP) == []
    assert not await one.checkpoints.delete_snapshot(SHOP, snapshot.snapshot_id)
    for copying in (
        one.checkpoints.fork(SHOP, "w", "v"),
        one.checkpoints.from_snapshot(SHOP, snapshot.snapshot_id, "v"),
        one.checkpoints.snapshot(SHOP, "w"),
    ):
        with pytest.raises(NotFound):
            await copying
    assert await one.restored("w") == {"a": "1"}


def saying(**said: object) -> Callable[[Stream], None]:
    def lie(stream: Stream) -> None:
        for name, value in said.items():
            setattr(stream.report if hasattr(stream.report, name) else stream, name, value)

    return lie


@pytest.mark.parametrize(
    ("lie", "error"),
    [
        (saying(state="../../other"), ExecutorUnreachable),
        (saying(state=""), ExecutorUnreachable),
        (saying(state="a" * 1000), ExecutorUnreachable),
        (saying(base="ab" * 16), ExecutorUnreachable),
        (saying(bytes=-1), TooLarge),
        (saying(bytes=1 << 50), TooLarge),
        (saying(entries=-5, removed=0), TooLarge),
        (saying(entries=1 << 40), TooLarge),
        (saying(body=b"z" * 40_000), TooLarge),
    ],
)
async def test_what_a_pod_says_of_its_layer_is_checked(
    one: Bench, lie: Callable[[Stream], None], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod belongs to an attacker: nothing of it is kept, and the last checkpoint stands."""
    monkeypatch.setattr("manager.services.checkpoints._SPARE_BYTES", 30_000)
    pod = one.pods.add("p", {"a": "1"})
    first = await one.checkpoints.save(ACME, "w", pod, disk_bytes=1000)
    before = sorted(await one.keys())
    files_of(one, pod)["a"] = "2"
    one.pods.pods["p"].lie = lie
    with pytest.raises(error):
        await one.checkpoints.save(ACME, "w", pod, disk_bytes=1000)
    await one.sweep()
    assert [key for key in sorted(await one.keys()) if key != "clock"] == before
    assert await one.checkpoints.head(ACME, "w") == first
    assert await one.restored("w") == {"a": "1"}


async def test_a_pod_that_sends_nothing_is_given_up() -> None:
    one = bench(stall_sec=0.05)
    pod = one.pods.add("p", {"a": "1"})

    async def never() -> None:
        await asyncio.Event().wait()

    one.pods.pods["p"].before_piece = never
    with pytest.raises(ExecutorUnreachable, match="sent nothing"):
        await one.checkpoints.save(ACME, "w", pod)
    assert await one.keys(LAYERS) == []


async def test_a_pod_that_names_no_state_after_a_restore_is_thrown_away(
    one: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await one.checkpoints.save(ACME, "w", one.pods.add("p", {"a": "1"}))
    monkeypatch.setattr("tests.support.layer_pods.secrets.token_hex", lambda _: "no state!")
    with pytest.raises(ExecutorUnreachable):
        await one.restored("w")


async def test_nothing_of_a_damaged_layer_reaches_the_pod_and_the_error_says_so(one: Bench) -> None:
    """F24: the hash is checked before a byte is given on."""
    saved = await one.checkpoints.save(ACME, "w", one.pods.add("p", {"a": "1", "big": BIG}))
    first = saved.layers[0].blob.object_keys()[0]
    found = await one.objects.get(first, limit=10_000)
    assert found is not None
    await one.objects.put(first, b"?" + found.data[1:])
    pod = one.pods.add("q")
    with pytest.raises(ObjectDamaged):
        await one.checkpoints.restore(ACME, "w", pod)
    assert files_of(one, pod) == {}


# ── snapshots and forks ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_snapshot_stays_what_it_is_while_its_workspace_changes_and_goes(one: Bench) -> None:
    pod = one.pods.add("p", {"a": "1"})
    await one.checkpoints.save(ACME, "w", pod)
    snapshot = await one.checkpoints.snapshot(ACME, "w", name="before")
    files_of(one, pod)["a"] = "2"
    await one.checkpoints.save(ACME, "w", pod, whole=True)
    await one.checkpoints.delete_workspace(ACME, "w")
    await one.sweep()
    assert await one.checkpoints.list_snapshots(ACME) == [snapshot]
    await one.checkpoints.from_snapshot(ACME, snapshot.snapshot_id, "v")
    assert await one.restored("v") == {"a": "1"}


async def test_a_fork_copies_no_bytes_and_goes_its_own_way(one: Bench) -> None:
    pod = one.pods.add("p", {"a": "1", "big": BIG})
    await one.checkpoints.save(ACME, "w", pod)
    before = await one.keys(LAYERS)
    await one.checkpoints.fork(ACME, "w", "v")
    assert await one.keys(LAYERS) == before
    other = one.pods.add("q")
    await one.checkpoints.restore(ACME, "v", other)
    files_of(one, other)["a"] = "of v"
    await one.checkpoints.save(ACME, "v", other)
    files_of(one, pod)["a"] = "of w"
    await one.checkpoints.save(ACME, "w", pod)
    assert await one.restored("w") == {"a": "of w", "big": BIG}
    assert await one.restored("v") == {"a": "of v", "big": BIG}
    await one.checkpoints.delete_workspace(ACME, "w")
    await one.sweep()
    assert await one.restored("v") == {"a": "of v", "big": BIG}


async def test_layers_go_with_the_last_manifest_that_names_them(one: Bench) -> None:
    await one.checkpoints.save(ACME, "w", one.pods.add("p", {"a": BIG}))
    await one.checkpoints.fork(ACME, "w", "v")
    snapshot = await one.checkpoints.snapshot(ACME, "w")
    for workspace in ("w", "v"):
        assert await one.checkpoints.delete_workspace(ACME, workspace)
        await one.sweep()
        assert len(await one.keys(LAYERS)) > 0
    assert await one.checkpoints.delete_snapshot(ACME, snapshot.snapshot_id)
    assert not await one.checkpoints.delete_snapshot(ACME, snapshot.snapshot_id)
    await one.sweep()
    assert [key for key in await one.keys() if key != "clock"] == []


async def test_one_look_alone_takes_nothing(one: Bench) -> None:
    """A copy of a manifest may be made while a look reads: two have to agree."""
    await one.checkpoints.save(ACME, "w", one.pods.add("p", {"a": "1"}))
    await one.checkpoints.delete_workspace(ACME, "w")
    sweeper = Sweeper(one.objects, one.checkpoints, leading, grace_sec=3600.0)
    await sweeper.collect_everybody()
    await sweeper.collect_everybody()
    await sweeper.collect_due()
    assert await one.keys(LAYERS) != []


@pytest.mark.parametrize("what", ["superseded", "workspace", "snapshot"])
async def test_what_a_manager_let_go_of_and_could_not_collect_any_more_is_collected_by_another_at_once(
    one: Bench, what: str
) -> None:
    """F24: it dies right after; nothing waits for the hourly look at everybody's layers."""
    pod = one.pods.add("p", {"a": "1"})
    await one.checkpoints.save(ACME, "w", pod)
    if what == "superseded":
        await one.checkpoints.save(ACME, "w", pod, whole=True)
    elif what == "snapshot":
        await one.checkpoints.snapshot(ACME, "w", snapshot_id="last")
    if what != "superseded":
        await one.checkpoints.delete_workspace(ACME, "w")
    if what == "snapshot":
        await one.checkpoints.delete_snapshot(ACME, "last")
    other = bench(one.objects, one.pods)
    await other.sweeper.sweep_saves()
    for _ in range(2):
        await other.sweeper.collect_due()
    head = await other.checkpoints.head(ACME, "w")
    named = [layer.blob.prefix for layer in head.layers] if head is not None else []
    assert {f"{key.rpartition('/')[0]}/" for key in await one.keys(LAYERS)} == set(named)
    assert len(named) == (what == "superseded")
    assert await one.keys("records/saves/") == []


async def test_a_snapshot_past_its_time_goes(one: Bench) -> None:
    await one.checkpoints.save(ACME, "w", one.pods.add("p", {"a": "1"}))
    gone = await one.checkpoints.snapshot(ACME, "w", keep_until=time.time() - 1)
    kept = await one.checkpoints.snapshot(ACME, "w", keep_until=time.time() + 3600)
    await one.sweep()
    assert await one.checkpoints.list_snapshots(ACME) == [kept]
    assert await one.checkpoints.get_snapshot(ACME, gone.snapshot_id) is None


async def test_the_same_snapshot_id_again_is_the_same_snapshot(one: Bench) -> None:
    pod = one.pods.add("p", {"a": "1"})
    await one.checkpoints.save(ACME, "w", pod)
    first = await one.checkpoints.snapshot(ACME, "w", snapshot_id="last")
    assert await one.checkpoints.snapshot(ACME, "w", snapshot_id="last") == first
    files_of(one, pod)["a"] = "2"
    await one.checkpoints.save(ACME, "w", pod)
    with pytest.raises(NotSaved):
        await one.checkpoints.snapshot(ACME, "w", snapshot_id="last")


async def test_what_was_never_saved_has_no_snapshot_and_no_fork(one: Bench) -> None:
    for copying in (one.checkpoints.snapshot(ACME, "w"), one.checkpoints.fork(ACME, "w", "v")):
        with pytest.raises(NotFound):
            await copying
    assert await one.keys() == []


async def test_a_copy_whose_source_goes_while_it_is_made_is_not_made(one: Bench) -> None:
    await one.checkpoints.save(ACME, "w", one.pods.add("p", {"a": "1"}))
    create = one.checkpoints.heads.create

    async def slow(owner: Owner | None, id: str, value: Manifest) -> object:
        made = await create(owner, id, value)
        await one.checkpoints.delete_workspace(ACME, "w")
        return made

    one.checkpoints.heads.create = slow  # type: ignore[method-assign, assignment]
    with pytest.raises(NotSaved):
        await one.checkpoints.fork(ACME, "w", "v")
    assert await one.checkpoints.head(ACME, "v") is None


# ── managers that die, stall and race ───────────────────────────────────────────────────────────────────────────────


class Died(BaseException):
    """The process is gone: nothing after it happens."""


class DyingObjects:
    """Objects of a process that dies at its call number `at`, before or after that call took effect."""

    def __init__(self, real: Objects, at: int, *, after: bool) -> None:
        self.describe = "dying"
        self.calls = 0
        self._real, self._at, self._after = real, at, after

    async def _step(self, doing: Callable[[], Awaitable[object]]) -> object:
        self.calls += 1
        if self.calls > self._at or (self.calls == self._at and not self._after):
            raise Died
        answer = await doing()
        if self.calls == self._at:
            raise Died
        return answer

    async def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        def doing() -> Awaitable[object]:
            return self._real.put(key, data, if_absent=if_absent, if_match=if_match)

        return str(await self._step(doing))

    async def get(self, key: str, *, limit: int) -> Object | None:
        return await self._step(lambda: self._real.get(key, limit=limit))  # type: ignore[return-value]

    async def head(self, key: str) -> ObjectInfo | None:
        return await self._step(lambda: self._real.head(key))  # type: ignore[return-value]

    async def delete(self, key: str) -> None:
        await self._step(lambda: self._real.delete(key))

    def list(self, prefix: str, after: str = "") -> AsyncGenerator[list[ObjectInfo], None]:
        return self._real.list(prefix, after)

    def stream(self, key: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes, None]:
        return self._real.stream(key, start, end)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_manager_that_dies_at_any_step_of_a_checkpoint_leaves_one_that_is_whole(after: bool) -> None:
    """F24: of every step, before and after its effect; then the sweep leaves nothing that nobody names."""
    steps = 0
    for at in range(1, 60):
        real, pods = memory_objects(), LayerPods()
        before = bench(real, pods)
        pod = pods.add("p", {"a": "old", "big": BIG})
        await before.checkpoints.save(ACME, "w", pod)
        pods.pods["p"].files = {"a": "new", "big": BIG + BIG}
        dying = DyingObjects(real, at, after=after)
        died = False
        try:
            await bench(dying, pods).checkpoints.save(ACME, "w", pod)
        except (Died, ManagerError):
            died = True
        next_one = bench(real, pods)
        assert (await next_one.restored("w"))["a"] in ("old", "new")
        await next_one.sweep()
        assert (await next_one.restored("w"))["a"] in ("old", "new")
        head = await next_one.checkpoints.head(ACME, "w")
        assert head is not None
        left = set(await next_one.keys(LAYERS))
        assert left == {key for layer in head.layers for key in layer.blob.object_keys()}
        assert await next_one.keys("records/saves/") == []
        pods.pods["p"].files["a"] = "newer"
        await next_one.checkpoints.save(ACME, "w", pod)
        assert (await next_one.restored("w"))["a"] == "newer"
        if not died:
            break
        steps += 1
    assert 15 < steps < 59


async def test_a_manager_that_dies_at_any_step_of_a_fork_or_snapshot_leaves_all_that_is_named() -> None:
    for at in range(1, 10):
        for after in (False, True):
            real, pods = memory_objects(), LayerPods()
            before = bench(real, pods)
            await before.checkpoints.save(ACME, "w", pods.add("p", {"a": "1"}))
            dying = bench(DyingObjects(real, at, after=after), pods)
            for copying in (dying.checkpoints.fork(ACME, "w", "v"), dying.checkpoints.snapshot(ACME, "w")):
                try:
                    await copying
                except Died:
                    pass
            await before.sweep()
            assert await before.restored("w") == {"a": "1"}
            if await before.checkpoints.head(ACME, "v") is not None:
                assert await before.restored("v") == {"a": "1"}
            for snapshot in await before.checkpoints.list_snapshots(ACME):
                await before.checkpoints.from_snapshot(ACME, snapshot.snapshot_id, f"of{snapshot.snapshot_id}")
                assert await before.restored(f"of{snapshot.snapshot_id}") == {"a": "1"}


async def test_a_cancelled_checkpoint_leaves_nothing(one: Bench) -> None:
    pod = one.pods.add("p", {"big": BIG})
    reached = asyncio.Event()
    count = 0

    async def stop_midway() -> None:
        nonlocal count
        count += 1
        if count == 30:
            reached.set()
            await asyncio.Event().wait()

    one.pods.pods["p"].before_piece = stop_midway
    saving = asyncio.create_task(one.checkpoints.save(ACME, "w", pod))
    await reached.wait()
    async with asyncio.timeout(60):
        while await one.keys(LAYERS) == []:  # chunks are stored beside what comes
            await asyncio.sleep(0.01)
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert await one.keys(LAYERS) == []
    assert await one.keys("records/saves/") == []
    assert await one.checkpoints.head(ACME, "w") is None


async def test_a_checkpoint_that_was_taken_for_dead_cannot_commit_any_more() -> None:
    """F28: A manager that was stopped for minutes and goes on: what it named may have been swept."""
    one = bench(renew_sec=3600.0)
    pod = one.pods.add("p", {"a": "old"})
    await one.checkpoints.save(ACME, "w", pod)
    files_of(one, pod)["a"] = "new"
    real = one.checkpoints.heads.replace
    asleep, awake = asyncio.Event(), asyncio.Event()

    async def stopped_before(*args: object) -> object:
        asleep.set()
        await awake.wait()
        return await real(*args)  # type: ignore[arg-type]

    one.checkpoints.heads.replace = stopped_before  # type: ignore[method-assign, assignment]
    saving = asyncio.create_task(one.checkpoints.save(ACME, "w", pod))
    await asleep.wait()
    other = bench(one.objects, one.pods)
    await other.sweeper.sweep_saves()
    assert other.sweeper.swept == 1
    awake.set()
    with pytest.raises(NotSaved):
        await saving
    assert await other.restored("w") == {"a": "old"}
    assert await other.keys("records/saves/") == []


async def test_a_checkpoint_whose_mark_is_lost_gives_up_while_it_runs() -> None:
    one = bench(renew_sec=0.01)
    pod = one.pods.add("p", {"big": BIG})

    async def never() -> None:
        await asyncio.Event().wait()

    one.pods.pods["p"].before_piece = never
    saving = asyncio.create_task(one.checkpoints.save(ACME, "w", pod))
    while not await one.keys("records/saves/"):
        await asyncio.sleep(0.001)
    for key in await one.keys("records/saves/"):
        await one.objects.put(key, b"another's")
    with pytest.raises(NotSaved, match="given up"):
        await saving
    assert not saving.cancelled()


async def test_a_checkpoint_survives_the_sweep_of_another_ones_remains(one: Bench) -> None:
    """The sweep writes the head anew; a live checkpoint of the same workspace goes on."""
    pod = one.pods.add("p", {"a": "old"})
    await one.checkpoints.save(ACME, "w", pod)
    files_of(one, pod)["a"] = "new"
    real = one.checkpoints.heads.replace
    first = True

    async def after_a_fence(*args: object) -> object:
        nonlocal first
        if first:
            first = False
            found = await one.checkpoints.heads.get(ACME, "w", fresh=True)
            assert found is not None
            await real(found, found.value)
        return await real(*args)  # type: ignore[arg-type]

    one.checkpoints.heads.replace = after_a_fence  # type: ignore[method-assign, assignment]
    assert (await one.checkpoints.save(ACME, "w", pod)).number == 2
    assert await one.restored("w") == {"a": "new"}


async def test_of_two_checkpoints_at_once_one_stands_and_the_other_leaves_nothing(one: Bench) -> None:
    """F28"""
    other = bench(one.objects, one.pods)
    one.pods.add("p", {"a": "1", "big": BIG})
    one.pods.add("q", {"a": "2", "big": BIG})
    answers = await asyncio.gather(
        one.checkpoints.save(ACME, "w", PodRef("p", "unix:/p")),
        other.checkpoints.save(ACME, "w", PodRef("q", "unix:/q")),
        return_exceptions=True,
    )
    won = [answer for answer in answers if isinstance(answer, Manifest)]
    assert len(won) == 1
    assert all(isinstance(answer, Manifest | NotSaved) for answer in answers)
    assert (await one.restored("w"))["a"] == ("1" if won[0].pod == "p" else "2")
    assert sorted(await one.keys(LAYERS)) == sorted(won[0].layers[0].blob.object_keys())


async def test_a_workspace_that_was_deleted_while_it_was_saved_stays_deleted(one: Bench) -> None:
    pod = one.pods.add("p", {"a": "1", "big": BIG})
    await one.checkpoints.save(ACME, "w", pod)
    files_of(one, pod)["a"] = "2"
    deleted = False

    async def delete() -> None:
        nonlocal deleted
        if not deleted:
            deleted = True
            await one.checkpoints.delete_workspace(ACME, "w")

    one.pods.pods["p"].before_piece = delete
    with pytest.raises(NotSaved):
        await one.checkpoints.save(ACME, "w", pod)
    await one.sweep()
    assert [key for key in await one.keys() if key != "clock"] == []


async def test_an_outage_in_the_middle_is_told_and_the_next_try_saves(one: Bench) -> None:
    pod = one.pods.add("p", {"a": "1", "big": BIG})
    count = 0
    put = one.objects.put

    async def sometimes(key: str, data: bytes, **named: object) -> str:
        nonlocal count
        count += 1
        if count == 5:
            raise StoreUnavailable("object storage is down, for a test")
        return await put(key, data, **named)  # type: ignore[arg-type]

    one.objects.put = sometimes  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        await one.checkpoints.save(ACME, "w", pod)
    assert await one.checkpoints.head(ACME, "w") is None
    await one.checkpoints.save(ACME, "w", pod)
    assert await one.restored("w") == {"a": "1", "big": BIG}


async def test_only_so_many_of_one_owner_are_under_way_and_the_others_have_their_turn(one: Bench) -> None:
    blocked, under_way, most = asyncio.Event(), 0, 0

    async def wait() -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await blocked.wait()
        under_way -= 1

    saving = []
    for n in range(10):
        pod = one.pods.add(f"p{n}", {"a": "1"})
        one.pods.pods[f"p{n}"].before_piece = wait
        saving.append(asyncio.create_task(one.checkpoints.save(ACME, f"w{n}", pod)))
    while under_way < 4:
        await asyncio.sleep(0.001)
    await one.checkpoints.save(SHOP, "other", one.pods.add("q", {"a": "1"}))
    blocked.set()
    await asyncio.gather(*saving)
    assert most == 4


def test_what_a_workspace_is_called_is_never_a_path() -> None:
    assert save_prefix(Owner("..", "a/b"), "../x", "c1").count("/") == 5
    assert ".." not in save_prefix(Owner("..", ".."), "..", "c1").split("/")


async def test_a_manifest_that_cannot_be_read_is_an_outage_and_is_not_overwritten(one: Bench) -> None:
    pod = one.pods.add("p", {"a": "1"})
    await one.checkpoints.save(ACME, "w", pod)
    (key,) = await one.keys("records/workspaces/")
    await one.objects.put(key, b'{"half":')
    with pytest.raises(StoreUnavailable):
        await one.checkpoints.save(ACME, "w", pod)
    found = await one.objects.get(key, limit=1000)
    assert found is not None
    assert found.data == b'{"half":'


def test_the_records_are_small_enough_for_a_workspace_of_a_hundred_gigabytes() -> None:
    size = 400 << 30
    chunks = ("a" * 64,) * (size // CHUNK_BYTES)
    blob = Blob(prefix="p" * 300, size=size, sha256="a" * 64, chunk_bytes=CHUNK_BYTES, chunks=chunks)
    manifest = Manifest(owner=ACME, workspace="w", layers=(Layer(blob=blob, full=True, content_bytes=size, entries=9),))
    assert len(msgspec.json.encode(manifest)) < MANIFEST_BYTES


@pytest.mark.parametrize("landed", [False, True])
async def test_a_commit_without_an_answer_is_cleared_up_by_the_sweep_of_half_checkpoints(
    one: Bench, landed: bool
) -> None:
    """F24: the sweeper reads what became of it; nothing waits for the look at everybody's layers."""
    real = one.checkpoints.heads.replace

    async def unanswered(*args: object) -> object:
        if landed:
            await real(*args)  # type: ignore[arg-type]
        raise StoreUnavailable("no answer, for a test")

    one.checkpoints.heads.replace = unanswered  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreUnavailable):
        await one.checkpoints.save(ACME, "w", one.pods.add("p", {"a": "1", "big": BIG}))
    one.checkpoints.heads.replace = real  # type: ignore[method-assign]
    assert await one.keys(LAYERS) != []
    await one.sweeper.sweep_saves()
    await one.sweeper.collect_due()
    assert await one.keys("records/saves/") == []
    assert (await one.keys(LAYERS) != []) == landed
    assert await one.restored("w") == ({"a": "1", "big": BIG} if landed else {})


async def test_a_pod_that_lies_leaves_no_bytes_to_be_swept(one: Bench) -> None:
    pod = one.pods.add("p", {"a": "1"})
    one.pods.pods["p"].lie = saying(entries=1 << 40)
    with pytest.raises(TooLarge):
        await one.checkpoints.save(ACME, "w", pod)
    assert await one.keys(LAYERS) == []
    assert await one.keys("records/saves/") == []


@pytest.mark.parametrize("lie", [saying(entries=1 << 40), saying(body=b"z" * 40_000)], ids=["claims", "is too long"])
async def test_what_storage_does_not_let_go_of_is_left_to_the_sweeper(
    one: Bench, lie: Callable[[Stream], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manager.services.checkpoints._SPARE_BYTES", 30_000)
    delete = one.objects.delete

    async def never(key: str) -> None:
        raise StoreUnavailable("object storage deletes nothing, for a test")

    one.objects.delete = never  # type: ignore[method-assign]
    pod = one.pods.add("p", {"big": BIG})
    one.pods.pods["p"].lie = lie
    with pytest.raises(TooLarge):
        await one.checkpoints.save(ACME, "w", pod, disk_bytes=10)
    one.objects.delete = delete  # type: ignore[method-assign]
    assert await one.keys(LAYERS) != []
    await one.sweeper.sweep_saves()
    assert await one.keys(LAYERS) == []
    assert await one.keys("records/saves/") == []


# ── the background loop ─────────────────────────────────────────────────────────────────────────────────────────────


async def half_checkpoint(one: Bench) -> None:
    """What a manager that died in the middle of one leaves."""
    dying = bench(DyingObjects(one.objects, 6, after=True), one.pods)
    with pytest.raises(Died):
        await dying.checkpoints.save(ACME, "half", one.pods.add("h", {"big": BIG}))
    assert await one.keys(LAYERS) != []
    assert await one.keys("records/saves/") != []


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.01)


async def test_the_loop_takes_away_what_dead_managers_left_and_what_nobody_names(one: Bench) -> None:
    """F24: no upload is left, and an outage only pauses the sweep."""
    await half_checkpoint(one)
    await one.checkpoints.save(ACME, "w", one.pods.add("p", {"a": "1"}))
    await one.checkpoints.save(ACME, "gone", one.pods.add("q", {"a": "2"}))
    await one.checkpoints.delete_workspace(ACME, "gone")
    listing, down = one.objects.list, True

    def sometimes(prefix: str, after: str = "") -> AsyncGenerator[list[ObjectInfo], None]:
        nonlocal down
        if down:
            down = False
            raise StoreUnavailable("object storage is down, for a test")
        return listing(prefix, after)

    one.objects.list = sometimes  # type: ignore[method-assign]
    sweeper = Sweeper(one.objects, one.checkpoints, leading, look_sec=0.01, dead_sec=-2.0, grace_sec=0.05)
    loop = asyncio.create_task(sweeper.sweep_forever(), name="sweeper")
    head = await one.checkpoints.head(ACME, "w")
    assert head is not None
    named = {key for layer in head.layers for key in layer.blob.object_keys()}

    async def clean() -> bool:
        return {info.key async for page in listing(LAYERS) for info in page} == named and not [
            info async for page in listing("records/saves/") for info in page
        ]

    await until(clean)
    loop.cancel()
    await asyncio.wait([loop])
    assert loop.cancelled()
    assert (sweeper.swept, sweeper.collected) == (1, 1)
    assert await one.restored("w") == {"a": "1"}


async def test_a_manager_that_does_not_lead_sweeps_no_half_checkpoints_but_what_was_deleted_through_it(
    one: Bench,
) -> None:
    await half_checkpoint(one)
    before = set(await one.keys(LAYERS))
    await one.checkpoints.save(ACME, "gone", one.pods.add("q", {"a": "2"}))
    await one.checkpoints.delete_workspace(ACME, "gone")

    async def following() -> bool:
        return False

    sweeper = Sweeper(one.objects, one.checkpoints, following, look_sec=0.01, dead_sec=-2.0, grace_sec=0.05)
    loop = asyncio.create_task(sweeper.sweep_forever(), name="sweeper")

    async def collected() -> bool:
        return sweeper.collected == 1

    await until(collected)
    loop.cancel()
    await asyncio.wait([loop])
    assert set(await one.keys(LAYERS)) == before
    assert await one.keys("records/saves/") != []


async def test_a_mark_that_is_renewed_is_left_alone(one: Bench) -> None:
    pod = one.pods.add("p", {"big": BIG})
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        reached.set()
        await go_on.wait()

    one.pods.pods["p"].before_piece = wait
    saving = asyncio.create_task(one.checkpoints.save(ACME, "w", pod))
    await reached.wait()
    await Sweeper(one.objects, one.checkpoints, leading, dead_sec=3600.0).sweep_saves()
    go_on.set()
    assert (await saving).number == 1
    assert await one.restored("w") == {"big": BIG}
