"""What file calls change is durable before they answer: over storage in memory and pods that are dictionaries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass, field

import msgspec
import pytest

from manager.errors import NotFound, SandboxGone, StoreUnavailable
from manager.model import Binding, BindingState, LeaseTerms, Owner, Profile, own_name, task_label
from manager.services.checkpoints import Checkpoints
from manager.services.manifests import LAYERS, Manifest
from manager.services.sandboxes import Bound
from manager.services.sweeping import Sweeper
from manager.services.writethrough import FOLD_ROWS, MOST_ROWS, PACKED_IN_ALL, WriteThrough
from manager.store.objects import Object, ObjectInfo, Objects
from tests.support.layer_pods import Files, LayerPods
from tests.support.memory_objects import MemoryCache, memory_objects

ACME = Owner("acme", "web")
TASK = task_label(ACME, "t")
WAIT_SEC = 60.0
NOISE = "".join(chr(33 + (7 * number * number + number // 3) % 90) for number in range(300_000))


class Watched:
    """Object storage that counts what is asked of it, and fails or waits where a test says so."""

    def __init__(self, under: Objects) -> None:
        self._under = under
        self.describe = under.describe
        self.puts: list[str] = []
        self.down = False
        self.lose_answers = False
        self.hold: asyncio.Event | None = None
        self.holding = asyncio.Event()  # somebody waits

    async def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        self._up()
        if self.hold is not None and key.startswith("records/workspaces"):
            self.holding.set()
            await self.hold.wait()
        self.puts.append(key)
        etag = await self._under.put(key, data, if_absent=if_absent, if_match=if_match)
        if self.lose_answers:
            raise StoreUnavailable("the answer was lost, for a test")
        return etag

    async def get(self, key: str, *, limit: int) -> Object | None:
        self._up()
        return await self._under.get(key, limit=limit)

    def stream(self, key: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes, None]:
        return self._under.stream(key, start, end)

    async def head(self, key: str) -> ObjectInfo | None:
        self._up()
        return await self._under.head(key)

    def list(self, prefix: str, after: str = "") -> AsyncGenerator[list[ObjectInfo], None]:
        self._up()
        return self._under.list(prefix, after)

    async def delete(self, key: str) -> None:
        self._up()
        await self._under.delete(key)

    async def close(self) -> None:
        await self._under.close()

    def _up(self) -> None:
        if self.down:
            raise StoreUnavailable("object storage is down, for a test")


async def until(event: asyncio.Event) -> None:
    await event.wait()


async def within(what: Awaitable[object]) -> None:
    async with asyncio.timeout(WAIT_SEC):
        await what


async def leading() -> bool:
    return True


@dataclass
class Bench:
    """One manager over storage and pods that may be shared with others. `gone`: pods that are no sandbox's any more."""

    objects: Watched = field(default_factory=lambda: Watched(memory_objects()))
    pods: LayerPods = field(default_factory=LayerPods)
    gone: set[str] = field(default_factory=set)
    profile: Profile = field(default_factory=lambda: Profile(name="p"))

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(self.objects, MemoryCache(), self.pods, chunk_bytes=10_000)
        self.through = WriteThrough(self.checkpoints, self.pods, [self.profile], self.current)
        self.sweeper = Sweeper(self.objects, self.checkpoints, leading, dead_sec=-2.0, grace_sec=0.0)

    async def current(self, binding: Binding) -> bool:
        return binding.pod not in self.gone

    def pod(self, name: str = "p1", files: Files | None = None, task_id: str = "t") -> Bound:
        ref = self.pods.add(name, files)
        self.pods.pods[name].calls = []
        binding = Binding(
            owner=ACME, task_id=task_id, sandbox_id="s1", state=BindingState.BOUND, token="x", profile="p",
            target="here", generation=1, pod=name, address=ref.address,
        )  # fmt: skip
        return Bound(binding, LeaseTerms(60.0, 60.0, 60.0), ref)

    async def call(self, bound: Bound, path: str, text: str | None) -> None:
        """A file call as the interface serves it."""
        self.pods.pods[bound.pod.name].call(path, text)
        await self.through.changed(bound)

    def shell(self, bound: Bound, path: str, text: str | None) -> None:
        """What a command does."""
        files = self.pods.pods[bound.pod.name].files
        if text is None:
            files.pop(path)
        else:
            files[path] = text

    async def head(self) -> Manifest:
        found = await self.checkpoints.head(ACME, TASK)
        assert found is not None
        return found

    async def restored(self, name: str | None = None) -> Files:
        name = name or f"fresh-{time.monotonic_ns()}"
        copy = f"copy-{name}"
        await self.checkpoints.fork(ACME, TASK, copy)  # restoring the workspace itself would take it over
        pod = self.pods.add(name)
        await self.checkpoints.restore(ACME, copy, pod)
        await self.checkpoints.delete_workspace(ACME, copy)
        return self.pods.pods[name].files

    async def layer_keys(self) -> set[str]:
        return {info.key async for page in self.objects.list(LAYERS) for info in page}

    async def sweep(self) -> None:
        await self.sweeper.sweep_saves()
        for _ in range(2):
            await self.sweeper.collect_everybody()
            await self.sweeper.collect_due()


