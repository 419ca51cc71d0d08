"""The embedded Valkey server as an operator meets it: crashes, left-overs, two managers, odd places, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from manager.errors import StoreUnavailable
from manager.model import Binding, BindingState, LeaseTerms, Owner, PodEnded, new_id
from manager.store import embedded, keys
from manager.store.embedded import DataDirBusy, EmbeddedStoreError, embedded_valkey
from manager.store.redis import RedisStore

ACME = Owner("acme", "web")
ROOT = Path(__file__).parents[3]


class Recorded(msgspec.Struct):
    pid: int
    socket: str
    started: int


def recorded(data_dir: Path) -> Recorded:
    return msgspec.json.decode((data_dir / "valkey" / "server.json").read_bytes(), type=Recorded)


def gone(pid: int) -> bool:
    """Ended; a zombie that another process has yet to collect counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def until(check: Callable[[], Awaitable[bool]], within_sec: float = 30) -> None:
    async with asyncio.timeout(within_sec):
        while not await check():
            await asyncio.sleep(0.02)


async def answers(store: RedisStore) -> bool:
    try:
        return await store.get_lease("nothing") is None
    except StoreUnavailable:
        return False


async def written(url: str) -> bool:
    """Whether the server has given the kernel all that it acknowledged."""
    async with Redis.from_url(url) as server:
        return bool((await server.info("persistence"))["aof_buffer_length"] == 0)


async def refused(store: RedisStore) -> bool:
    return not await answers(store)


def claim(task_id: str) -> Binding:
    return Binding(
        owner=ACME, task_id=task_id, sandbox_id=new_id("s"), state=BindingState.CLAIMING, token=new_id(),
        profile="small", target="here", generation=1,
    )  # fmt: skip


LeaveBehind = Callable[[Path], Awaitable[Recorded]]


@pytest.fixture
async def left_behind() -> AsyncIterator[LeaveBehind]:
    """Has a manager start its server, write `k` and be killed with -9; ends what is still there after the test."""
    left: list[Recorded] = []

    async def leave(data_dir: Path) -> Recorded:
        program = (
            "import asyncio, sys; from pathlib import Path; from redis.asyncio import Redis\n"
            "from manager.store.embedded import embedded_valkey\n"
            "async def main():\n"
            "    async with embedded_valkey(Path(sys.argv[1])) as url, Redis.from_url(url) as redis:\n"
            "        await redis.set('k', 'kept')\n"
            "        print('written', flush=True)\n"
            "        await asyncio.sleep(600)\n"
            "asyncio.run(main())\n"
        )
        manager = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, str(data_dir), cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        assert manager.stdout is not None
        async with asyncio.timeout(60):
            assert await manager.stdout.readline() == b"written\n"
        left.append(recorded(data_dir))
        manager.kill()
        await manager.wait()
        return left[-1]

    yield leave
    for one in left:
        embedded._signal(embedded._Record(one.socket, one.pid, one.started), signal.SIGKILL)


async def get(url: str, key: str = "k") -> str | None:
    async with Redis.from_url(url, decode_responses=True) as redis:
        value = await redis.get(key)
        return None if value is None else str(value)


# ── start and end ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_was_written_is_there_at_the_next_start(tmp_path: Path) -> None:
    async with embedded_valkey(tmp_path / "data") as url:
        async with Redis.from_url(url) as redis:
            await redis.set("k", "kept")
        pid = recorded(tmp_path / "data").pid
    assert gone(pid)
    assert not list((tmp_path / "data" / "valkey").glob("*.sock"))
    async with embedded_valkey(tmp_path / "data") as url:
        assert await get(url) == "kept"


async def test_a_start_that_is_broken_off_leaves_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    spawn, spawning = embedded._Server._spawn, threading.Event()

    def slow(self: embedded._Server, binary: Path) -> subprocess.Popen[bytes]:
        spawning.set()
        time.sleep(0.3)  # long enough for the cancellation to come first
        pids.append((child := spawn(self, binary)).pid)
        return child

    async def start() -> None:
        async with embedded_valkey(tmp_path / "data"):
            pass

    monkeypatch.setattr(embedded._Server, "_spawn", slow)
    starting = asyncio.create_task(start())
    await asyncio.to_thread(spawning.wait, 30)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert len(pids) == 1
    assert gone(pids[0])


