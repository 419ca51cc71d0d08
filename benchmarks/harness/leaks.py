"""What is left of 10,000 commands, 500 sessions and 300 terminals once they are over: nothing.

Also a test: tests/integration/executor/test_leaks.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from benchmarks.harness.bench import Bench
from benchmarks.harness.memory import tree
from benchmarks.harness.servers import CannotMeasure, Target, executor_server

SETTLE_SEC: Final = 30.0  # for what is given up to be gone
TRIM_SEC: Final = 5.0  # a burst's memory goes back to the system a little after its end
COMMANDS_AT_ONCE: Final = 16
SESSIONS_AT_ONCE: Final = 8
TERMINALS_AT_ONCE: Final = 8
TASKS_METRIC: Final = "sojourn_tasks"
SUBPROTOCOL: Final = "sojourn.v1"
FRAME_STDOUT: Final = 0x02
FRAME_EXIT: Final = 0x06
FRAME_STDIN: Final = 0x11


@dataclass(frozen=True, kw_only=True)
class Amounts:
    commands: int = 10_000
    sessions: int = 500
    terminals: int = 300


class Footing(msgspec.Struct, frozen=True, kw_only=True):
    """What an executor holds, all its processes together."""

    pids: int
    fds: int
    tasks: int
    rss_bytes: int


class Leaks(msgspec.Struct, frozen=True, kw_only=True):
    before: Footing
    after: Footing
    commands: int
    sessions: int
    terminals: int
    seconds: float

    @property
    def left(self) -> dict[str, int]:
        """What there is more of than before."""
        return {name: getattr(self.after, name) - getattr(self.before, name) for name in ("pids", "fds", "tasks")}

    @property
    def rss_growth_bytes(self) -> int:
        return self.after.rss_bytes - self.before.rss_bytes


class LeakRun:
    """Against one executor that nobody else uses. `connector` makes connections to it, `pid` is its main process."""

    def __init__(
        self, pid: int, url: str, headers: dict[str, str], connector: Callable[[], aiohttp.BaseConnector],
        say: Callable[[str], None] = lambda _what: None,
    ) -> None:  # fmt: skip
        self._pid = pid
        self._url = url
        self._headers = headers
        self._connector = connector
        self._say = say

    async def run(self, amounts: Amounts) -> Leaks:
        """Raises AssertionError for a wrong answer, CannotMeasure where /proc tells nothing."""
        # What is made once and kept is no leak: the caches of outcomes, of threads, of what the first terminal needs.
        await self._use(Amounts(commands=1500, sessions=20, terminals=20))
        before = await self._settled(None)
        began = time.monotonic()
        await self._use(amounts)
        seconds = time.monotonic() - began
        after = await self._settled(before)
        return Leaks(
            before=before, after=after, commands=amounts.commands, sessions=amounts.sessions,
            terminals=amounts.terminals, seconds=round(seconds, 3),
        )  # fmt: skip

    async def _use(self, amounts: Amounts) -> None:
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(
            self._url, connector=self._connector(), headers=self._headers, timeout=timeout
        ) as http:
            await self._each("commands", amounts.commands, COMMANDS_AT_ONCE, lambda turn: _command(http, turn))
            await self._each("sessions", amounts.sessions, SESSIONS_AT_ONCE, lambda turn: _session(http, turn))
            await self._each("terminals", amounts.terminals, TERMINALS_AT_ONCE, lambda turn: _terminal(http, turn))

    async def _each(self, what: str, count: int, at_once: int, one: Callable[[int], Awaitable[None]]) -> None:
        turns = iter(range(count))

        async def work() -> None:
            for turn in turns:
                if turn % 500 == 0:
                    self._say(f"leaks: {what}, {turn} of {count}")
                await one(turn)

        async with asyncio.TaskGroup() as group:
            for number in range(min(at_once, count)):
                group.create_task(work(), name=f"{what}-{number}")

    async def _settled(self, goal: Footing | None) -> Footing:
        """Once it no longer changes, or is back at the goal; else as it is when the time is over."""
        await asyncio.sleep(TRIM_SEC)
        give_up = time.monotonic() + SETTLE_SEC
        last = await self._footing()
        while True:
            await asyncio.sleep(0.5)
            now = await self._footing()
            counts, wanted = (now.pids, now.fds, now.tasks), goal or last
            if counts == (wanted.pids, wanted.fds, wanted.tasks) or time.monotonic() > give_up:
                return now
            last = now

    async def _footing(self) -> Footing:
        async with (
            aiohttp.ClientSession(self._url, connector=self._connector(), headers=self._headers) as http,
            http.get("/metrics") as answer,
        ):
            text = await answer.text()
            tasks = next(float(line.split()[1]) for line in text.splitlines() if line.startswith(TASKS_METRIC + " "))
            pids = tree(self._pid)
            fds = sum(map(_descriptors, pids))
        return Footing(pids=len(pids), fds=fds, tasks=int(tasks), rss_bytes=sum(map(_rss_bytes, pids)))


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except PermissionError as why:
        raise CannotMeasure("only root may count the descriptors of an executor") from why


def _rss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


async def _call(http: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    async with http.request(method, path, data=data) as answer:
        text = await answer.read()
        assert answer.status < 300, (path, answer.status, text)
        found: dict[str, Any] = json.loads(text) if text else {}
        return found


async def _command(http: aiohttp.ClientSession, turn: int) -> None:
    """Every kind of end: well, badly, by a signal, with a timeout, not found; and every tenth with a descendant."""
    if turn % 1000 == 999:
        done = await _call(http, "POST", "/v1/exec", {"command": "sleep 60", "timeout_sec": 0.05, "grace_sec": 0.05})
        assert done["timed_out"], done
    elif turn % 10 == 9:
        commands = ("exit 3", "kill -9 $$", "sleep 0.01 & echo $!", ["/nonexistent"])
        done = await _call(http, "POST", "/v1/exec", {"command": commands[turn // 10 % 4]})
        assert done["exit_code"] == (3, 137, 0, 127)[turn // 10 % 4], done
    else:
        done = await _call(http, "POST", "/v1/exec", {"command": ["echo", str(turn)]})
        assert done["stdout"] == f"{turn}\n", done


async def _session(http: aiohttp.ClientSession, turn: int) -> None:
    id = (await _call(http, "POST", "/v1/sessions", {}))["id"]
    await _call(http, "POST", f"/v1/sessions/{id}/exec", {"command": f"X={turn}"})
    command = "echo $X; (sleep 30 &)" if turn % 20 == 19 else "echo $X"
    done = await _call(http, "POST", f"/v1/sessions/{id}/exec", {"command": command})
    assert done["stdout"] == f"{turn}\n", done
    await _call(http, "DELETE", f"/v1/sessions/{id}?kill_descendants=true")


async def _terminal(http: aiohttp.ClientSession, turn: int) -> None:
    """Two in three end by themselves, the others are hung up on; every one is connected to, and typed into."""
    id = (await _call(http, "POST", "/v1/terminals", {"command": ["cat"]}))["id"]
    typed, seen = f"line {turn}\n".encode(), b""
    async with http.ws_connect(f"/v1/terminals/{id}", protocols=[SUBPROTOCOL]) as socket:
        await socket.send_bytes(bytes([FRAME_STDIN]) + typed)
        async for message in socket:
            kind = message.data[0] if message.type is aiohttp.WSMsgType.BINARY else 0
            if kind == FRAME_STDOUT:
                seen += message.data[9:]
                if seen.count(b"\n") >= 2:  # its echo and cat's answer
                    if turn % 3 == 0:
                        break
                    await socket.send_bytes(bytes([FRAME_STDIN]) + b"\x04")
                    seen = seen.replace(b"\n", b" ")
            elif kind == FRAME_EXIT:
                break
    assert str(turn).encode() in seen, seen
    await _call(http, "DELETE", f"/v1/terminals/{id}")


def measure_leaks(bench: Bench) -> dict[str, object]:
    """In an executor of its own."""
    with executor_server(bench.shop, bench.executor_argv) as target:
        try:
            leaks = asyncio.run(_of(target, bench).run(Amounts()))
        except (AssertionError, aiohttp.ClientError) as why:
            raise CannotMeasure(f"the leak run broke off: {why!r}") from why
    return {
        "leaks": {
            "commands": leaks.commands,
            "sessions": leaks.sessions,
            "terminals": leaks.terminals,
            "seconds": leaks.seconds,
            "before": leaks.before,
            "after": leaks.after,
            "left": leaks.left,
            "rss_growth_bytes": leaks.rss_growth_bytes,
        }
    }


def _of(target: Target, bench: Bench) -> LeakRun:
    option, value = target.address
    headers = dict(header.split(": ", 1) for header in target.headers)
    if option == "--unix":
        return LeakRun(target.pid, "http://pod", headers, lambda: aiohttp.UnixConnector(value, limit=0), bench.say)
    return LeakRun(target.pid, f"http://127.0.0.1:{value}", headers, lambda: aiohttp.TCPConnector(limit=0), bench.say)
