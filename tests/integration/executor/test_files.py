"""The file calls of a running executor, over HTTP."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from executor.config import ExecutorConfig
from executor.errors import ExecutorError
from executor.files import FileService
from executor.isolation import CommandUser
from executor.routes.files import files_routes
from tests.support.streams import connection

IS_ROOT = os.geteuid() == 0
TOKEN = "test-token"
MiB = 1 << 20


@dataclass(frozen=True)
class Pod:
    workspace: Path
    socket: str


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


class Client:
    def __init__(self, pod: Pod) -> None:
        self.workspace = pod.workspace
        headers = {"Authorization": f"Bearer {TOKEN}"}
        self.http = aiohttp.ClientSession("http://pod", connector=aiohttp.UnixConnector(pod.socket), headers=headers)

    async def call(self, method: str, url: str, params: dict[str, str] | None = None, **options: Any) -> Reply:
        async with self.http.request(method, url, params=params, **options) as response:
            return Reply(response.status, response.headers, await response.read())

    async def put(self, path: str, data: Any, **options: Any) -> Reply:
        return await self.call("PUT", "/v1/files", {"path": path, **options.pop("params", {})}, data=data, **options)

    async def get(self, path: str, **options: Any) -> Reply:
        return await self.call("GET", "/v1/files", {"path": path, **options.pop("params", {})}, **options)

    async def exec(self, *argv: str) -> Any:
        return (await self.call("POST", "/v1/exec", json={"command": list(argv)})).json


@pytest.fixture(scope="module")
def pod() -> Iterator[Pod]:
    """A real executor, as root in the split tier, started under a umask that is nobody's wish for files."""
    base = Path(tempfile.mkdtemp(prefix="executor-", dir="/var/tmp"))
    base.chmod(0o755)
    workspace, address = base / "ws", f"{base}/executor.sock"
    env = {
        "PATH": os.environ["PATH"],
        "SOJOURN_POD_TOKEN_SHA256": hashlib.sha256(TOKEN.encode()).hexdigest(),
        "SOJOURN_EXECUTOR_SOCKET": address,
        "SOJOURN_WORKSPACE": str(workspace),
        **({"SOJOURN_COMMAND_USER": "nobody"} if IS_ROOT else {}),
    }
    workspace.mkdir(0o755)
    command = [sys.executable, "-m", "executor"]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, umask=0o077) as process:
        assert process.stderr is not None
        try:
            seen = b""
            while b"executor_ready" not in seen:
                line = process.stderr.readline()
                seen += line
                assert line, seen.decode()
            yield Pod(workspace, address)
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
            assert process.wait(30) == 128 + signal.SIGTERM
            assert b"request_failed" not in rest, rest.decode()  # nothing above was a defect of ours
        finally:
            if process.poll() is None:
                process.kill()
            shutil.rmtree(base)


@pytest.fixture
async def client(pod: Pod) -> AsyncIterator[Client]:
    for path in pod.workspace.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    client = Client(pod)
    yield client
    await client.http.close()


def left_in(workspace: Path) -> list[str]:
    return sorted(os.listdir(workspace))


async def raw(address: str, head: str, body: bytes = b"", *headers: str) -> bytes:
    """The whole answer to a request written by hand."""
    lines = [f"{head} HTTP/1.1", "Host: pod", f"Authorization: Bearer {TOKEN}", "Connection: close", *headers, "", ""]
    async with connection(asyncio.open_unix_connection(address)) as (reader, writer), asyncio.timeout(60):
        writer.write("\r\n".join(lines).encode() + body)
        return await reader.read()


