"""No key and no secret of ours is in a log, a figure, an answer, the store, or within reach of code in a sandbox (S2,
S23, S32): each is a canary, looked for in all that is said and by a command in all that it can open."""

from __future__ import annotations

import ast
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manager.executor_client import pod_token
from tests.support.attacks import REFUSALS, attack_script
from tests.support.canaries import search_script
from tests.support.stack import Stack, free_port

IS_ROOT = os.geteuid() == 0
CLEANUP = "canary-of-the-teardown-secret"
# What the pod's own file system consists of, but for the machine's programs, which no secret of ours comes into.
PROGRAMS = ("/usr", "/proc", "/sys")


@pytest.fixture(scope="module", params=["split", "single"] if IS_ROOT else ["single"])
def talkative(request: pytest.FixtureRequest) -> Iterator[tuple[Stack, int, str]]:
    """A stack that logs all it can, the port of its figures, and the tier of its pods."""
    port = free_port()
    settings = {
        "SOJOURN_LOG_LEVEL": "DEBUG", "SOJOURN_METRICS_PORT": str(port), "SANDBOX_CLEANUP_AUTH_SECRET": CLEANUP,
        "AIOHTTP_NO_EXTENSIONS": "1",
    }  # fmt: skip
    stack = Stack(single=request.param == "single", **settings).start()
    yield stack, port, request.param
    stack.remove()


def contents(directory: Path) -> str:
    """All that the stack keeps on disk, but for the files that are there to hold a secret."""
    secret = ("manager-secret", "key-pepper", "api-key")
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.name not in secret]
    return "\n".join(f"{path}\n{path.read_bytes().decode('latin-1')}" for path in files)


async def test_secrets_are_neither_logged_nor_counted_nor_told_nor_stored_nor_in_a_sandbox(
    talkative: tuple[Stack, int, str],
) -> None:
    stack, port, tier = talkative
    said: list[str] = []
    async with stack:

        async def call(method: str, path: str, **options: Any) -> Any:
            answer = await stack.call(method, path, **options)
            said.append(repr(answer))
            return answer

        _, made = await stack.call("POST", "/api/v1/keys", json={"name": "canary", "role": "admin"})
        key: str = made["key"]
        secret = key.rpartition("_")[2]
        mine = {"X-Api-Key": key}
        mistyped = {"X-Api-Key": key[:-1] + ("a" if key[-1] != "a" else "b")}
        for headers in (mine, mistyped, {"X-Api-Key": "", "Authorization": f"Bearer {key}"}, {"Cookie": f"k={key}"}):
            await call("GET", "/api/v1/targets", headers=headers)
            await call("POST", "/sandbox/task/t/exec", json={"command": "true"}, headers=headers)
            await call("POST", "/sandbox/task/t/exec", data=b"{", headers=headers)
        await call("GET", f"/api/v1/targets?api_key={key}&X-Api-Key={key}")
        await call("DELETE", "/sandbox/task/none", headers={"X-Api-Key": "", "Authorization": f"Bearer {CLEANUP}"})
        await call("DELETE", "/sandbox/task/none", headers={"X-Api-Key": "", "Authorization": f"Bearer x{CLEANUP}"})
        ran = await stack.exec("t", "true")
        kept = [(stack.data / name).read_text().strip() for name in ("manager-secret", "key-pepper", "api-key")]
        pods = sorted(stack.pods())
        assert ran["pod_id"] in pods
        tokens = [pod_token(kept[0].encode(), pod) for pod in pods]
        assert any(secret_of_a_pod(stack, token) for token in tokens), "these are the tokens that pods are asked with"
        for path in ("", "/processes", "/sessions", "/terminals", "/usage", "/files/list?path=.", "/lease"):
            await call("GET", f"/sandbox/task/t{path}", headers=mine)
        for path in ("/api/v1/keys", "/api/v1/targets", "/healthz", "/readyz", "/openapi.json", "/nothing"):
            await call("GET", path)
        # Neighbours of the search, and something of ours in each of their environments.
        await stack.call("POST", f"{stack.task('t')}/processes", json={"command": "sleep 100"})
        await stack.call("POST", f"{stack.task('t')}/sessions", json={})
        needles = [secret, CLEANUP, *kept, *tokens]
        script = search_script(needles, ["/"], left_out=PROGRAMS)
        looked = await stack.exec("t", ["python3", "-"], stdin=script, timeout_sec=100)
        assert looked["exit_code"] == 0, looked
        inside = ast.literal_eval(looked["stdout"])
        async with stack.http.get(f"http://127.0.0.1:{port}/metrics") as scraped:
            figures = await scraped.text()
        stored = contents(stack.data)
    log = stack.log.read_text()

    assert inside["hits"] == []
    assert inside["fds"] == []
    assert inside["looked"]["cmdline"] >= 4
    assert inside["looked"]["mem"] >= 1
    assert inside["looked"]["file"] > 20
    assert set(inside["sockets"].values()) == {"PermissionError" if tier == "split" else "401"}

    assert '"request' in log or '"event"' in log  # it is the log that was meant
    assert "sojourn_requests_total" in figures
    assert "appendonly" in stored
    for canary in (secret, CLEANUP, *kept[:2], *tokens):
        assert len(canary) > 20
        for place, text in (("log", log), ("figures", figures), ("answers", "".join(said)), ("disk", stored)):
            assert canary not in text, place
    assert kept[2] not in figures
    assert kept[2] not in stored
    assert "AIOHTTP_NO_EXTENSIONS is set and ignored" in log  # S35