@pytest.fixture
async def one() -> AsyncGenerator[Bench, None]:
    bench = Bench()
    yield bench
    await bench.through.close()


# ── durable, and cheap ──────────────────────────────────────────────────────────────────────────────────────────


async def test_what_file_calls_changed_is_there_after_the_pod_has_died_without_a_checkpoint(one: Bench) -> None:
    """F21: the shell's own file is the checkpoint's business."""
    pod = one.pod()
    await one.call(pod, "a", "1")
    one.shell(pod, "by-shell", "x")
    await one.call(pod, "b", "2")
    await one.call(pod, "a", "3")
    await one.call(pod, "b", None)
    assert await one.restored() == {"a": "3"}


async def test_a_small_change_is_one_conditional_put_and_nothing_else(one: Bench) -> None:
    pod = one.pod()
    await one.call(pod, "a", "1")
    for number in range(5):
        one.objects.puts.clear()
        await one.call(pod, "a", str(number))
        assert one.objects.puts == [f"records/workspaces/acme/web/{TASK}"]
    assert await one.layer_keys() == set()


async def test_calls_that_come_together_share_a_put_and_each_is_durable_when_it_returns(one: Bench) -> None:
    pod = one.pod()
    await one.call(pod, "first", "x")
    one.objects.puts.clear()
    seen: dict[str, Files] = {}

    async def call(name: str) -> None:
        await one.call(pod, name, name)
        seen[name] = await one.restored(f"r-{name}")

    await asyncio.gather(*(call(f"f{number}") for number in range(50)))
    assert all(files[name] == name for name, files in seen.items())
    written = [key for key in one.objects.puts if key.endswith(TASK)]
    assert len(written) <= 4


async def test_many_calls_are_folded_into_checkpoints_and_their_number_is_bounded(one: Bench) -> None:
    pod = one.pod()
    wanted = {}
    most = 0
    for number in range(3 * FOLD_ROWS):
        wanted[f"f{number % 40}"] = str(number)
        await one.call(pod, f"f{number % 40}", str(number))
        most = max(most, len((await one.head()).written))
    assert most <= MOST_ROWS
    async with asyncio.timeout(WAIT_SEC):
        while one.through.folds < 2:
            await asyncio.sleep(0.01)
    assert await one.restored() == wanted
    assert len((await one.head()).layers) >= 1


async def test_with_too_many_unfolded_changes_calls_wait_for_the_checkpoint(one: Bench) -> None:
    pod = one.pod()
    held = asyncio.Event()
    one.pods.pods["p1"].before_piece = lambda: until(held)  # a checkpoint that does not come along
    for number in range(MOST_ROWS):
        await one.call(pod, "f", str(number))
    last = asyncio.create_task(one.call(pod, "f", "last"))
    done, _ = await asyncio.wait([last], timeout=0.2)
    assert not done
    held.set()
    await within(last)
    assert await one.restored() == {"f": "last"}
    assert len((await one.head()).written) < MOST_ROWS


async def test_a_large_change_lies_beside_the_manifest_and_goes_when_a_checkpoint_has_it(one: Bench) -> None:
    pod = one.pod()
    await one.call(pod, "big", NOISE)
    head = await one.head()
    keys = await one.layer_keys()
    assert keys == set(head.written[0].layer.blob.object_keys())
    assert len(keys) > 1
    assert head.packed_bytes == 0
    assert await one.restored() == {"big": NOISE}
    await one.sweep()
    assert await one.layer_keys() == keys
    saved = await one.checkpoints.save(ACME, TASK, pod.pod)
    assert saved.written == ()
    await one.sweep()
    assert await one.layer_keys() == set(saved.layers[0].blob.object_keys())
    assert await one.restored() == {"big": NOISE}


