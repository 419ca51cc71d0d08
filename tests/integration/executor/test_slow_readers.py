"""Readers that take next to nothing, and output that nobody waits for: faults F30 and threat S6. What is not read costs
little memory, and other calls are answered as if it were not there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from executor.wire import FRAMES_TYPE, FrameReader, OutputFrame, decode_frame
from tests.support.executor_pod import IS_ROOT, ExecutorProcess, Pod, connected
from tests.support.raw_http import raw, request

pytestmark = [pytest.mark.timeout(240)]
Fresh = Callable[..., AbstractContextManager[ExecutorProcess]]
needs_root = pytest.mark.skipif(not IS_ROOT, reason="nobody but root may look at the memory of an executor")
STALL_SEC = 60  # after it a caller holds its command back no more (executor/process.py)
GIB = 1 << 30


async def worst(pod: Pod, seconds: float) -> float:
    """What 99 in 100 health checks stay below meanwhile, in seconds."""
    took: list[float] = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends or len(took) < 100:
        began = time.monotonic()
        assert (await pod.call("GET", "/healthz")).status == 200
        took.append(time.monotonic() - began)
        await asyncio.sleep(0.01)
    return sorted(took)[-(len(took) // 100) - 1]


@contextlib.contextmanager
def dripping(process: ExecutorProcess, asks: list[bytes], bytes_per_sec: int) -> Iterator[None]:
    """A connection for each of the requests, whose answers are read that slowly."""
    sockets = []
    for ask in asks:
        one = socket.socket(socket.AF_UNIX)
        one.connect(process.socket)
        one.sendall(ask)
        one.setblocking(False)
        sockets.append(one)
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(1.0):
            for one in sockets:
                with contextlib.suppress(OSError):
                    one.recv(bytes_per_sec)

    thread = threading.Thread(target=drip, name="drip")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        for one in sockets:
            one.close()


@pytest.mark.slow
@needs_root
async def test_a_hundred_readers_at_a_kibibyte_a_second_cost_little_and_hold_nobody_up(fresh_executor: Fresh) -> None:
    """F30: while they hold their commands back, and after the stall when they do not any more"""
    with fresh_executor() as process:
        async with connected(process) as pod:
            await pod.call("GET", "/v1/lease")
            calm = await worst(pod, 2)
            before = process.status_kib("VmRSS")
            asks = []
            for number in range(100):
                body = {"command": f"head -c {GIB} /dev/zero; sleep 600", "id": f"slow{number}"}
                asks.append(request(pod, "POST /v1/exec", json.dumps(body).encode(), f"Accept: {FRAMES_TYPE}"))
            began = time.monotonic()
            with dripping(process, asks, 1024):
                held = await worst(pod, 10)
                assert process.status_kib("VmHWM") - before < 64 * 1024, "while they hold back"
                await asyncio.sleep(max(0.0, began + STALL_SEC + 2 - time.monotonic()))
                running = await worst(pod, 10)
                async with asyncio.timeout(60):  # nobody holds them back any more
                    for number in (0, 50, 99):
                        while (await pod.info(f"slow{number}"))["stdout_bytes"] <= 4 << 20:
                            await asyncio.sleep(0.2)
                grown = process.status_kib("VmHWM") - before
    assert grown < 64 * 1024, f"{grown // 1024} MiB"
    assert held < 2 * calm + 1
    assert running < 2 * calm + 2


async def test_who_was_cut_off_for_reading_too_slowly_goes_on_from_his_offset(fresh_executor: Fresh) -> None:
    """F30"""
    with fresh_executor(env={"SOJOURN_READER_SEC": "3"}) as process:
        async with connected(process) as pod:
            body = json.dumps({"command": "seq 1 600000; sleep 600", "id": "numbers"}).encode()
            reader, got = FrameReader(), b""
            async with raw(pod) as connection:
                connection.reader._limit = 1024  # type: ignore[attr-defined]  # so asyncio stops reading too
                connection.send(request(pod, "POST /v1/exec", body, f"Accept: {FRAMES_TYPE}"))
                metrics = ""
                async with asyncio.timeout(60):
                    while "\nsojourn_connections 1.0\n" not in metrics:  # our own
                        metrics = (await pod.call("GET", "/metrics")).body.decode()
                        await asyncio.sleep(0.2)
                text = await connection.ended()
            for kind, payload in reader.feed(dechunked(text.partition(b"\r\n\r\n")[2])):
                event = decode_frame(kind, payload)
                if isinstance(event, OutputFrame):
                    assert event.offset == len(got)
                    got += event.data
            assert got
            whole = b"".join(b"%d\n" % number for number in range(1, 600_001))
            assert len(got) < len(whole)
            async with asyncio.timeout(60):
                while len(got) < len(whole):
                    more = await pod.output("numbers", offset=len(got))
                    assert int(more.headers["Sandbox-Output-Offset"]) == len(got)
                    got += more.body
            assert got == whole


def dechunked(text: bytes) -> bytes:
    """As far as it is whole."""
    out = b""
    while True:
        line, found, rest = text.partition(b"\r\n")
        if not found or len(rest) < int(line or b"0", 16) + 2:
            return out
        size = int(line, 16)
        out, text = out + rest[:size], rest[size + 2 :]


async def test_fast_readers_of_output_on_disk_leave_the_others_their_turn(executor: Pod) -> None:
    """Background output of which most is on disk, followed from its start by eight at once"""
    size = 60 << 20
    id = await executor.start(f"head -c {size} /dev/zero; sleep 600")
    try:
        async with asyncio.timeout(60):
            while (await executor.info(id))["stdout_bytes"] < size:
                await asyncio.sleep(0.1)
        url = f"{executor.url}/v1/processes/{id}/output?stream=stdout&offset=0&follow=true"

        async def follow() -> int:
            count = 0
            async with executor.session.get(url, headers={"Authorization": f"Bearer {executor.token}"}) as answer:
                async for data in answer.content.iter_any():
                    count += len(data)
                    if count == size:
                        break
            return count

        readers = [asyncio.create_task(follow(), name="follow") for _ in range(8)]
        assert await worst(executor, 3) < 10
        async with asyncio.timeout(100):
            assert await asyncio.gather(*readers) == [size] * 8
    finally:
        await executor.call("DELETE", f"/v1/processes/{id}")


async def test_writers_whom_nobody_reads_leave_the_loop_its_time(fresh_executor: Fresh) -> None:
    """S6: background processes that write without end, and what ended commands left behind"""
    with fresh_executor() as process:
        async with connected(process) as pod:
            for _ in range(20):
                await pod.start(["yes"])
                await pod.exec("yes & exit 0")
            assert await worst(pod, 3) < 10
            began = os.times()
            text = (await pod.exec(["echo", "here"]))["stdout"]
            assert text == "here\n"
            assert os.times().elapsed - began.elapsed < 30