async def test_a_sandboxs_first_process_and_helpers_are_out_of_reach_of_its_commands(
    talkative: tuple[Stack, int, str],
) -> None:
    """S3. In the single tier, too, the kernel spares a namespace's first process the KILL and STOP of those in it."""
    stack, _, tier = talkative
    kinds = tuple(signal.Signals) if tier == "split" else (signal.SIGKILL, signal.SIGSTOP)
    async with stack:
        before = await stack.exec("reach", "pgrep -f [s]pawn_helper | head -1; cat /proc/1/comm")
        helper, first = before["stdout"].split()
        assert first.startswith(("python", "sojourn"))
        script = attack_script({"first": 1, "helper": int(helper)}, signalled=("first",), signals=kinds)
        looked = await stack.exec("reach", ["python3", "-"], stdin=script)
        found = ast.literal_eval(looked["stdout"])
        assert set(found["helper"].values()) <= REFUSALS, found
        sent = {what: outcome for what, outcome in found["first"].items() if what.startswith("SIG")}
        assert {outcome for what, outcome in found["first"].items() if what not in sent} <= (
            REFUSALS if tier == "split" else {*REFUSALS, "done"}
        )
        if tier == "single":
            assert {found["first"][what] for what in ("attach", "seize", "read", "write", "mem", "environ")} <= REFUSALS
        else:
            assert set(sent.values()) <= REFUSALS
        after = await stack.exec("reach", "echo alive")
    assert after["stdout"] == "alive\n"
    assert after["pod_id"] == before["pod_id"]


def secret_of_a_pod(stack: Stack, token: str) -> bool:
    """Whether one of the executors under this stack takes the token: else the search would be for something else."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"SOJOURN_POD_TOKEN_SHA256={digest}".encode() in (entry / "environ").read_bytes():
                    return True
            except OSError:
                continue
    return False


def test_what_is_kept_is_closed_to_others(talkative: tuple[Stack, int, str]) -> None:
    stack, _, _ = talkative
    for path in (stack.data, *stack.data.iterdir()):
        assert path.stat().st_mode & 0o077 == 0 or path.is_dir(), path
    assert stack.data.stat().st_mode & 0o077 == 0
