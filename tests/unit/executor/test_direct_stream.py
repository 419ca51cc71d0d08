"""A direct stream's places that a fast reader never comes to: full connections, gaps, output on disk, silence."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from executor import directstream
from executor.directstream import DirectStream
from executor.output import OutputLog, Spill
from executor.process import Command


class Connection:
    """A transport that says that it is full after `room` bytes, until it is emptied."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room = room
        self.sent = b""
        self.writes = 0
        self.stream: DirectStream | None = None
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True

    def write(self, data: bytes) -> None:
        self.writes += 1
        self.sent += data
        self.room -= len(data)
        if self.room < 0 and self.stream is not None:
            self.stream.pause()

    def writelines(self, parts: list[bytes]) -> None:
        self.write(b"".join(parts))


class Words:
    """Events as words, so that what was sent can be read."""

    content_type = "text/plain"

    def __init__(self, tells_gaps: bool = True) -> None:
        self.tells_gaps = tells_gaps

    def headers(self, _command: Command) -> dict[str, str]:
        return {"Content-Type": self.content_type}

    def started(self, _command: Command, joined: bool) -> bytes:
        return b"[joined]" if joined else b"[started]"

    def heartbeat(self) -> bytes:
        return b"[beat]"

    def output(self, pieces: list[tuple[int, Any]]) -> list[bytes | memoryview]:
        return [(b"[gap %d]" % piece.gap if piece.gap else b"") + piece.data for _stream, piece in pieces]

    def end(self, _command: Command, missed: bool) -> bytes:
        return b"[end, some missed]" if missed else b"[end]"


@pytest.fixture(autouse=True)
def _in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directstream, "writer_for", lambda _accept, _encoding: Words())


class FakeCommand:
    def __init__(self, tail: int = 1 << 20) -> None:
        self.loop = asyncio.get_running_loop()
        self.host = self
        self.id = "x"
        self.pid = 0
        self.tells_pid = True
        self.logs = (OutputLog(0, tail), OutputLog(0, tail))
        self.pumps: list[object] = []
        self.launched: asyncio.Future[None] = self.loop.create_future()
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self.outcome: object | None = None
        self.error: Exception | None = None
        self.caller: DirectStream | None = None
        self.reads = 0
        self.reasons: list[str] = []
        self.watched: list[asyncio.Future[None]] = []

    def caller_read(self) -> None:
        self.reads += 1

    def caller_gone(self) -> None:
        self.caller = None

    def watch(self) -> asyncio.Future[None]:
        self.watched.append(self.loop.create_future())
        return self.watched[-1]

    def end(self, reason: str) -> None:
        self.reasons.append(reason)

    def say(self, data: bytes) -> None:
        self.logs[0].append(data)
        if self.caller is not None:
            self.caller.output_came()
        for one in self.watched:
            if not one.done():
                one.set_result(None)

    def finish(self) -> None:
        self.outcome = object()
        self.ended.set_result(None)


async def streaming(
    command: FakeCommand, connection: Connection, *, joined: bool = False, kills: bool = False
) -> tuple[DirectStream, list[Command]]:
    done: list[Command] = []
    stream = DirectStream(
        cast(asyncio.WriteTransport, connection), cast(Command, command), "words", done.append, encoding="text",
        joined=joined, kills_on_loss=kills,
    )  # fmt: skip
    connection.stream = stream
    command.launched.set_result(None)
    await turns()
    return stream, done


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def body_of(connection: Connection) -> bytes:
    _head, _, rest = connection.sent.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


async def test_output_is_sent_as_it_comes_and_the_end_once() -> None:
    command, connection = FakeCommand(), Connection()
    _stream, done = await streaming(command, connection)
    command.say(b"one ")
    assert body_of(connection) == b"[started]one "
    command.say(b"two ")
    command.finish()
    await turns()
    assert body_of(connection) == b"[started]one two [end]"
    assert len(done) == 1
    assert command.caller is None


async def test_a_stream_begins_as_soon_as_the_pid_is_known_with_the_output_that_is_there_in_one_piece() -> None:
    command, connection = FakeCommand(), Connection()
    DirectStream(
        cast(asyncio.WriteTransport, connection), cast(Command, command), "words", lambda _command: None,
        encoding="text", joined=False, kills_on_loss=False,
    )  # fmt: skip
    command.say(b"early")
    assert connection.sent == b""
    command.pid = 7
    assert command.caller is not None
    command.caller.output_came()
    assert body_of(connection) == b"[started]early"
    assert connection.writes == 1
    command.launched.set_result(None)  # whoever waits for that hears of it a turn later
    command.say(b", more")
    await turns()
    assert body_of(connection) == b"[started]early, more"
    command.finish()
    await turns()
    assert body_of(connection) == b"[started]early, more[end]"


