"""The `user` field through the manager: the profile's list is what counts, in every call of a task."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.support.sockets import socket_at
from tests.support.stack import Stack

IS_ROOT = os.geteuid() == 0
CONFIG = """
[[profiles]]
name = "two"
users = ["sandbox", "worker"]

[projects."dev/default"]
profiles = ["sandboxes-default", "two"]
concurrency = 20
"""


@pytest.fixture(scope="module")
def stack_of_two() -> Iterator[Stack]:
    stack = Stack(config=CONFIG).start()
    yield stack
    stack.remove()


@pytest.fixture
async def two(stack_of_two: Stack) -> AsyncIterator[Stack]:
    async with stack_of_two:
        yield stack_of_two


def calls(stack: Stack, task: str) -> list[tuple[str, str, Any]]:
    """Every call of a task that takes a user: (method, address, JSON body or bytes)."""
    at = stack.task(task)
    return [
        ("POST", f"{at}/exec", {"command": "true"}),
        ("POST", f"{at}/processes", {"command": "true"}),
        ("POST", f"{at}/sessions", {}),
        ("POST", f"{at}/terminals", {"command": "true"}),
        ("GET", f"{at}/files?path=f", None),
        ("HEAD", f"{at}/files?path=f", None),
        ("PUT", f"{at}/files?path=f", b"overwritten"),
        ("GET", f"{at}/files/stat?path=f", None),
        ("GET", f"{at}/files/list?path=.", None),
        ("GET", f"{at}/files/search?name=f", None),
        ("GET", f"{at}/files/watch?path=.", None),
        ("POST", f"{at}/files/mkdir", {"path": "made"}),
        ("POST", f"{at}/files/move", {"source": "f", "target": "g"}),
        ("POST", f"{at}/files/chmod", {"path": "f", "mode": 0o777}),
        ("GET", f"{at}/archive?path=.", None),
        ("PUT", f"{at}/archive?path=made&format=tar", bytes(10_240)),
        ("DELETE", f"{at}/files?path=f", None),
    ]


async def refused(stack: Stack, task: str, user: str) -> None:
    for method, address, body in calls(stack, task):
        options: dict[str, Any] = {}
        if isinstance(body, dict) and "/files" not in address:
            options["json"] = body | {"user": user}
        else:
            address += f"{'&' if '?' in address else '?'}user={user}"
            if body is not None:
                options["data" if isinstance(body, bytes) else "json"] = body
        status, answer = await stack.call(method, address, **options)
        assert status == 403, (method, address, status, answer)
        assert method == "HEAD" or answer["error"]["code"] == "user_not_allowed", (method, address, answer)
    async with socket_at(stack.http, f"{stack.url}{stack.task(task)}/exec", {}) as socket:
        await socket.start("true", user=user)
        await socket.to_end()
    assert socket.close_code == 4403


@pytest.mark.parametrize("user", ["root", "0", "nobody", "worker", "no-such"])
async def test_a_profile_of_one_user_lets_no_call_act_as_another(two: Stack, user: str) -> None:
    await two.exec("plain", "echo kept > f")
    await refused(two, "plain", user)
    assert (await two.exec("plain", "cat f; ls"))["stdout"] == "kept\nf\n"


@pytest.mark.root
@pytest.mark.skipif(not IS_ROOT, reason="another user can only be taken on by root")
async def test_a_profiles_second_user_is_taken_on_in_every_call(two: Stack) -> None:
    me = {"user": "worker"}
    who = 'echo "$(id -un) $(id -u) $(id -G) $HOME $USER"'
    wanted = "worker 1001 1001 /workspace worker"
    assert (await two.exec("both", "id -un; umask 0; mkdir shared", profile="two"))["stdout"] == "sandbox\n"
    assert (await two.exec("both", who, **me))["stdout"].strip() == wanted
    assert (await two.exec("both", "id -u", user="1001"))["stdout"] == "1001\n"
    at = two.task("both")

    status, made = await two.call("POST", f"{at}/sessions", json=me)
    assert status == 201, made
    status, said = await two.call("POST", f"{at}/sessions/{made['id']}/exec", json={"command": who})
    assert (status, said["stdout"].strip()) == (200, wanted)

    status, made = await two.call("POST", f"{at}/processes", json={"command": who, **me})
    assert status == 201, made
    await two.call("GET", f"{at}/processes/{made['id']}?wait_sec=60")
    assert (await two.call("GET", f"{at}/processes/{made['id']}/output?stream=stdout"))[1].decode().strip() == wanted

    status, made = await two.call("POST", f"{at}/terminals", json={"command": who, **me})
    assert status == 201, made
    async with socket_at(two.http, f"{two.url}{at}/terminals/{made['id']}", {}) as socket:
        await socket.to_end()
    assert socket.stdout.decode().strip() == wanted

    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("unpacked"), io.BytesIO())
    for method, address, body in (
        ("PUT", "files?path=shared/f&user=worker", b"x"),
        ("PUT", "archive?path=shared/in&format=tar&user=worker", tar.getvalue()),
    ):
        status, answer = await two.call(method, f"{at}/{address}", data=body)
        assert status == 201, answer
    owners = "stat -c %U shared/f shared/in shared/in/unpacked"
    assert (await two.exec("both", owners))["stdout"].split() == ["worker"] * 3
    assert (await two.exec("both", "chmod 600 shared/f", user="worker"))["exit_code"] == 0
    status, answer = await two.call("GET", f"{at}/files?path=shared/f")
    assert (status, answer["error"]["code"]) == (403, "permission_denied")
    assert await two.call("GET", f"{at}/files?path=shared/f&user=worker") == (200, b"x")
    await refused(two, "both", "root")