async def test_it_is_private_durable_and_evicts_nothing(tmp_path: Path) -> None:
    async with embedded_valkey(tmp_path / "data") as url, Redis.from_url(url, decode_responses=True) as redis:
        place = recorded(tmp_path / "data")
        assert stat.S_IMODE(os.stat(Path(place.socket).parent).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(place.socket).st_mode) == 0o700
        wanted = {
            "port": "0", "appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction",
            "save": "", "aof-load-truncated": "yes",
        }  # fmt: skip
        for name, value in wanted.items():
            assert await redis.config_get(name) == {name: value}
        store = RedisStore.at(url)
        await store.settle()
        assert await store.warnings() == []
        await redis.config_set("appendonly", "no")
        await redis.config_set("maxmemory-policy", "allkeys-lru")
        assert [warning.split("`")[1] for warning in await store.warnings()] == [
            "appendonly no",
            "maxmemory-policy allkeys-lru",
        ]
        await store.close()


async def test_a_failure_inside_ends_the_server_too(tmp_path: Path) -> None:
    pids = []

    async def failing() -> None:
        async with embedded_valkey(tmp_path):
            pids.append(recorded(tmp_path).pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await failing()
    assert gone(pids[0])


async def test_a_cancelled_manager_ends_the_server_too(tmp_path: Path) -> None:
    ready = asyncio.Event()

    async def manager() -> None:
        async with embedded_valkey(tmp_path):
            ready.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(manager())
    await ready.wait()
    pid = recorded(tmp_path).pid
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gone(pid)


async def test_a_data_directory_with_a_very_long_name_works_and_leaves_nothing_elsewhere(tmp_path: Path) -> None:
    data_dir = tmp_path / ("long " * 20) / "ünï'\"\\ %41?#"
    async with embedded_valkey(data_dir) as url:
        place = recorded(data_dir)
        assert len(os.fsencode(place.socket)) <= embedded.SOCKET_PATH_MAX_BYTES
        assert not Path(place.socket).is_relative_to(data_dir)
        assert stat.S_IMODE(Path(place.socket).parent.stat().st_mode) == 0o700
        async with Redis.from_url(url) as redis:
            await redis.set("k", "kept")
    assert not Path(place.socket).parent.exists()
    async with embedded_valkey(data_dir) as url:
        assert await get(url) == "kept"


async def test_an_odd_name_needs_no_other_place(tmp_path: Path) -> None:
    data_dir = Path(os.path.relpath(tmp_path)) / "a b'\"%2F?#"
    async with embedded_valkey(data_dir) as url:
        assert await get(url) is None


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "valkey" / "appendonlydir").mkdir(parents=True)
    (tmp_path / "valkey" / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(EmbeddedStoreError, match=r"(?s)ended with 1; its last words.*manifest"):
        async with embedded_valkey(tmp_path):
            pytest.fail("it started")


async def test_a_cut_off_last_write_does_not_keep_it_from_starting(tmp_path: Path) -> None:
    """F17"""
    async with embedded_valkey(tmp_path) as url, Redis.from_url(url) as redis:
        await redis.set("k", "kept")
        await redis.set("last", "x" * 1000)
    (tail,) = (tmp_path / "valkey" / "appendonlydir").glob("*.incr.aof")
    os.truncate(tail, tail.stat().st_size - 500)
    async with embedded_valkey(tmp_path) as url:
        assert await get(url) == "kept"
        assert await get(url, "last") is None


# ── crashes and left-overs ──────────────────────────────────────────────────────────────────────────────────────────


async def test_a_server_left_by_a_killed_manager_is_used_again(tmp_path: Path, left_behind: LeaveBehind) -> None:
    left = await left_behind(tmp_path)
    assert not gone(left.pid)
    async with embedded_valkey(tmp_path) as url:
        assert await get(url) == "kept"
        assert recorded(tmp_path) == left
    assert gone(left.pid)


async def test_it_is_found_again_even_where_the_record_of_it_was_lost(tmp_path: Path, left_behind: LeaveBehind) -> None:
    left = await left_behind(tmp_path)
    (tmp_path / "valkey" / "server.json").unlink()
    async with embedded_valkey(tmp_path) as url:
        assert await get(url) == "kept"
        assert recorded(tmp_path) == left
    assert gone(left.pid)


async def test_a_left_over_that_does_not_answer_is_ended_first(
    tmp_path: Path, left_behind: LeaveBehind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "STOP_SEC", 1.0)
    left = await left_behind(tmp_path)
    os.kill(left.pid, signal.SIGSTOP)
    async with embedded_valkey(tmp_path) as url:
        assert gone(left.pid)
        assert recorded(tmp_path).pid != left.pid
        assert await get(url) == "kept"


async def test_a_recycled_process_id_is_never_signalled(tmp_path: Path, left_behind: LeaveBehind) -> None:
    bystander = await asyncio.create_subprocess_exec("sleep", "600")
    left = await left_behind(tmp_path)
    os.kill(left.pid, signal.SIGKILL)
    record = msgspec.structs.replace(left, pid=bystander.pid)
    (tmp_path / "valkey" / "server.json").write_bytes(msgspec.json.encode(record))
    async with embedded_valkey(tmp_path) as url:
        assert await get(url) == "kept"
    assert not gone(bystander.pid)
    bystander.kill()
    await bystander.wait()


async def test_a_stranger_that_holds_the_servers_lock_is_named_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "STOP_SEC", 0.2)
    (tmp_path / "valkey").mkdir()
    stranger = await asyncio.create_subprocess_exec(
        sys.executable, "-c",
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True);"
        " time.sleep(600)",
        str(tmp_path / "valkey" / "server.lock"), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert stranger.stdout is not None
    await stranger.stdout.readline()
    with pytest.raises(EmbeddedStoreError, match=r"server\.lock"):
        async with embedded_valkey(tmp_path):
            pytest.fail("it started")
    assert not gone(stranger.pid)
    stranger.kill()
    await stranger.wait()