async def test_a_stream_that_tells_no_pid_begins_with_the_first_output() -> None:
    command, connection = FakeCommand(), Connection()
    command.tells_pid = False
    DirectStream(
        cast(asyncio.WriteTransport, connection), cast(Command, command), "words", lambda _command: None,
        encoding="text", joined=False, kills_on_loss=False,
    )  # fmt: skip
    command.say(b"early")
    assert body_of(connection) == b"[started]early"
    command.pid = 7
    command.launched.set_result(None)
    await turns()
    command.say(b", more")
    command.finish()
    await turns()
    assert body_of(connection) == b"[started]early, more[end]"


async def test_a_full_connection_gets_nothing_more_until_it_has_room() -> None:
    command, connection = FakeCommand(), Connection(room=200)
    stream, done = await streaming(command, connection)
    command.say(b"a" * 200)
    command.say(b"b" * 100)
    command.finish()
    await turns()
    assert b"b" not in body_of(connection)[9:]
    assert not done
    connection.room = 1 << 30
    stream.resume()
    assert body_of(connection).endswith(b"a" + b"b" * 100 + b"[end]")
    assert done


async def test_whoever_reads_on_lets_the_command_go_on() -> None:
    command, connection = FakeCommand(), Connection(room=10)
    stream, _done = await streaming(command, connection)
    stream.resume()
    assert command.reads == 1


async def test_after_a_stall_the_stream_goes_on_from_disk_and_tells_what_is_gone(tmp_path: Path) -> None:
    command, connection = FakeCommand(tail=20_000), Connection(room=0)
    stream, done = await streaming(command, connection)
    with ThreadPoolExecutor(1) as workers:
        command.caller_gone()  # it has not read for too long
        log = command.logs[0]
        log.spill = spill = Spill(str(tmp_path), 0, workers, limit=50_000)
        data = random.Random(1).randbytes(400_000)
        for at in range(0, len(data), 20_000):
            log.append(data[at : at + 20_000])
            async with asyncio.timeout(10):
                while spill.first + spill.disk_bytes < log.tail_start:
                    await asyncio.sleep(0.001)
        connection.room = 1 << 30
        stream.resume()
        async with asyncio.timeout(10):
            while not body_of(connection).endswith(data[-1_000:]):
                await asyncio.sleep(0.01)
        command.say(b"more")
        command.finish()
        await turns()
        log.close()
    body = body_of(connection)
    gap = int(body.partition(b"[gap ")[2].partition(b"]")[0])
    assert body == b"[started][gap %d]" % gap + data[gap:] + b"more[end, some missed]"
    assert 0 < gap <= len(data) - 50_000
    assert done


async def test_a_stream_whose_output_is_forgotten_comes_to_its_end(tmp_path: Path) -> None:
    command, connection = FakeCommand(tail=100), Connection(room=0)
    stream, done = await streaming(command, connection)
    with ThreadPoolExecutor(1) as workers:
        command.logs[0].spill = Spill(str(tmp_path), 0, workers)
        command.say(b"x" * 1000)
        command.finish()
        command.logs[0].close()
        connection.room = 1 << 30
        stream.resume()
        async with asyncio.timeout(10):
            while not done:
                await asyncio.sleep(0.01)
    assert b"[end" in body_of(connection)


async def test_one_that_joins_is_woken_as_a_reader_and_never_holds_the_command_back() -> None:
    command, connection = FakeCommand(), Connection()
    _stream, done = await streaming(command, connection, joined=True)
    assert command.caller is None
    command.say(b"said")
    await turns()
    command.say(b" again")
    await turns()
    command.finish()
    await turns()
    assert body_of(connection) == b"[joined]said again[end]"
    assert done


async def test_a_stream_that_cannot_tell_of_a_gap_is_broken_off_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directstream, "writer_for", lambda _accept, _encoding: Words(tells_gaps=False))
    command, connection = FakeCommand(tail=1000), Connection(room=0)
    stream, done = await streaming(command, connection)
    command.caller_gone()
    command.say(b"x" * 20_000)
    command.say(b"y" * 20_000)
    connection.room = 1 << 30
    stream.resume()
    assert connection.aborted
    assert body_of(connection) == b"[started]"
    assert not done


async def test_silence_is_broken_by_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directstream, "HEARTBEAT_SEC", 0.02)
    command, connection = FakeCommand(), Connection()
    await streaming(command, connection)
    async with asyncio.timeout(10):
        while body_of(connection).count(b"[beat]") < 2:
            await asyncio.sleep(0.01)
    command.finish()
    await turns()
    assert body_of(connection).endswith(b"[beat][end]")


@pytest.mark.parametrize("kills", [True, False])
async def test_a_caller_that_hangs_up_is_no_caller_any_more(kills: bool) -> None:
    command, connection = FakeCommand(), Connection()
    stream, done = await streaming(command, connection, kills=kills)
    stream.lost()
    command.say(b"unheard")
    command.finish()
    await turns()
    assert command.caller is None
    assert command.reasons == (["cancelled"] if kills else [])
    assert body_of(connection) == b"[started]"
    assert not done


async def test_what_never_ran_is_left_to_the_connection_to_refuse() -> None:
    command, connection = FakeCommand(), Connection()
    command.error = ValueError("refused")
    _stream, done = await streaming(command, connection)
    assert connection.sent == b""
    assert done