async def test_a_manifest_stays_small_however_much_is_written_in_small_pieces(one: Bench) -> None:
    pod = one.pod()
    held = asyncio.Event()
    one.pods.pods["p1"].before_piece = lambda: until(held)
    for number in range(60):
        at = number * 997
        await one.call(pod, f"f{number}", NOISE[at : at + 16_000])
    assert (await one.head()).packed_bytes <= PACKED_IN_ALL
    held.set()


# ── beside checkpoints ──────────────────────────────────────────────────────────────────────────────────────────


async def test_a_checkpoint_takes_the_place_of_what_was_written_before_it(one: Bench) -> None:
    """What a command removed after a call had written it does not come back."""
    pod = one.pod(files={"old": "1"})
    await one.checkpoints.save(ACME, TASK, pod.pod)
    await one.call(pod, "new", "2")
    one.shell(pod, "new", None)
    one.shell(pod, "other", "3")
    saved = await one.checkpoints.save(ACME, TASK, pod.pod)
    assert (saved.written, [layer.full for layer in saved.layers]) == ((), [True, False])
    assert await one.restored() == {"old": "1", "other": "3"}
    await one.call(pod, "again", "4")
    assert await one.restored() == {"old": "1", "other": "3", "again": "4"}


async def test_what_was_written_and_removed_again_is_gone_with_an_empty_checkpoint_too(one: Bench) -> None:
    pod = one.pod(files={"old": "1"})
    await one.checkpoints.save(ACME, TASK, pod.pod)
    await one.call(pod, "new", "2")
    one.shell(pod, "new", None)
    await one.checkpoints.save(ACME, TASK, pod.pod)
    assert await one.restored() == {"old": "1"}


async def test_calls_beside_a_checkpoint_wait_for_nothing_and_are_in_what_it_leaves(one: Bench) -> None:
    pod = one.pod(files={f"f{number}": "x" * 100 for number in range(20)})
    inside, go = asyncio.Event(), asyncio.Event()

    async def before_piece() -> None:
        inside.set()
        await go.wait()

    one.pods.pods["p1"].before_piece = before_piece
    saving = asyncio.create_task(one.checkpoints.save(ACME, TASK, pod.pod))
    await within(inside.wait())
    await within(one.call(pod, "meanwhile", "1"))
    await within(one.call(pod, "f3", "2"))
    one.shell(pod, "f3", "3")  # after the call, and after the checkpoint's look
    go.set()
    await within(saving)
    assert (await one.restored())["meanwhile"] == "1"
    assert (await one.restored())["f3"] == "3"
    one.shell(pod, "meanwhile", None)
    await one.checkpoints.save(ACME, TASK, pod.pod)
    assert "meanwhile" not in await one.restored()
    assert (await one.restored())["f3"] == "3"


async def test_two_managers_write_one_pods_files_and_nothing_is_lost(one: Bench) -> None:
    """F28"""
    other = Bench(one.objects, one.pods, one.gone)
    pod = one.pod()
    for number in range(10):
        await one.call(pod, "x", str(number))
        await other.call(pod, "y", str(number))
    await asyncio.gather(
        *(
            bench.call(pod, f"{name}{number}", name)
            for name, bench in (("a", one), ("b", other))
            for number in range(20)
        ),
        one.checkpoints.save(ACME, TASK, pod.pod),
    )
    assert await one.restored() == one.pods.pods["p1"].files
    await other.through.close()


async def test_a_fork_and_a_snapshot_have_what_was_written_and_keep_it(one: Bench) -> None:
    pod = one.pod()
    await one.call(pod, "big", NOISE)
    await one.call(pod, "a", "1")
    kept = await one.checkpoints.snapshot(ACME, TASK)
    await one.call(pod, "a", "2")
    await one.checkpoints.save(ACME, TASK, pod.pod)
    await one.sweep()
    await one.checkpoints.from_snapshot(ACME, kept.snapshot_id, "w2")
    fresh = one.pods.add("p-snapshot")
    await one.checkpoints.restore(ACME, "w2", fresh)
    assert one.pods.pods["p-snapshot"].files == {"big": NOISE, "a": "1"}


# ── whose pod it is ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_pod_that_got_the_workspace_goes_on_from_what_was_written(one: Bench) -> None:
    pod = one.pod()
    await one.call(pod, "a", "1")
    second = one.pod("p2")
    restored = await one.checkpoints.restore(ACME, TASK, second.pod)
    assert restored is not None
    assert (restored.pod, restored.written, len(restored.layers)) == ("p2", (), 1)
    one.shell(second, "a", None)
    await one.call(second, "b", "2")
    await one.checkpoints.save(ACME, TASK, second.pod)
    assert await one.restored() == {"b": "2"}