async def test_a_second_manager_is_told_who_has_the_directory(tmp_path: Path) -> None:
    async with embedded_valkey(tmp_path) as url:
        with pytest.raises(DataDirBusy, match=rf"pid {os.getpid()}\b.*SOJOURN_DATA_DIR"):
            async with embedded_valkey(tmp_path):
                pytest.fail("two managers share a directory")
        assert await get(url) is None


# ── a server that dies, hangs or refuses while the manager works ────────────────────────────────────────────────────


async def test_a_killed_server_is_a_typed_error_then_back_with_all_it_acknowledged(tmp_path: Path) -> None:
    """F15"""
    loop = asyncio.get_running_loop()
    async with embedded_valkey(tmp_path) as url:
        store = RedisStore.at(url)
        await store.settle()
        for round_ in range(3):
            made = [await store.begin_binding(claim(f"{round_}-{number}"), 60, None) for number in range(50)]
            await until(lambda: written(url))  # at once, but where the disk takes more than a second to sync
            os.kill(recorded(tmp_path).pid, signal.SIGKILL)
            began = loop.time()
            await until(lambda: refused(store))
            assert loop.time() - began < 10
            await until(lambda: answers(store))
            for binding in made:
                assert await store.get_binding(ACME, binding.task_id) == binding
        await store.close()


async def test_a_hanging_server_is_a_typed_error_and_late_answers_reach_nobody(tmp_path: Path) -> None:
    """F15"""
    loop = asyncio.get_running_loop()
    async with embedded_valkey(tmp_path) as url:
        store = RedisStore.at(url, max_connections=4)
        await store.settle()
        first, second = [await store.begin_binding(claim(task), 60, None) for task in ("first", "second")]
        pid = recorded(tmp_path).pid
        os.kill(pid, signal.SIGSTOP)
        began = loop.time()
        failures = await asyncio.gather(*(store.get_binding(ACME, "first") for _ in range(100)), return_exceptions=True)
        assert loop.time() - began < 10
        assert all(isinstance(failure, StoreUnavailable) for failure in failures)
        os.kill(pid, signal.SIGCONT)
        for _ in range(20):
            assert await store.get_binding(ACME, "second") == second
            assert await store.get_binding(ACME, "first") == first
        await store.close()


async def test_a_caller_that_is_cancelled_leaves_its_answer_to_nobody(tmp_path: Path) -> None:
    async with embedded_valkey(tmp_path) as url:
        store = RedisStore.at(url, max_connections=2)
        await store.settle()
        first, second = [await store.begin_binding(claim(task), 60, None) for task in ("first", "second")]
        for turns in range(40):
            asked = asyncio.create_task(store.get_binding(ACME, "first"))
            for _ in range(turns % 10):
                await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait([asked])
            assert await store.get_binding(ACME, "second") == second
        assert await store.get_binding(ACME, "first") == first
        await store.close()


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (("CONFIG", "SET", "maxmemory", "1"), "OOM"),
        (("CONFIG", "SET", "min-replicas-to-write", "1"), "NOREPLICAS"),
        (("REPLICAOF", "127.0.0.1", "1"), "READONLY"),
        (("CONFIG", "SET", "requirepass", "x"), ""),  # NOAUTH, on new connections
    ],
    ids=lambda words: words[-2] if isinstance(words, tuple) else "",
)
async def test_a_server_that_refuses_writes_is_a_typed_error_and_changes_nothing(
    tmp_path: Path, refusal: tuple[str, ...], words: str
) -> None:
    """F16"""
    async with embedded_valkey(tmp_path) as url, Redis.from_url(url) as redis:
        await redis.set(keys.settled_key(), "1")
        await redis.execute_command(*refusal)  # type: ignore[no-untyped-call]
        store = RedisStore.at(url)
        with pytest.raises(StoreUnavailable) as failure:
            await store.begin_binding(claim("t"), 60, None)
        assert (failure.value.status, failure.value.retryable) == (503, True)
        assert words in failure.value.message
        with pytest.raises(StoreUnavailable):
            await store.touch_leases("m1", {"s": 1})
        assert await redis.keys("*") == [keys.settled_key().encode()]
        await store.close()
        await redis.config_set("requirepass", "")


