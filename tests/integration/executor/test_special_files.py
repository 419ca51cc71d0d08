"""What is no ordinary file, under every call: refused or bounded, and no thread of ours ever hangs on it (S11)."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import socket
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.executor_pod import IS_ROOT, Pod

pytestmark = pytest.mark.timeout(120)
DEADLINE_SEC = 30.0  # far more than any of these calls takes, far less than a hang
TIB = 1 << 40


@pytest.fixture
def special(executor: Pod) -> Iterator[dict[str, int]]:
    """`special/` with one of each, owned by the command user: name -> type bits."""
    place = executor.workspace / "special"
    place.mkdir()
    os.mkfifo(place / "fifo")
    server = socket.socket(socket.AF_UNIX)
    os.chdir(place)  # a socket's path may only be short
    server.bind("socket")
    os.chdir("/")
    if IS_ROOT:
        os.mknod(place / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
        os.mknod(place / "tty", stat.S_IFCHR | 0o666, os.makedev(5, 0))
        os.mknod(place / "disk", stat.S_IFBLK | 0o666, os.makedev(7, 250))
    (place / "plain").write_text("plain")
    for path in (place, *place.iterdir()):
        os.chown(path, executor.user.pw_uid, executor.user.pw_gid)
        path.chmod(0o777)
    yield {path.name: stat.S_IFMT(path.lstat().st_mode) for path in place.iterdir() if path.name != "plain"}
    server.close()
    shutil.rmtree(place)


async def quickly(pod: Pod, method: str, path: str, body: Any = None) -> Any:
    async with asyncio.timeout(DEADLINE_SEC):
        reply = await pod.call(method, path, body)
    assert reply.status < 500, (method, path, reply.body)
    return reply


async def test_no_call_hangs_on_a_special_file_or_takes_it_for_a_plain_one(
    executor: Pod, special: dict[str, int]
) -> None:
    place = executor.workspace / "special"
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name in special:
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    for name in special:
        path = f"path=special/{name}"
        for method, call, body in (
            ("GET", f"/v1/files?{path}", None),
            ("GET", f"/v1/files?{path}&text=true", None),
            ("HEAD", f"/v1/files?{path}", None),
            ("GET", f"/v1/files/list?{path}", None),
            ("GET", f"/v1/files/search?{path}&name=*", None),
            ("POST", "/v1/files/watch", {"path": f"special/{name}"}),
            ("GET", f"/v1/archive?{path}", None),
            ("PUT", f"/v1/archive?{path}&format=tar", tar.getvalue()),
            ("POST", "/v1/files/mkdir", {"path": f"special/{name}/below"}),
            ("PUT", f"/v1/files?{path}/below", b"x"),
            ("PUT", f"/v1/files?{path}", b"x"),
        ):
            reply = await quickly(executor, method, call, body)
            assert 400 <= reply.status < 500, (method, call, reply.status, reply.body)
            assert method == "HEAD" or reply.code in ("not_a_file", "not_a_directory", "invalid_path", "conflict"), (
                call, reply.body,
            )  # fmt: skip
        shown = await quickly(executor, "GET", f"/v1/files/stat?{path}")
        assert shown.json["type"] not in ("file", "directory", "symlink")
        changed = await quickly(executor, "POST", "/v1/files/chmod", {"path": f"special/{name}", "mode": 0o700})
        assert changed.status in (200, 400, 409)
        moved = await quickly(executor, "POST", "/v1/files/move", {"source": f"special/{name}", "target": "special/m"})
        assert moved.status == 200
        back = await quickly(executor, "POST", "/v1/files/move", {"source": "special/m", "target": f"special/{name}"})
        assert back.status == 200
        assert stat.S_IFMT((place / name).lstat().st_mode) == special[name], "it is what it was"
    listed = await quickly(executor, "GET", "/v1/files/list?path=special")
    assert {entry["name"] for entry in listed.json["entries"]} == {*special, "plain"}
    found = await quickly(executor, "GET", "/v1/files/search?path=special&content=plain")
    assert len(found.json["matches"]) == 1
    packed = await quickly(executor, "GET", "/v1/archive?path=special")
    with tarfile.open(fileobj=io.BytesIO(packed.body)) as got:
        assert {one.name.rpartition("/")[2] for one in got.getmembers() if one.isfile()} == {"plain"}
    whole = await quickly(executor, "PUT", "/v1/archive?path=special&format=tar", tar.getvalue())
    assert whole.status in (400, 409) or all((place / name).is_file() for name in special)
    for name in special:
        assert (await quickly(executor, "DELETE", f"/v1/files?path=special/{name}")).status in (200, 204)
    assert os.listdir(place) == ["plain"]


async def test_a_hundred_calls_at_once_on_a_fifo_leave_every_thread_free(
    executor: Pod, special: dict[str, int]
) -> None:
    """FI20: without a writer an ordinary open would wait for ever."""
    calls = [quickly(executor, "GET", "/v1/files?path=special/fifo") for _ in range(50)]
    calls += [quickly(executor, "PUT", "/v1/files?path=special/fifo", b"x") for _ in range(50)]
    assert {reply.status for reply in await asyncio.gather(*calls)} <= {400, 409}
    assert (await quickly(executor, "GET", "/v1/files?path=special/plain")).body == b"plain"


async def test_a_file_of_a_tebibyte_of_nothing_costs_nothing(any_tier: Pod) -> None:
    made = await any_tier.exec(f"mkdir sparse && truncate -s {TIB} sparse/f")
    if made["exit_code"]:
        pytest.skip(made["stderr"])
    before = any_tier.process.status_kib("VmRSS")
    tail = await any_tier.call("GET", "/v1/files?path=sparse/f", headers={"Range": f"bytes={TIB - 4}-"})
    assert (tail.status, tail.body) == (206, bytes(4))
    async with any_tier.session.get(
        f"{any_tier.url}/v1/files?path=sparse/f", headers={"Authorization": f"Bearer {any_tier.token}"}
    ) as answer:
        assert len(await answer.content.readexactly(32 << 20)) == 32 << 20
    found = await quickly(any_tier, "GET", "/v1/files/search?path=sparse&content=x")
    assert found.json["skipped"]["large"] == 1
    packed = await quickly(any_tier, "GET", "/v1/archive?path=sparse")
    assert packed.code == "too_large"
    assert any_tier.process.status_kib("VmRSS") - before < 32 << 10
    assert (await quickly(any_tier, "DELETE", "/v1/files?path=sparse&recursive=true")).status in (200, 204)


@pytest.mark.parametrize("path", [
    "/proc/self/mem", "/proc/1/environ", "/proc/self/fd/0", "/dev/zero", "/dev/stdin", "/sys/kernel/notes",
    "link-to-proc/self/mem", "link-to-zero", "../../../proc/self/mem",
])  # fmt: skip
async def test_the_kernels_own_files_are_out_of_reach(any_tier: Pod, path: str) -> None:
    links: dict[str, str] = {"link-to-proc": "/proc", "link-to-zero": "/dev/zero"}
    for name, target in links.items():
        Path(any_tier.workspace, name).symlink_to(target)
    try:
        for method, call, body in (
            ("GET", f"/v1/files?path={path}", None),
            ("PUT", f"/v1/files?path={path}", b"x"),
            ("GET", f"/v1/files/list?path={path}", None),
            ("GET", f"/v1/archive?path={path}", None),
            ("POST", "/v1/files/chmod", {"path": path, "mode": 0o777}),
        ):
            if path == "link-to-zero" and method == "PUT":  # which replaces the link, and goes nowhere through it
                continue
            reply = await quickly(any_tier, method, call, body)
            assert (reply.status, reply.code) == (400, "invalid_path"), (method, call, reply.body)
    finally:
        for name in links:
            Path(any_tier.workspace, name).unlink()