async def test_a_manager_that_stood_still_writes_nothing_of_an_old_pod_into_a_new_ones_workspace(one: Bench) -> None:
    """F2, F28: fenced by the pod."""
    pod = one.pod()
    await one.call(pod, "a", "1")
    one.objects.hold = asyncio.Event()
    late = asyncio.create_task(one.call(pod, "a", "of the old pod"))
    await within(one.objects.holding.wait())
    other = Bench(Watched(one.objects._under), one.pods, one.gone)
    second = other.pod("p2")
    await other.checkpoints.restore(ACME, TASK, second.pod)
    one.gone.add("p1")
    await other.call(second, "a", "2")
    one.objects.hold.set()
    with pytest.raises(SandboxGone):
        await within(late)
    assert await other.restored() == {"a": "2"}
    await other.through.close()


async def test_an_old_pods_last_word_ends_a_restore_that_did_not_see_it(one: Bench) -> None:
    pod = one.pod()
    await one.call(pod, "a", "1")
    other = Bench(one.objects, one.pods, one.gone)
    second = other.pod("p2")
    applying = other.pods.apply_layer
    said = False

    async def apply(*args: object, **named: object) -> object:
        nonlocal said
        if not said:
            said = True
            await one.call(pod, "a", "last word")
        return await applying(*args, **named)  # type: ignore[arg-type]

    other.pods.apply_layer = apply  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreUnavailable, match="try again"):
        await other.checkpoints.restore(ACME, TASK, second.pod)
    third = other.pod("p3")
    await other.checkpoints.restore(ACME, TASK, third.pod)
    assert other.pods.pods["p3"].files == {"a": "last word"}
    await other.through.close()


async def test_a_pod_that_has_not_what_the_manifest_has_replaces_all_of_it_or_is_refused(one: Bench) -> None:
    pod = one.pod()
    await one.call(pod, "a", "1")
    second = one.pod("p2", {"mine": "2"})
    await one.call(second, "b", "3")
    assert await one.restored() == {"mine": "2", "b": "3"}
    one.gone.add("p1")
    with pytest.raises(SandboxGone):
        await one.call(pod, "a", "4")
    assert await one.restored() == {"mine": "2", "b": "3"}


async def test_of_a_sandbox_that_was_ended_for_good_nothing_is_written_any_more(one: Bench) -> None:
    pod = one.pod()
    await one.call(pod, "a", "1")
    one.gone.add("p1")
    await one.checkpoints.delete_workspace(ACME, TASK)
    with pytest.raises(SandboxGone):
        await one.call(pod, "b", NOISE)
    assert await one.checkpoints.head(ACME, TASK) is None
    await one.sweep()
    assert await one.layer_keys() == set()


async def test_a_sandbox_that_is_ended_while_its_first_file_is_written_leaves_no_workspace(one: Bench) -> None:
    pod = one.pod()
    one.objects.hold = asyncio.Event()
    late = asyncio.create_task(one.call(pod, "a", "1"))
    await within(one.objects.holding.wait())
    one.gone.add("p1")
    one.objects.hold.set()
    with pytest.raises(SandboxGone):
        await within(late)
    assert await one.checkpoints.head(ACME, TASK) is None


async def test_an_executor_that_begins_anew_counts_anew_and_loses_nothing(one: Bench) -> None:
    pod = one.pod()
    await one.call(pod, "a", "1")
    await one.call(pod, "b", "2")
    found = one.pods.pods["p1"]
    found.began, found.calls, found.known = time.time_ns(), [], {}
    await one.call(pod, "c", "3")
    assert await one.restored() == {"a": "1", "b": "2", "c": "3"}
    one.shell(pod, "a", None)
    await one.checkpoints.save(ACME, TASK, pod.pod)
    assert await one.restored() == {"b": "2", "c": "3"}


# ── when something fails ────────────────────────────────────────────────────────────────────────────────────────


async def test_while_object_storage_is_down_calls_say_so_and_the_next_one_makes_all_of_it_durable(one: Bench) -> None:
    """F24"""
    pod = one.pod()
    await one.call(pod, "a", "1")
    one.objects.down = True
    for name in ("b", "c"):
        with pytest.raises(StoreUnavailable):
            await one.call(pod, name, "2")
    one.objects.down = False
    await one.call(pod, "d", "3")
    assert await one.restored() == {"a": "1", "b": "2", "c": "2", "d": "3"}