async def oversized(address: str, head: str, body: bytes) -> None:
    """Sends the body with and without its length ahead; both are refused, and heard to be."""
    pieces = [body[start : start + 65_536] for start in range(0, len(body), 65_536)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    for sent, header in ((body, f"Content-Length: {len(body)}"), (chunks, "Transfer-Encoding: chunked")):
        answer = await raw(address, head, sent, header)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b'"too_large"' in answer


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("size", [0, 18_432, 19_456, MiB - 1, MiB + 1, 100 * MiB])
async def test_content_of_every_size_comes_back_whole(client: Client, size: int) -> None:
    """FI01"""
    body = os.urandom(min(size, MiB)) * (size // MiB + 1)
    body = body[:size]
    put = await client.put("dir/f", io.BytesIO(body))
    assert (put.status, put.json["size"], put.json["mode"]) == (201, size, 0o644)
    got = await client.get("dir/f")
    assert got.status == 200
    assert got.headers["ETag"] == put.headers["ETag"] == put.json["etag"]
    assert hashlib.sha256(got.body).digest() == hashlib.sha256(body).digest()


@pytest.mark.parametrize("size", [122_880, 131_071, 131_072])
async def test_long_texts_do_not_hang(client: Client, size: int) -> None:
    """FI05"""
    async with asyncio.timeout(10):
        assert (await client.put("f", "a" * size)).status == 201
        assert (await client.get("f", params={"text": "true"})).body == b"a" * size


async def test_a_stream_without_a_length_arrives_whole(client: Client) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for n in range(200):
            yield b"%06d" % n * 1000

    reply = await client.put("f", pieces())
    assert (reply.status, reply.json["size"]) == (201, 1_200_000)
    expected = b"".join(b"%06d" % n * 1000 for n in range(200))
    assert (await client.get("f")).body == expected


async def test_readers_see_only_whole_old_or_whole_new_content(client: Client) -> None:
    """FI07: a reader's file and a command's `cat` are never empty or mixed, whatever is written meanwhile."""
    target = client.workspace / "f"
    target.write_bytes(b"A" * 262_144)
    target.chmod(0o755)
    owner = 2000 if IS_ROOT else os.geteuid()
    os.chown(target, owner, -1)
    whole = {hashlib.sha256(letter * 262_144).hexdigest() for letter in (b"A", b"B")}
    done = asyncio.Event()
    seen: set[str] = set()

    async def read() -> None:
        while not done.is_set():
            seen.add(hashlib.sha256((await client.get("f")).body).hexdigest())

    async def cat() -> None:
        while not done.is_set():
            seen.add((await client.exec("sha256sum", "f"))["stdout"].split()[0])

    async def write() -> None:
        for n in range(200):
            assert (await client.put("f", (b"A", b"B")[n % 2] * 262_144)).status == 200
        done.set()

    await asyncio.gather(write(), *(read() for _ in range(4)), cat())
    assert seen == whole
    status = target.stat()
    assert (status.st_mode & 0o7777, status.st_uid) == (0o755, owner)
    assert left_in(client.workspace) == ["f"]


async def test_files_made_through_the_api_are_the_command_user_s(client: Client) -> None:
    await client.put("dir/script", b"#!/bin/sh\necho ran; echo more >> dir/script; id -u\n", params={"mode": "755"})
    result = await client.exec("./dir/script")
    uid = (client.workspace / "dir/script").stat().st_uid
    assert result["stdout"].split() == ["ran", str(uid)]
    assert uid == (client.workspace / "dir").stat().st_uid
    if IS_ROOT:
        assert uid != 0
    (client.workspace / "secret").write_bytes(b"")
    (client.workspace / "secret").chmod(0o000)
    assert not IS_ROOT or (await client.get("secret")).code == "permission_denied"


async def test_bytes_that_are_no_text_are_refused_as_text_only(client: Client) -> None:
    """FI15"""
    await client.put("f", b"\xff\xfe")
    reply = await client.get("f", params={"text": "true"})
    assert (reply.status, reply.code) == (400, "not_utf8")
    assert "binary" in reply.json["error"]["message"]
    assert (await client.get("f")).body == b"\xff\xfe"
    await client.put("f", "né".encode())
    reply = await client.get("f", params={"text": "true"})
    assert reply.body.decode() == "né"
    assert reply.headers["Content-Type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize("name", ["a%20b +é#?.txt", "a b", "a\nb", "%2e%2e", "&path=x", "\U0001f600", "a;b", "'\"\\"])
async def test_odd_names_are_taken_literally(client: Client, name: str) -> None:
    """FI17"""
    reply = await client.put(name, name.encode())
    assert (reply.status, reply.json["name"]) == (201, name)
    assert left_in(client.workspace) == [name]
    assert (await client.get(name)).body == name.encode()
    listed = (await client.call("GET", "/v1/files/list")).json["entries"]
    assert [entry["name"] for entry in listed] == [name]
    assert (await client.call("DELETE", "/v1/files", {"path": name})).status == 204
    assert left_in(client.workspace) == []


async def test_names_that_are_no_utf8_are_reached_by_their_bytes(client: Client, pod: Pod) -> None:
    with open(os.fsencode(client.workspace) + b"/\xff", "wb") as file:
        file.write(b"content")
    entry = (await client.call("GET", "/v1/files/list")).json["entries"][0]
    assert base64.b64decode(entry["name_base64"]) == b"\xff"
    answer = await raw(pod.socket, "GET /v1/files?path=%FF")
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"content")
    assert b" 404 " in (await raw(pod.socket, "GET /v1/files?path=%FE")).splitlines()[0]


async def test_a_listing_with_special_files_returns_at_once(client: Client) -> None:
    """FI19"""
    os.mkfifo(client.workspace / "fifo")
    (client.workspace / "dangling").symlink_to("nowhere")
    (client.workspace / "closed").mkdir(0o000)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(client.workspace / "socket"))
        async with asyncio.timeout(10):
            reply = await client.call("GET", "/v1/files/list", {"depth": "5"})
            assert [entry["type"] for entry in reply.json["entries"]] == ["directory", "symlink", "fifo", "socket"]
            for name, code in (("fifo", "not_a_file"), ("socket", "not_a_file"), ("dangling", "invalid_path")):
                assert (await client.get(name)).code == code
    (client.workspace / "closed").chmod(0o700)  # so that the next test may clear it away


async def test_the_name_inside_a_multipart_body_decides_nothing(client: Client, pod: Pod) -> None:
    """FI09: the body is the content, whatever it calls itself"""
    form = aiohttp.FormData()
    form.add_field("file", b"inside", filename="../../etc/x")
    reply = await client.put("ok.txt", form)
    assert reply.status in (200, 201, 400, 415)
    assert left_in(client.workspace) == (["ok.txt"] if reply.status < 300 else [])
    assert not (pod.workspace.parent / "etc").exists()
    assert not Path("/etc/x").exists()


@pytest.mark.parametrize(
    ("header", "status", "start", "end"),
    [
        ("bytes=0-0", 206, 0, 1),
        ("bytes=2-5", 206, 2, 6),
        ("bytes=7-", 206, 7, 10),
        ("BYTES=7-", 206, 7, 10),
        ("bytes=7-99", 206, 7, 10),
        ("bytes=-3", 206, 7, 10),
        ("bytes=-99", 206, 0, 10),
        ("bytes=0-1,4-5", 200, 0, 10),
        ("bytes=5-2", 200, 0, 10),
        ("lines=1-2", 200, 0, 10),
        ("bytes=-", 200, 0, 10),
        ("bytes=" + "9" * 30 + "-", 200, 0, 10),
    ],
)
async def test_one_range_of_bytes_is_served_and_other_ranges_ignored(
    client: Client, header: str, status: int, start: int, end: int
) -> None:
    await client.put("f", b"0123456789")
    reply = await client.get("f", headers={"Range": header})
    assert (reply.status, reply.body) == (status, b"0123456789"[start:end])
    if status == 206:
        assert reply.headers["Content-Range"] == f"bytes {start}-{end - 1}/10"
    head = await client.call("HEAD", "/v1/files", {"path": "f"}, headers={"Range": header})
    assert (head.status, head.body, head.headers["Content-Length"]) == (200, b"", "10"), "RFC 9110, 14.2: only for GET"


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=10-20", "bytes=-0"])
async def test_a_range_outside_the_file_is_not_satisfiable(client: Client, header: str) -> None:
    await client.put("f", b"0123456789")
    reply = await client.get("f", headers={"Range": header})
    assert (reply.status, reply.code) == (416, "range_not_satisfiable")
    assert reply.json["error"]["details"] == {"size": 10}


async def test_etags_spare_a_download_and_guard_a_write(client: Client) -> None:
    etag = (await client.put("f", b"one", headers={"If-None-Match": "*"})).json["etag"]
    assert (await client.put("f", b"two", headers={"If-None-Match": "*"})).status == 412
    unchanged = await client.get("f", headers={"If-None-Match": etag})
    assert (unchanged.status, unchanged.body) == (304, b"")
    new = await client.put("f", b"two", headers={"If-Match": etag})
    assert new.status == 200
    assert (await client.put("f", b"three", headers={"If-Match": etag})).code == "precondition_failed"
    assert (await client.get("f", headers={"If-None-Match": etag})).body == b"two"
    assert (await client.get("f", headers={"Range": "bytes=0-0", "If-Range": etag})).status == 200
    assert (await client.get("f", headers={"Range": "bytes=0-0", "If-Range": new.json["etag"]})).status == 206
    assert (await client.get("f", headers={"If-Match": etag})).status == 412
    stale = await client.call("DELETE", "/v1/files", {"path": "f"}, headers={"If-Match": etag})
    assert stale.status == 412
    assert left_in(client.workspace) == ["f"]


async def test_directories_are_made_listed_moved_and_deleted(client: Client) -> None:
    made = await client.call("POST", "/v1/files/mkdir", json={"path": "a/b"})
    assert (made.status, made.json["type"], made.json["mode"]) == (201, "directory", 0o755)
    assert (await client.call("POST", "/v1/files/mkdir", json={"path": "a/b"})).status == 200
    await client.put("a/b/f", b"x")
    moved = await client.call("POST", "/v1/files/move", json={"source": "a", "target": "c"})
    assert (moved.status, moved.json["path"]) == (200, f"{client.workspace}/c")
    stat = await client.call("GET", "/v1/files/stat", {"path": "c/b/f"})
    assert (stat.json["type"], stat.json["size"]) == ("file", 1)
    page = (await client.call("GET", "/v1/files/list", {"path": "c", "depth": "2", "limit": "1"})).json
    assert ([entry["name"] for entry in page["entries"]], page["truncated"]) == (["b"], True)
    page = (await client.call("GET", "/v1/files/list", {"path": "c", "depth": "2", "after": page["next"]})).json
    assert [entry["name"] for entry in page["entries"]] == ["f"]
    assert (await client.call("DELETE", "/v1/files", {"path": "c"})).code == "conflict"
    assert (await client.call("DELETE", "/v1/files", {"path": "c", "recursive": "true"})).status == 204
    assert (await client.call("DELETE", "/v1/files", {"path": "c"})).code == "file_not_found"


@pytest.mark.parametrize(
    "path", ["../x", "a/../../x", "/etc/passwd", "/", "", "a\0b", "x" * 256, "d/" * 2049, "/proc/self/mem", "link/f"]
)
async def test_paths_out_of_the_workspace_are_refused_by_every_call(client: Client, path: str) -> None:
    (client.workspace / "link").symlink_to("/etc")
    replies = [
        await client.put(path, b"x"),
        await client.get(path),
        await client.call("DELETE", "/v1/files", {"path": path}),
        await client.call("GET", "/v1/files/stat", {"path": path}),
        await client.call("GET", "/v1/files/list", {"path": path}),
        await client.call("POST", "/v1/files/mkdir", json={"path": path}),
        await client.call("POST", "/v1/files/move", json={"source": path, "target": "x"}),
        await client.call("POST", "/v1/files/move", json={"source": "link", "target": path}),
    ]
    assert [(reply.status, reply.code) for reply in replies] == [(400, "invalid_path")] * len(replies)
    assert left_in(client.workspace) == ["link"]


@pytest.mark.parametrize(
    ("method", "url", "params"),
    [
        ("GET", "/v1/files", {}),
        ("GET", "/v1/files", {"path": "f", "unknown": "1"}),
        ("GET", "/v1/files", {"path": "f", "text": "maybe"}),
        ("PUT", "/v1/files", {"path": "f", "mode": "888"}),
        ("PUT", "/v1/files", {"path": "f", "mode": "4755"}),
        ("GET", "/v1/files/list", {"depth": "0"}),
        ("GET", "/v1/files/list", {"depth": "1" * 5000}),
        ("GET", "/v1/files/list", {"limit": "-1"}),
        ("GET", "/v1/files/list", {"limit": "²"}),
        ("GET", "/v1/files/list", {"after": "x"}),
    ],
)
async def test_bad_queries_name_the_parameter(client: Client, method: str, url: str, params: dict[str, str]) -> None:
    reply = await client.call(method, url, params)
    assert (reply.status, reply.code) == (400, "invalid_request")
    assert reply.json["error"]["details"]["field"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", None),
        (b"{", None),
        (b'{"path": 1}', "path"),
        (b'{"path": "a", "extra": 1}', "extra"),
        (b"{}", "path"),
        (b'{"path": "a", "mode": "755"}', "mode"),
        (b'{"path": "\xff"}', None),
        (b'{"path": ' + b"[" * 200_000, "path"),
        (b'{"path": "\\ud800"}', None),
        (b'{"path": "a", "mode": 99999}', "mode"),
        (b'{"path": "a", "mode": 1e400}', "mode"),
    ],
)
async def test_bad_bodies_are_refused_and_name_the_field(client: Client, body: bytes, field: str | None) -> None:
    reply = await client.call("POST", "/v1/files/mkdir", data=body)
    assert (reply.status, reply.code) == (400, "invalid_request")
    assert reply.json["error"]["details"].get("field") == field
    assert left_in(client.workspace) == []


