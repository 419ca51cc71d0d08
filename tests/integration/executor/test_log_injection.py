"""What callers name things never makes a line of the log, a header or a metric of its own: threat S24."""

from __future__ import annotations

import asyncio
import json
from typing import Final
from urllib.parse import quote

import pytest

from tests.support.executor_pod import Pod
from tests.support.raw_http import raw, request

pytestmark = [pytest.mark.timeout(120)]
FORGED: Final = '{"at": "2026-01-01T00:00:00.000Z", "level": "info", "event": "forged"}'
NAMES: Final = {
    "line ends": f"a\r\n{FORGED}\r\n",
    "a bare return": f"a\r{FORGED}",
    "other line ends": f"a\u2028{FORGED}\u0085{FORGED}\x0b\x0c",
    "a clipboard": "\x1b]52;c;Zm9yZ2Vk\x07",
    "a link": "\x1b]8;;https://forged.test/\x1b\\forged\x1b]8;;\x1b\\",
    "a title and colours": "\x1b]0;forged\x07\x1b[31m\x9b31m",
    "right to left": "\u202egnp.exe",
    "a header": "a\r\nSet-Cookie: forged=1\r\n\r\nHTTP/1.1 200 OK\r\n\r\nforged",
}


async def send_everywhere(pod: Pod, name: str) -> list[tuple[bytes, bytes]]:
    """The name in each place that takes one; (head, body) of the answers."""
    escaped = quote(name, safe="")
    text = json.dumps
    calls = [
        request(pod, f"GET /{escaped}"),
        request(pod, f"GET /v1/processes/{escaped}"),
        request(pod, f"DELETE /v1/sessions/{escaped}"),
        request(pod, f"GET /v1/terminals/{escaped}"),
        request(pod, f"GET /v1/files?path={escaped}"),
        request(pod, f"PUT /v1/files?path={escaped}", b"x"),
        request(pod, f"GET /v1/files/stat?path={escaped}"),
        request(pod, f"GET /v1/files?path=.&{escaped}=1"),
        request(pod, f"GET /v1/files/list?path=.&user={escaped}"),
        request(pod, f"GET /v1/ports/{escaped}/x"),
        request(pod, f"GET /v1/ports/1/{escaped}"),
        request(pod, "POST /v1/exec", text({"command": [name]}).encode()),
        request(pod, "POST /v1/exec", text({"command": ["true"], "cwd": name}).encode()),
        request(pod, "POST /v1/exec", text({"command": ["true"], "user": name}).encode()),
        request(pod, "POST /v1/exec", text({"command": ["true"], "id": name}).encode()),
        request(pod, "POST /v1/exec", text({"command": ["true"], name: 1}).encode()),
        request(pod, "POST /v1/exec", text({"command": ["true"], "env": {name: name}}).encode()),
        request(pod, "POST /v1/files/mkdir", text({"path": name}).encode()),
        request(pod, "GET /v1/lease", None, "Sandbox-Lease-Sec: " + name.encode("unicode_escape").decode()),
    ]
    raw_calls = [  # where the bytes themselves are no HTTP
        f"GET /{name} HTTP/1.1\r\nHost: pod\r\n\r\n".encode(),
        f"GET /v1/lease HTTP/1.1\r\nHost: pod\r\nX: {name}\r\n\r\n".encode(),
        f"{name} / HTTP/1.1\r\n\r\n".encode(),
        f"GET / {name}\r\n\r\n".encode(),
    ]

    async def one(call: bytes) -> tuple[bytes, bytes]:
        async with raw(pod) as connection:
            connection.send(call)
            try:
                answer = await connection.answer(15)
            except (asyncio.IncompleteReadError, TimeoutError):
                return b"", b""  # half a head, say
            return repr(answer.headers).encode(), answer.body

    got = await asyncio.gather(*(one(call) for call in calls))
    for call in raw_calls:
        try:
            async with asyncio.timeout(3):
                got.append(await one(call))
        except TimeoutError:
            pass
    return got


@pytest.mark.parametrize("what", NAMES)
async def test_a_name_stays_within_its_line_of_the_log_and_out_of_the_headers(executor: Pod, what: str) -> None:
    """S24"""
    since = len(executor.process.log.read_bytes())
    for head, body in await send_everywhere(executor, NAMES[what]):
        assert b"forged" not in head, head
        assert not any(byte < 0x20 or byte == 0x7F for byte in body), body
    for line in executor.process.log.read_bytes()[since:].splitlines():
        assert all(0x20 <= byte < 0x7F for byte in line), line  # everything else is escaped
        event = json.loads(line)
        assert {"at", "level", "event"} <= set(event)
        assert event["event"] != "forged"


async def test_names_by_the_thousand_make_no_metric_of_their_own(executor: Pod) -> None:
    """S24"""

    async def names() -> list[str]:
        text = (await executor.call("GET", "/metrics")).body.decode()
        return sorted(line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#"))

    before = await names()
    for start in range(0, 1000, 100):
        numbers = range(start, start + 100)
        await asyncio.gather(
            *(executor.call("POST", "/v1/exec", {"command": [f"none{n}"], "id": f"n{n}"}) for n in numbers),
            *(executor.call("GET", f"/v1/files/stat?path=none{n}") for n in numbers),
            *(executor.call("GET", f"/none{n}") for n in numbers),
        )
    assert await names() == before