@pytest.mark.root
async def test_a_full_disk_is_told_as_such_and_ends_no_server_that_answers(
    tmp_path: Path, left_behind: LeaveBehind
) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    place = tmp_path / "small"
    place.mkdir()
    mounted = await asyncio.to_thread(
        subprocess.run, ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], check=False, timeout=30
    )
    if mounted.returncode != 0:
        pytest.skip("this machine does not let us mount")
    try:
        left = await left_behind(place / "data")
        filler = place / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        async with embedded_valkey(place / "data") as url:
            assert await get(url) == "kept"
            assert not gone(left.pid)
            store = RedisStore.at(url)

            async def told() -> bool:
                try:
                    await store.settle()
                    await store.begin_binding(claim(new_id("t")), 60, None)
                except StoreUnavailable as why:
                    return "MISCONF" in why.message and "disk" in why.message
                return False

            await until(told)
            filler.unlink()
            await until(lambda: answers(store))
            await store.close()
    finally:
        await asyncio.to_thread(subprocess.run, ["umount", "-l", str(place)], check=False, timeout=30)


async def test_a_busy_script_of_somebody_else_is_a_typed_error(tmp_path: Path) -> None:
    """F16"""
    async with embedded_valkey(tmp_path) as url, Redis.from_url(url) as redis, Redis.from_url(url) as other:
        await redis.config_set("busy-reply-threshold", "1")
        endless = asyncio.ensure_future(other.eval("while true do end", 0))
        store = RedisStore.at(url)
        await store.settle()
        await until(lambda: refused(store))
        await redis.script_kill()
        await asyncio.wait([endless])
        assert endless.exception() is not None
        assert await store.get_lease("s") is None
        await store.close()


async def test_no_server_at_all_is_a_typed_error(tmp_path: Path) -> None:
    store = RedisStore.at(f"unix://{tmp_path}/nothing.sock")
    with pytest.raises(StoreUnavailable):
        await store.ping()
    with pytest.raises(StoreUnavailable):
        await store.adopt_binding(claim("t"), LeaseTerms(1, 1, 1))
    await store.close()


async def test_the_store_says_nothing_of_the_address_or_password_it_uses(caplog: pytest.LogCaptureFixture) -> None:
    store = RedisStore.at("redis://user:hunter2canary@127.0.0.1:1/0")
    with pytest.raises(StoreUnavailable) as failure:
        await store.ping()
    assert isinstance(failure.value.__cause__, RedisConnectionError)
    assert "hunter2canary" not in f"{failure.value!r} {failure.value.__cause__!r} {caplog.text}"
    await store.close()


async def test_a_server_without_memory_still_lets_sandboxes_end(tmp_path: Path) -> None:
    """F16"""
    terms = LeaseTerms(100, 10, 1000)
    async with embedded_valkey(tmp_path) as url, Redis.from_url(url) as redis:
        store = RedisStore.at(url)
        await store.settle()
        first, second = [await store.begin_binding(claim(task), 60, None) for task in ("first", "second")]
        assert await store.commit_binding(first, terms)
        await store.touch_leases("m1", {first.sandbox_id: 1})
        await redis.config_set("maxmemory", "1")
        with pytest.raises(StoreUnavailable):
            await store.commit_binding(second, terms)
        with pytest.raises(StoreUnavailable):
            await store.adopt_binding(second, terms)
        with pytest.raises(StoreUnavailable):
            await store.mark(ACME, "task", "key", "f", "p", 60)
        await store.drop_holder("m1")
        await store.abandon_binding(second)
        assert await store.end_binding(first, PodEnded(reason="expired", at=1.0))
        assert await store.list_bindings() == []
        await store.close()
