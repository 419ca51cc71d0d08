"""A stream that goes the short way says the same as one that goes the long way, and holds the command back alike."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import pytest

from executor.wire import FRAMES_TYPE, NDJSON_TYPE, RAW_TYPE, SSE_TYPE, FrameReader
from tests.support.executor_pod import Pod
from tests.support.streams import Ends, connection

COMMAND = "printf out; sleep 0.05; printf err >&2; sleep 0.05; head -c 300000 /dev/zero; exit 3"


def connected(pod: Pod) -> AbstractAsyncContextManager[Ends]:
    return connection(asyncio.open_unix_connection(pod.process.socket))


def transport_of(writer: asyncio.StreamWriter) -> asyncio.Transport:
    assert isinstance(writer.transport, asyncio.Transport)
    return writer.transport


def request(pod: Pod, body: object, accept: str, *, path: str = "/v1/exec", extra: str = "") -> bytes:
    data = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: pod\r\nAuthorization: Bearer {pod.process.token}\r\nAccept: {accept}\r\n{extra}"
        f"Content-Length: {len(data)}\r\n\r\n"
    ).encode() + data


async def answer(reader: asyncio.StreamReader) -> tuple[int, str, bytes]:
    """(status, content type, body without its chunks' sizes) of one answer."""
    async with asyncio.timeout(60):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        status = int(head.split()[1])
        if "content-length" in lines:
            return status, lines["content-type"], await reader.readexactly(int(lines["content-length"]))
        body = bytearray()
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += await reader.readexactly(size)
            assert await reader.readexactly(2) == b"\r\n"
        assert await reader.readexactly(2) == b"\r\n"
    return status, lines["content-type"], bytes(body)


def told(kind: str, body: bytes) -> tuple[bytes, bytes, dict[str, Any]]:
    """(stdout, stderr, the last event) of a stream's body."""
    out = {"stdout": bytearray(), "stderr": bytearray()}
    if kind == FRAMES_TYPE:
        frames = FrameReader().feed(body)
        assert [code for code, _ in frames if code not in (2, 3)] == [1, 6]
        for code, payload in frames:
            if code in (2, 3):
                stream = out["stdout" if code == 2 else "stderr"]
                assert int.from_bytes(payload[:8], "big") == len(stream)
                assert 8 < len(payload) <= 8 + 65536
                stream += payload[8:]
        return bytes(out["stdout"]), bytes(out["stderr"]), json.loads(frames[-1][1])
    lines = [line[5:] if kind == SSE_TYPE else line for line in body.decode().split("\n")]
    events = [json.loads(line) for line in lines if line.strip().startswith("{")]
    for event in events:
        if event["type"] in out:
            assert event["offset"] == len(out[event["type"]])
            out[event["type"]] += event["text"].encode()
    return bytes(out["stdout"]), bytes(out["stderr"]), events[-1]


@pytest.mark.parametrize("way", ["short", "long"])
@pytest.mark.parametrize("kind", [FRAMES_TYPE, NDJSON_TYPE, SSE_TYPE])
async def test_both_ways_stream_alike(executor: Pod, kind: str, way: str) -> None:
    async with connected(executor) as (reader, writer):
        writer.write(request(executor, {"command": COMMAND}, kind, extra="X-Other: 1\r\n" if way == "long" else ""))
        status, content_type, body = await answer(reader)
        stdout, stderr, last = told(kind, body)
        assert (status, content_type.partition(";")[0]) == (200, kind)
        assert (stdout, stderr) == (b"out" + bytes(300_000), b"err")
        assert (last["exit_code"], last["stdout_bytes"], last["truncated"]) == (3, 300_003, False)


@pytest.mark.parametrize("way", ["short", "long"])
async def test_output_alone_is_the_bytes_of_stdout_and_the_outcome_waits_under_its_id(executor: Pod, way: str) -> None:
    async with connected(executor) as (reader, writer):
        body = {"command": COMMAND, "id": f"raw-{way}"}
        extra = "X-Other: 1\r\n" if way == "long" else ""
        writer.write(request(executor, body, RAW_TYPE, extra=extra))
        status, content_type, data = await answer(reader)
        writer.write(request(executor, {"command": "exit 0"}, RAW_TYPE, extra=extra))
        nothing = await answer(reader)
    assert (status, content_type, data) == (200, RAW_TYPE, b"out" + bytes(300_000))
    assert nothing == (200, RAW_TYPE, b"")
    info = await executor.info(f"raw-{way}")
    assert (info["exit_code"], info["stdout_bytes"], info["stderr_bytes"]) == (3, 300_003, 3)


async def test_output_alone_comes_while_the_command_still_runs(executor: Pod) -> None:
    async with connected(executor) as (reader, writer):
        body = {"command": "echo first; read line; echo $line", "stdin_open": True, "id": "speaks"}
        writer.write(request(executor, body, RAW_TYPE))
        async with asyncio.timeout(60):
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(len(b"6\r\nfirst\n\r\n")) == b"6\r\nfirst\n\r\n"
        assert (await executor.call("POST", "/v1/processes/speaks/stdin", data=b"last\n")).status == 204
        async with asyncio.timeout(60):
            assert await reader.readuntil(b"0\r\n\r\n") == b"5\r\nlast\n\r\n0\r\n\r\n"
    info = await executor.info("speaks")
    assert info["exit_code"] == 0
    assert info["pid"] > 0


async def test_the_head_of_output_alone_comes_while_the_command_is_still_silent(executor: Pod) -> None:
    async with connected(executor) as (reader, writer):
        body = {"command": "read line; echo $line", "stdin_open": True, "id": "silent"}
        writer.write(request(executor, body, RAW_TYPE))
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
        assert b"sandbox-process-id: silent\r\n" in head.lower()
        info = await executor.info("silent")
        assert info["state"] == "running"
        assert info["pid"] > 0
        await executor.call("DELETE", "/v1/processes/silent")


@pytest.mark.parametrize("kind", [FRAMES_TYPE, RAW_TYPE])
@pytest.mark.parametrize("way", ["short", "long"])
async def test_a_stream_of_what_cannot_run_is_an_error_both_ways(executor: Pod, way: str, kind: str) -> None:
    async with connected(executor) as (reader, writer):
        extra = "X-Other: 1\r\n" if way == "long" else ""
        writer.write(request(executor, {"command": ["x"], "cwd": "/nope"}, kind, extra=extra))
        status, content_type, body = await answer(reader)
        assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_cwd")
        assert content_type.startswith("application/json")


async def test_streams_and_plain_commands_take_turns_on_one_connection(executor: Pod) -> None:
    async with connected(executor) as (reader, writer):
        kinds = [FRAMES_TYPE, "*/*", NDJSON_TYPE, FRAMES_TYPE]
        writer.write(b"".join(request(executor, {"command": f"echo {n}"}, kind) for n, kind in enumerate(kinds)))
        for number, kind in enumerate(kinds):
            status, _, body = await answer(reader)
            said = json.loads(body)["stdout"].encode() if kind == "*/*" else told(kind, body)[0]
            assert (status, said) == (200, b"%d\n" % number)


@pytest.mark.parametrize("kind", [FRAMES_TYPE, "*/*"])
async def test_a_session_can_be_called_the_short_way(executor: Pod, kind: str) -> None:
    made = await executor.call("POST", "/v1/sessions", {})
    id = made.json["id"]
    async with connected(executor) as (reader, writer):
        body = b""
        for command in ("X=41; cd /", "echo $((X + 1)) $PWD; (exit 7)"):
            writer.write(request(executor, {"command": command}, kind, path=f"/v1/sessions/{id}/exec"))
            status, _, body = await answer(reader)
            assert status == 200
        last = json.loads(body) if kind == "*/*" else told(kind, body)[2]
        said = last["stdout"].encode() if kind == "*/*" else told(kind, body)[0]
        assert (said, last["exit_code"], last["ended"], last["fresh_shell"]) == (b"42 /\n", 7, False, False)
        for path, sent, code in ((f"{id}x", {"command": "x"}, 404), (id, {"command": "x", "cwd": "/"}, 400)):
            writer.write(request(executor, sent, kind, path=f"/v1/sessions/{path}/exec"))
            assert (await answer(reader))[0] == code
        await executor.call("DELETE", f"/v1/sessions/{id}")


async def test_a_caller_that_does_not_read_holds_the_command_back_and_then_gets_every_byte(executor: Pod) -> None:
    total = 64 << 20
    async with connected(executor) as (reader, writer):
        body = {"command": f"head -c {total} /dev/zero; echo done >&2", "id": "held-back"}
        writer.write(request(executor, body, FRAMES_TYPE))
        transport_of(writer).pause_reading()
        seen = -1

        async def settled() -> int:
            nonlocal seen
            while True:
                now = (await executor.info("held-back"))["stdout_bytes"] if seen >= 0 else 0
                if now == seen and now > 0:
                    return now
                seen = now
                await asyncio.sleep(0.5)

        async with asyncio.timeout(60):
            while (await executor.call("GET", "/v1/processes/held-back")).status != 200:
                await asyncio.sleep(0.05)
            held_at = await settled()
        assert held_at < 8 << 20
        transport_of(writer).resume_reading()
        status, _, data = await answer(reader)
        stdout, stderr, last = told(FRAMES_TYPE, data)
        assert (status, len(stdout), stderr, last["exit_code"], last["truncated"]) == (200, total, b"done\n", 0, False)


async def test_a_second_caller_of_one_command_gets_all_of_it_as_well(executor: Pod) -> None:
    body = {"command": "echo one; sleep 0.5; head -c 200000 /dev/zero; echo two >&2", "id": "joined-stream"}
    async with AsyncExitStack() as stack:
        pairs = [await stack.enter_async_context(connected(executor)) for _ in range(3)]
        for _, writer in pairs:
            writer.write(request(executor, body, FRAMES_TYPE))
        bodies = [(await answer(reader))[2] for reader, _ in pairs]
    assert {told(FRAMES_TYPE, data)[:2] for data in bodies} == {(b"one\n" + bytes(200_000), b"two\n")}


@pytest.mark.parametrize("how", ["kill", "continue"])
async def test_a_stream_that_its_caller_leaves_ends_the_command_only_where_that_was_asked_for(
    executor: Pod, how: str
) -> None:
    id = f"left-{how}"
    async with connected(executor) as (reader, writer):
        body = {"command": "echo begun; sleep 0.7; echo after", "on_disconnect": how, "id": id}
        writer.write(request(executor, body, FRAMES_TYPE))
        await reader.readuntil(b"begun")
    info = await executor.ended(id)
    assert info["reason"] == ("cancelled" if how == "kill" else "exited")
    said = (await executor.output(id)).body
    assert said == (b"begun\n" if how == "kill" else b"begun\nafter\n")