@pytest.mark.parametrize("text", ["small", NOISE])
async def test_a_lost_answer_of_storage_is_no_success_and_the_next_call_finds_out_what_is_there(
    one: Bench, text: str
) -> None:
    """F24"""
    pod = one.pod()
    await one.call(pod, "a", "1")
    one.objects.lose_answers = True
    with pytest.raises(StoreUnavailable):
        await one.call(pod, "b", text)
    one.objects.lose_answers = False
    await one.call(pod, "c", "3")
    assert await one.restored() == {"a": "1", "b": text, "c": "3"}
    await one.sweep()
    head = await one.head()
    named = {key for layer in head.rows for key in layer.blob.object_keys() if layer.packed is None}
    assert await one.layer_keys() == named
    assert await one.restored() == {"a": "1", "b": text, "c": "3"}


async def test_a_manager_that_dies_in_the_middle_of_a_large_change_leaves_the_last_state_and_no_chunks(
    one: Bench,
) -> None:
    """F5, F24: a half write-through is none."""
    pod = one.pod()
    await one.call(pod, "a", "1")
    dead = Bench(Watched(one.objects._under), one.pods)
    inside = asyncio.Event()

    async def before_piece() -> None:
        if len(dead.objects.puts) > 3:
            inside.set()
            dead.objects.down = True  # it is dead: nothing of it reaches storage any more
            await asyncio.Event().wait()

    one.pods.pods["p1"].before_written_piece = before_piece
    writing = asyncio.create_task(dead.call(pod, "big", NOISE))
    await within(inside.wait())
    one.pods.pods["p1"].before_written_piece = None
    assert await one.layer_keys() != set()
    assert await one.restored() == {"a": "1"}
    await one.sweep()
    assert await one.layer_keys() == set()
    await one.call(pod, "b", "2")
    assert await one.restored() == {"a": "1", "b": "2", "big": NOISE}
    await dead.through.close()
    await asyncio.wait([writing])


async def test_a_caller_that_hangs_up_takes_nobody_elses_change_with_it(one: Bench) -> None:
    """F29"""
    pod = one.pod()
    await one.call(pod, "a", "1")
    one.objects.hold = asyncio.Event()
    first = asyncio.create_task(one.call(pod, "b", "2"))
    second = asyncio.create_task(one.call(pod, "c", "3"))
    await within(one.objects.holding.wait())
    first.cancel()
    await asyncio.wait([first])
    one.objects.hold.set()
    await within(second)
    assert await one.restored() == {"a": "1", "b": "2", "c": "3"}


async def test_what_an_executor_cannot_tell_path_by_path_becomes_a_checkpoint(one: Bench) -> None:
    pod = one.pod(files={"by-shell": "1"})
    one.pods.pods["p1"].calls = None
    one.shell(pod, "a", "2")
    await one.through.changed(pod)
    assert await one.restored() == {"by-shell": "1", "a": "2"}


async def test_a_small_layer_that_was_damaged_in_its_manifest_is_not_laid_over_anything(one: Bench) -> None:
    pod = one.pod()
    await one.call(pod, "a", "1")
    found = await one.checkpoints.heads.get(ACME, TASK, fresh=True)
    assert found is not None
    row = found.value.written[0]
    layer = msgspec.structs.replace(row.layer, packed=(row.layer.packed or b"")[::-1])
    bad = msgspec.structs.replace(found.value, written=(msgspec.structs.replace(row, layer=layer),))
    await one.checkpoints.heads.replace(found, bad)
    with pytest.raises(StoreUnavailable, match="not what was stored"):
        await one.checkpoints.restore(ACME, TASK, one.pods.add("fresh"))
    assert one.pods.pods["fresh"].files == {}


# ── by policy ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("profile", "of_a_task", "of_a_sandbox"),
    [
        (Profile(name="p"), True, True),
        (Profile(name="p", keep_workspace=False), False, True),
        (Profile(name="p", write_through=False), False, False),
        (Profile(name="other"), False, False),
    ],
)
async def test_the_profile_says_what_is_written_through(profile: Profile, of_a_task: bool, of_a_sandbox: bool) -> None:
    bench = Bench(profile=profile)
    assert bench.through.wanted(bench.pod().binding) is of_a_task
    assert bench.through.wanted(bench.pod(task_id=own_name("s1")).binding) is of_a_sandbox


async def test_a_long_lived_sandboxs_files_are_in_the_workspace_of_its_id(one: Bench) -> None:
    await one.call(one.pod(task_id=own_name("s1")), "a", "1")
    assert await one.checkpoints.head(ACME, "s1") is not None
    with pytest.raises(NotFound):
        await one.checkpoints.fork(ACME, TASK, "w2")
