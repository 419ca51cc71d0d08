"""The `user` field: whom the profile allows is taken on whole, in every call, and nobody else in any."""

from __future__ import annotations

import io
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from executor.app import routes_of
from tests.support.executor_pod import IS_ROOT, ExecutorProcess, Pod, connected, running_executor
from tests.support.sockets import socket_at

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.root,
    pytest.mark.skipif(not IS_ROOT, reason="another user can only be taken on by root"),
]
UID, TEAM, AUDIT = 64_321, 64_400, 64_401
PASSWD = f"agent:x:{UID}:{UID}::/srv/agent:/bin/sh\nother:x:{UID + 1}:{UID + 1}::/:/bin/sh\ntoor:x:0:0::/root:/bin/sh\n"
GROUP = f"team:x:{TEAM}:other,agent\nagent:x:{UID}:\naudit:x:{AUDIT}:agent\nothers:x:{AUDIT + 1}:other\n"
GROUPS = f"{UID} {TEAM} {AUDIT}"
FORBIDDEN = ("root", "0", "toor", "other", str(UID + 1), "no-such-user", "99999999999999999999", "-1", "agent ")


@pytest.fixture(scope="module")
def accounts() -> Iterator[ExecutorProcess]:
    """An executor whose image has further accounts, of which its profile allows `agent`, and `toor` by mistake."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare(1) is not here")
    with tempfile.TemporaryDirectory(prefix="sojourn-test-") as directory:
        mounts = []
        for name, more in (("passwd", PASSWD), ("group", GROUP)):
            Path(directory, name).write_text(Path("/etc", name).read_text() + more)
            Path(directory, name).chmod(0o644)
            mounts.append(f"mount --bind {directory}/{name} /etc/{name}")
        prefix = ("unshare", "-m", "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh")
        with running_executor("split", prefix=prefix, env={"SOJOURN_USERS": "agent,toor"}) as process:
            yield process


@pytest.fixture
async def pod(accounts: ExecutorProcess) -> AsyncIterator[Pod]:
    async with connected(accounts) as pod:
        yield pod


WHO = 'echo "$(id -u) $(id -g) $(id -G) $HOME $USER $LOGNAME"'
AGENT = f"{UID} {UID} {GROUPS} /srv/agent agent agent"


async def test_a_command_has_the_users_ids_groups_of_the_group_file_and_home_of_the_passwd_entry(pod: Pod) -> None:
    """EX17"""
    for name in ("agent", str(UID)):
        assert (await pod.exec(WHO, user=name))["stdout"].strip() == AGENT
    assert (await pod.exec("echo $HOME", user="agent", env={"HOME": "/x"}))["stdout"] == "/x\n"
    mine = pod.user
    assert (await pod.exec(WHO))["stdout"].split()[0] == str(mine.pw_uid)
    assert (await pod.exec("grep -h Groups: /proc/self/status", user="agent"))["stdout"].split()[1:] == GROUPS.split()


async def test_processes_sessions_terminals_and_sockets_have_them_too(pod: Pod) -> None:
    id = await pod.start(WHO, user="agent")
    await pod.ended(id)
    assert (await pod.output(id)).body.decode().strip() == AGENT

    made = await pod.call("POST", "/v1/sessions", {"user": "agent"})
    assert made.status == 201, made.body
    said = await pod.call("POST", f"/v1/sessions/{made.json['id']}/exec", {"command": WHO})
    assert said.json["stdout"].strip() == AGENT
    await pod.call("DELETE", f"/v1/sessions/{made.json['id']}")

    made = await pod.call("POST", "/v1/terminals", {"user": "agent", "command": f"{WHO}; stat -c %u $(tty)"})
    assert made.status == 201, made.body
    headers = {"Authorization": f"Bearer {pod.token}"}
    async with socket_at(pod.session, f"{pod.url}/v1/terminals/{made.json['id']}", headers) as socket:
        await socket.to_end()
    assert socket.stdout.decode().split("\r\n")[:2] == [AGENT, str(UID)]

    async with socket_at(pod.session, f"{pod.url}/v1/exec", headers) as socket:
        await socket.start(WHO, user="agent")
        await socket.to_end()
    assert socket.stdout.decode().strip() == AGENT


async def test_file_calls_have_the_users_rights_and_what_they_make_is_the_users(pod: Pod) -> None:
    place = pod.workspace / "shared"
    place.mkdir()
    os.chown(place, 0, TEAM)
    place.chmod(0o2770)
    secret = place / "for-audit"
    secret.write_text("audited")
    os.chown(secret, 0, AUDIT)
    secret.chmod(0o640)
    me = "user=agent"
    try:
        refused = await pod.call("GET", "/v1/files?path=shared/for-audit")
        assert (refused.status, refused.code) == (403, "permission_denied")
        assert (await pod.call("GET", f"/v1/files?path=shared/for-audit&{me}")).body == b"audited"
        assert (await pod.call("PUT", f"/v1/files?path=shared/new/f&{me}", b"x")).status == 201
        assert (await pod.call("POST", f"/v1/files/mkdir?{me}", {"path": "shared/made"})).status == 201
        moved = await pod.call("POST", f"/v1/files/move?{me}", {"source": "shared/new/f", "target": "shared/g"})
        assert moved.status == 200, moved.body
        changed = await pod.call("POST", f"/v1/files/chmod?{me}", {"path": "shared/g", "mode": 0o640})
        assert changed.status == 200, changed.body
        tar = io.BytesIO()
        with tarfile.open(fileobj=tar, mode="w") as archive:
            archive.addfile(tarfile.TarInfo("unpacked"), io.BytesIO())
        assert (await pod.call("PUT", f"/v1/archive?path=shared/in&{me}", tar.getvalue())).status == 201
        for made in ("new", "made", "g", "in", "in/unpacked"):
            assert (place / made).stat().st_uid == UID, made
        assert len((await pod.call("GET", f"/v1/files/list?path=shared&{me}")).json["entries"]) == 5
        found = await pod.call("GET", f"/v1/files/search?path=shared&content=audited&{me}")
        assert [Path(match["path"]).name for match in found.json["matches"]] == ["for-audit"]
        assert b"audited" in (await pod.call("GET", f"/v1/archive?path=shared&{me}")).body
        assert (await pod.call("GET", "/v1/files/list?path=shared")).code == "permission_denied"
        assert (await pod.call("DELETE", f"/v1/files?path=shared/g&{me}")).status in (200, 204)
        assert not (place / "g").exists()
    finally:
        shutil.rmtree(place)


CALLS: list[tuple[str, str, Any]] = [
    ("POST", "/v1/exec", {"command": "true"}),
    ("POST", "/v1/processes", {"command": "true"}),
    ("POST", "/v1/sessions", {}),
    ("POST", "/v1/terminals", {"command": "true"}),
    ("GET", "/v1/files?path=f", None),
    ("HEAD", "/v1/files?path=f", None),
    ("PUT", "/v1/files?path=forbidden", b"x"),
    ("DELETE", "/v1/files?path=f", None),
    ("GET", "/v1/files/stat?path=f", None),
    ("GET", "/v1/files/list?path=.", None),
    ("GET", "/v1/files/search?name=f", None),
    ("GET", "/v1/files/watch?path=.", None),
    ("POST", "/v1/files/watch", {"path": "."}),
    ("POST", "/v1/files/mkdir", {"path": "forbidden"}),
    ("POST", "/v1/files/move", {"source": "f", "target": "forbidden"}),
    ("POST", "/v1/files/chmod", {"path": "f", "mode": 0o777}),
    ("GET", "/v1/archive?path=.", None),
    ("PUT", "/v1/archive?path=forbidden&format=tar", bytes(10_240)),
]


@pytest.mark.parametrize("user", FORBIDDEN, ids=[repr(user) for user in FORBIDDEN])
async def test_nobody_else_is_taken_on_by_any_call(pod: Pod, user: str) -> None:
    (pod.workspace / "f").write_text("as it was")
    before = sorted(os.listdir(pod.workspace))
    for method, path, body in CALLS:
        if isinstance(body, dict) and not path.startswith("/v1/files"):
            reply = await pod.call(method, path, body | {"user": user})
        else:
            url = f"{path}{'&' if '?' in path else '?'}user={user.replace(' ', '%20')}"
            reply = await pod.call(method, url, body)
        assert reply.status == 403, (method, path, reply.status, reply.body)
        assert method == "HEAD" or reply.code == "user_not_allowed", (method, path, reply.body)
    assert sorted(os.listdir(pod.workspace)) == before
    assert (pod.workspace / "f").read_text() == "as it was"
    headers = {"Authorization": f"Bearer {pod.token}"}
    async with socket_at(pod.session, f"{pod.url}/v1/exec", headers) as socket:
        await socket.start("true", user=user)
        await socket.to_end()
    assert socket.close_code == 4403


def test_the_calls_above_are_all_that_take_a_user() -> None:
    """A new call below these paths has to say whom it acts as."""
    ours = {(method, path.partition("?")[0]) for method, path, _ in CALLS}
    acting = re.compile(r"/v1/(exec|processes|sessions|terminals|files.*|archive)$")
    there = {(route.method, route.path) for route in routes_of(MagicMock()) if acting.match(route.path)}
    lists = {("GET", "/v1/exec"), *(("GET", f"/v1/{name}") for name in ("processes", "sessions", "terminals"))}
    assert there - ours == lists


async def test_users_cannot_reach_each_others_processes(pod: Pod) -> None:
    id = await pod.start("sleep 60")
    pid = (await pod.info(id))["pid"]
    answer = await pod.exec(f"kill -9 {pid}; cat /proc/{pid}/environ", user="agent")
    assert answer["exit_code"] != 0
    assert answer["stdout"] == ""
    assert (await pod.info(id))["state"] == "running"
    await pod.call("DELETE", f"/v1/processes/{id}")
