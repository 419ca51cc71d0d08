"""What file calls change in a task or a sandbox outlives a pod that dies without a word: whole stacks with real pods,
over a directory and over a real S3 server."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import shutil
import signal
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manager.providers.local.state import PodRecord
from tests.support.long_lived import ALL, made
from tests.support.s3_server import CREDENTIALS, s3_server
from tests.support.stack import Stack
from tests.support.trees import unpacked

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("zstd") is None, reason="layers need the program zstd"),
]
WAIT_SEC = 120.0
CONFIG = '[projects."dev/default"]\nprofiles = ["sandboxes-default"]\nconcurrency = 50\n'


@pytest.fixture(scope="module", params=["directory", "s3"])
def durable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if request.param == "directory":
        stack = Stack(config=CONFIG).start()
        yield stack
        stack.remove()
        return
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        stack = Stack(
            config=CONFIG, SOJOURN_OBJECTS=server.url("written"), AWS_ACCESS_KEY_ID=CREDENTIALS["access_key_id"],
            AWS_SECRET_ACCESS_KEY=CREDENTIALS["secret_access_key"],
        ).start()  # fmt: skip
        yield stack
        stack.remove()


@pytest.fixture
async def stack(durable: Stack) -> AsyncIterator[Stack]:
    async with durable:
        yield durable


def kill(stack: Stack, pod: str) -> None:
    """As a node would that is gone: nothing is kept, nobody is told."""
    record = msgspec.json.decode((stack.data / "pods" / pod / "pod.json").read_bytes(), type=PodRecord)
    assert record.inner is not None
    os.kill(record.inner.pid, signal.SIGKILL)


async def ran_elsewhere(stack: Stack, task: str, pod: str, command: str) -> Any:
    """The command's answer from the task's next pod."""
    give_up = time.monotonic() + WAIT_SEC
    while True:
        status, answer = await stack.call("POST", f"{stack.task(task)}/exec", json={"command": command})
        if status == 200 and answer["pod_id"] != pod:
            return answer
        assert time.monotonic() < give_up, answer
        await asyncio.sleep(0.1)


async def done(stack: Stack, method: str, path: str, **options: Any) -> Any:
    status, answer = await stack.call(method, path, **options)
    assert status < 300, answer
    return answer


def archive(files: dict[str, bytes]) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o640
            tar.addfile(info, io.BytesIO(data))
    return io.BytesIO(out.getvalue())


async def change(stack: Stack, at: str, large: bytes) -> None:
    """One of every changing file call, the last one of each path standing."""
    await done(stack, "PUT", f"{at}/files?path=src/main.py&mode=755", data=b"print(1)\n")
    await done(stack, "PUT", f"{at}/files?path=src/main.py", data=b"print(2)\n")
    await done(stack, "PUT", f"{at}/files?path=large", data=io.BytesIO(large))
    await done(stack, "PUT", f"{at}/files?path=gone", data=b"x")
    await done(stack, "DELETE", f"{at}/files?path=gone")
    await done(stack, "POST", f"{at}/files/mkdir", json={"path": "made/empty", "mode": 0o700})
    await done(stack, "PUT", f"{at}/archive?path=unpacked", data=archive({"a/one": b"1", "two": b"2"}))
    await done(stack, "PUT", f"{at}/archive?path=unpacked", data=archive({"a/three": b"3", "two": b"two"}))
    await done(stack, "POST", f"{at}/files/move", json={"source": "unpacked/a", "target": "moved"})
    await done(stack, "POST", f"{at}/files/chmod", json={"path": "moved", "mode": 0o711, "recursive": False})


LOOK = (
    "find . -mindepth 1 -printf '%P %m %y %u\\n' | sort;"
    "cat src/main.py unpacked/two moved/one moved/three; sha256sum large"
)


def found(large: bytes) -> str:
    lines = [
        "large 644 f sandbox", "made 755 d sandbox", "made/empty 700 d sandbox", "moved 711 d sandbox",
        "moved/one 640 f sandbox", "moved/three 640 f sandbox", "src 755 d sandbox", "src/main.py 755 f sandbox",
        "unpacked 755 d sandbox", "unpacked/two 640 f sandbox",
    ]  # fmt: skip
    return "\n".join(lines) + f"\nprint(2)\ntwo13{hashlib.sha256(large).hexdigest()}  large\n"


async def test_what_file_calls_changed_in_a_task_is_in_its_next_pod_after_a_sudden_death(stack: Stack) -> None:
    """F21, F24: every changing call, archives included; what commands alone made was not kept yet."""
    task, large = "sudden", os.urandom(3_000_000)
    pod = (await stack.exec(task, "echo x >by-a-command"))["pod_id"]
    await change(stack, stack.task(task), large)
    before = (await stack.exec(task, LOOK.replace("find .", "find . ! -name by-a-command")))["stdout"]
    kill(stack, pod)
    after = await ran_elsewhere(stack, task, pod, LOOK)
    assert (after["workspace"], after["previous"]["reason"]) == ("restored", "lost")
    assert after["stdout"] == before == found(large).replace("sandbox", before.split()[3])
    assert after["exit_code"] == 0


async def test_a_checkpoint_and_what_was_written_after_it_are_one_workspace(stack: Stack) -> None:
    """F21"""
    task = "after-a-checkpoint"
    ran = await stack.exec(task, "mkdir d && echo 1 >d/kept && echo 2 >d/replaced && echo 3 >d/removed")
    await done(stack, "POST", f"{stack.task(task)}/writeback", headers={"If-Sandbox-Pod": ran["pod_id"]})
    await done(stack, "PUT", f"{stack.task(task)}/files?path=d/replaced", data=b"new\n")
    await done(stack, "DELETE", f"{stack.task(task)}/files?path=d/removed")
    kill(stack, ran["pod_id"])
    after = await ran_elsewhere(stack, task, ran["pod_id"], "cd d && ls && cat kept replaced; echo 4 >more")
    assert after["stdout"] == "kept\nreplaced\n1\nnew\n"
    await done(stack, "PUT", f"{stack.task(task)}/files?path=last", data=b"last\n")
    kill(stack, after["pod_id"])
    again = await ran_elsewhere(stack, task, after["pod_id"], "cat d/replaced last; ls d")
    assert again["stdout"] == "new\nlast\nkept\nreplaced\n"


async def test_writeback_commits_of_the_very_pod_that_ran_the_command_or_not_at_all(stack: Stack) -> None:
    """F28: what the next pod has is never given out for it."""
    task = "very-pod"
    first = (await stack.exec(task, "echo of-the-first >file"))["pod_id"]
    at = f"{stack.task(task)}/writeback"
    kept = await done(stack, "POST", at, headers={"If-Sandbox-Pod": first})
    assert kept["pod_id"] == first
    await stack.exec(task, "echo never-committed >file")
    kill(stack, first)
    second = (await ran_elsewhere(stack, task, first, "cat file; echo of-the-second >file"))["pod_id"]
    status, answer = await stack.call("POST", at, headers={"If-Sandbox-Pod": first})
    assert (status, answer["error"]["code"]) == (410, "sandbox_gone"), answer
    kill(stack, second)
    third = await ran_elsewhere(stack, task, second, "cat file")
    assert third["stdout"] == "of-the-first\n"


async def test_what_file_calls_changed_in_a_sandbox_is_there_when_it_is_started_again(stack: Stack) -> None:
    sandbox_id, large = await made(stack), os.urandom(1_000_000)
    at = f"{ALL}/{sandbox_id}"
    await change(stack, at, large)
    pod = (await done(stack, "GET", at))["pod_id"]
    kill(stack, pod)
    give_up = time.monotonic() + WAIT_SEC
    while (await done(stack, "GET", at))["state"] != "failed":
        assert time.monotonic() < give_up
        await asyncio.sleep(0.1)
    assert (await done(stack, "POST", f"{at}/start"))["state"] == "running"
    after = await done(stack, "POST", f"{at}/exec", json={"command": LOOK})
    assert after["stdout"] == found(large).replace("sandbox", after["stdout"].split()[3])
    await done(stack, "DELETE", f"{at}?purge=true")


async def test_many_callers_at_once_are_each_durable_when_they_are_answered(stack: Stack) -> None:
    """I1: 60 files by 12 callers, the pod killed under them; whatever was answered is there."""
    task = "many"
    pod = (await stack.exec(task, "true"))["pod_id"]
    answered: dict[str, str] = {}
    enough = asyncio.Event()

    async def caller(number: int) -> None:
        for round_ in range(5):
            name, text = f"c{number}/f{round_}", f"{number} {round_}"
            path = f"{stack.task(task)}/files?path={name}"
            status, answer = await stack.call("PUT", path, data=text.encode(), headers={"If-Sandbox-Pod": pod})
            if status >= 300:
                assert answer["error"]["code"] in {
                    "executor_unreachable", "sandbox_gone", "sandbox_replaced", "outcome_unknown", "provisioning",
                }  # fmt: skip
                return
            answered[name] = text
            if len(answered) >= 30:
                enough.set()

    callers = asyncio.gather(*(caller(number) for number in range(12)))
    async with asyncio.timeout(WAIT_SEC):
        await enough.wait()
    kill(stack, pod)
    await callers
    after = await ran_elsewhere(stack, task, pod, 'for f in c*/*; do echo "$f=$(cat $f)"; done')
    there = dict(line.split("=", 1) for line in after["stdout"].splitlines())
    assert {name: there.get(name) for name in answered} == answered


async def test_a_manager_killed_under_its_callers_loses_no_file_that_it_answered(stack: Stack) -> None:
    """F4, F5, F24, I1: kill -9 of the manager in the middle of write-throughs, then of the pod."""
    task = "killed-manager"
    pod = (await stack.exec(task, "true"))["pod_id"]
    answered: dict[str, str] = {}
    enough = asyncio.Event()

    async def caller(number: int) -> None:
        for round_ in range(100):
            name = f"f{number}"
            text = f"{round_} " + os.urandom(20_000).hex()
            try:
                status, _ = await stack.call("PUT", f"{stack.task(task)}/files?path={name}", data=text.encode())
            except OSError:
                return
            if status >= 300:
                return
            answered[name] = text
            if round_ == 3:
                enough.set()

    callers = asyncio.gather(*(caller(number) for number in range(4)))
    async with asyncio.timeout(WAIT_SEC):
        await enough.wait()
    await asyncio.to_thread(stack.end, signal.SIGKILL)
    await callers
    assert answered
    await asyncio.to_thread(stack.start)
    kill(stack, pod)
    after = await ran_elsewhere(stack, task, pod, 'for f in f*; do echo "$f $(cat $f)"; done')
    there = dict(line.split(" ", 1) for line in after["stdout"].splitlines())
    for name, text in answered.items():  # of one whose answer was lost a later content may be there
        number, _, content = there[name].partition(" ")
        assert len(content) == 40_000
        assert int(number) > int(text.split()[0]) or there[name] == text


async def test_while_storage_fails_a_file_call_says_that_its_change_is_there_but_not_durable(stack: Stack) -> None:
    """F24, I7: a typed answer; the next call makes all of it durable."""
    workspaces: Path = stack.data / "objects" / "records" / "workspaces"
    task = "outage"
    pod = (await stack.exec(task, "true"))["pod_id"]
    at = f"{stack.task(task)}/files?path="
    await done(stack, "PUT", f"{at}before", data=b"1")
    if not workspaces.is_dir():
        pytest.skip("of a remote storage an outage is told before any file call is let in")
    workspaces.rename(workspaces.with_name("aside"))
    workspaces.write_bytes(b"")
    try:
        status, answer = await stack.call("PUT", f"{at}during", data=b"2")
    finally:
        workspaces.unlink()
        workspaces.with_name("aside").rename(workspaces)
    error = answer["error"]
    assert (status, error["code"], error["retryable"]) == (503, "store_unavailable", True)
    assert (error["details"]["in_sandbox"], error["details"]["durable"]) == (True, False)
    assert "not yet durable" in error["message"]
    assert (await stack.call("GET", f"{at}during")) == (200, b"2")
    await done(stack, "PUT", f"{at}after", data=b"3")
    kill(stack, pod)
    after = await ran_elsewhere(stack, task, pod, "cat before during after")
    assert after["stdout"] == "123"


async def test_a_sandboxs_environment_is_in_no_layer_no_audit_event_no_answer_and_no_log(stack: Stack) -> None:
    """S32: it is in the sandbox's own record, and nowhere else that is kept."""
    objects: Path = stack.data / "objects"
    if not (objects / "records").is_dir():
        pytest.skip("looked at on this machine's disk")
    canary = "canary-" + os.urandom(16).hex()
    sandbox_id = await made(stack, env={"TOKEN": canary})
    at = f"{ALL}/{sandbox_id}"
    told = [repr(await stack.call("POST", f"{at}/exec", json={"command": 'test -n "$TOKEN" && echo x >by-a-command'}))]
    told.append(repr(await stack.call("PUT", f"{at}/files?path=written", data=b"plain")))
    told.append(repr(await stack.call("POST", f"{at}/snapshots", json={})))
    told.append(repr(await stack.call("POST", f"{at}/stop?wait_sec=110")))
    told += [repr(await stack.call("GET", path)) for path in (at, ALL, "/api/v1/audit?limit=500", "/api/v1/sandboxes")]
    layers = [path for path in (objects / "layers").rglob("*") if path.is_file()]
    assert any(sandbox_id in str(path) for path in layers)
    for path in layers:
        data = path.read_bytes()
        assert canary.encode() not in (unpacked(data) if data.startswith(b"\x28\xb5\x2f\xfd") else data)
    records = [path for path in (objects / "records").rglob("*") if path.is_file()]
    holding = {path.parts[len(objects.parts) + 1] for path in records if canary.encode() in path.read_bytes()}
    assert holding == {"sandboxes"}
    assert [text for text in told if canary in text] == []
    assert canary not in stack.log.read_text()
    await done(stack, "DELETE", f"{at}?purge=true")