async def test_a_body_over_the_limit_is_refused_with_or_without_a_length(client: Client, pod: Pod) -> None:
    await oversized(pod.socket, "POST /v1/files/mkdir", b'{"path": "' + b"a" * (2 * MiB) + b'"}')
    assert left_in(client.workspace) == []


@pytest.mark.parametrize(
    "body", [b"Content-Length: 1000\r\n\r\nonly this", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"]
)
async def test_an_upload_that_breaks_off_is_never_taken_for_the_whole(client: Client, pod: Pod, body: bytes) -> None:
    headers, _, content = body.partition(b"\r\n\r\n")
    await client.put("f", b"old")
    head = b"PUT /v1/files?path=f HTTP/1.1\r\nHost: pod\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n"
    async with connection(asyncio.open_unix_connection(pod.socket)) as (_, writer):
        writer.write(head + headers + b"\r\n\r\n" + content)
        await writer.drain()
        await until(lambda: len(left_in(client.workspace)) == 2)  # it has begun
    await until(lambda: len(left_in(client.workspace)) == 1)
    assert (client.workspace / "f").read_bytes() == b"old"


async def test_a_file_cut_while_it_is_read_breaks_the_answer_off(client: Client) -> None:
    size = 64 * MiB
    with open(client.workspace / "f", "wb") as file:
        file.truncate(size)  # sparse
    (client.workspace / "f").chmod(0o644)
    async with client.http.get("/v1/files", params={"path": "f"}) as response:
        assert response.content_length == size
        os.truncate(client.workspace / "f", MiB)
        with pytest.raises(aiohttp.ClientError):
            await response.read()
    assert (await client.get("f", headers={"Range": "bytes=0-9"})).body == b"\0" * 10


# ── with a small limit ──────────────────────────────────────────────────────────────────────────────────────────


@web.middleware
async def typed_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
    except ExecutorError as error:
        return web.json_response({"error": {"code": error.code}}, status=error.status)
    return response


async def test_an_upload_over_the_limit_is_refused_also_without_a_length(tmp_path: Path) -> None:
    """FI03"""
    config = ExecutorConfig(token_sha256="0" * 64, workspace=str(tmp_path))
    user = CommandUser("me", os.geteuid(), os.getegid(), (), "/", "/bin/sh")
    service = FileService(config, user, other_roots=(), max_file_bytes=MiB)
    app = web.Application(middlewares=[typed_errors])
    app.router.add_routes(files_routes(service))
    runner = web.AppRunner(app)
    await runner.setup()
    address = str(tmp_path.parent / "limit.sock")
    await web.UnixSite(runner, address).start()

    await oversized(address, "PUT /v1/files?path=new/f", b"x" * (2 * MiB))
    assert (await raw(address, "PUT /v1/files?path=whole", b"x" * MiB, f"Content-Length: {MiB}")).startswith(
        b"HTTP/1.1 201"
    )
    await runner.cleanup()
    service.close()
    assert left_in(tmp_path) == ["whole"]
