"""`serve` with a cluster as its target, as processes: the README's commands, two managers, a rolling restart (F31)."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.cluster.accounts import Account
from tests.support.cluster.node_agent import NodeAgent
from tests.support.cluster.provider import IMAGE
from tests.support.server_process import Stack, started


class Managers:
    """Processes that share a store and a cluster."""

    def __init__(self, directory: Path, account: Account, redis_url: str) -> None:
        self.directory = directory
        self.config = directory / "sojourn.toml"
        self.config.write_text(
            f"""
[[targets]]
name = "main"
provider = "kubernetes"
namespace = "{account.namespace}"
kubeconfig = "{account.kubeconfig}"
[[profiles]]
name = "sandboxes-default"
image = "{IMAGE}"
cpu = 0.1
memory = "128Mi"
pool = {{ min = 2, max = 4 }}
"""
        )
        self.env = {
            "SOJOURN_CONFIG": str(self.config),
            "SOJOURN_REDIS_URL": redis_url,
            "SOJOURN_OBJECTS": f"file://{directory / 'objects'}",
            "SOJOURN_MANAGER_SECRET": "m" * 32,
            "SOJOURN_KEY_PEPPER": "p" * 32,
            "SOJOURN_HOST": "127.0.0.1",
            "SOJOURN_METRICS_PORT": "0",
            "SOJOURN_DRAIN_SEC": "60",
        }
        self.headers: dict[str, str] = {}

    async def key(self) -> None:
        project = f"web-{secrets.token_hex(4)}"  # of its own: the store is shared with other tests
        make = ("keys", "create", "--tenant", "acme", "--project", project, "--role", "member")
        async with started(self.directory / "keys", *make, **self.env) as keys:
            assert await keys.ended() == 0, keys.lines
        self.headers = {"X-Api-Key": keys.lines[-1]}

    @asynccontextmanager
    async def serving(self, name: str) -> AsyncIterator[Stack]:
        async with started(self.directory / name, "serve", **self.env) as stack:
            stack.address = json.loads(await stack.said('"serving"'))["address"]
            yield stack

    async def exec(self, stack: Stack, task: str, command: Any, **fields: Any) -> Any:
        return await stack.call("POST", f"/sandbox/task/{task}/exec", {"command": command, **fields}, self.headers)


@pytest.fixture
async def managers(agent: NodeAgent, manager_account: Account, valkey_url: str, tmp_path: Path) -> Managers:
    made = Managers(tmp_path, manager_account, valkey_url)
    await made.key()
    return made


async def test_the_readmes_commands_run_in_a_clusters_pods(managers: Managers) -> None:
    async with managers.serving("a") as stack:
        said = next(line for line in stack.lines if "Kubernetes" in line)
        assert "main: Kubernetes v1." in said
        answer = await managers.exec(stack, "my-task", ["python3", "-c", "print(6 * 7)"])
        assert (answer["stdout"], answer["exit_code"]) == ("42\n", 0), answer
        answer = await managers.exec(stack, "my-task", "echo kept > note.txt; cat note.txt; exit 7")
        assert (answer["stdout"], answer["exit_code"], answer["provisioned"]) == ("kept\n", 7, "bound")
        other = await managers.exec(stack, "another-task", "ls")
        assert (other["stdout"], other["pod_id"] != answer["pod_id"]) == ("", True)
        async with (
            aiohttp.ClientSession(headers=managers.headers) as session,
            session.delete(f"{stack.address}/sandbox/task/my-task") as retired,
        ):
            assert retired.status == 204
        answer = await managers.exec(stack, "my-task", "ls")
        assert (answer["stdout"], answer["workspace"], answer["previous"]["reason"]) == ("", "fresh", "destroyed")
        assert await stack.ended(signal.SIGTERM) == 0


async def test_a_rolling_restart_of_two_managers_ends_no_command_and_loses_no_sandbox(managers: Managers) -> None:
    """F31"""
    async with managers.serving("a") as one:
        first = await managers.exec(one, "t", "echo kept > note.txt")
        assert first["exit_code"] == 0, first
        async with managers.serving("b") as two:
            assert (await managers.exec(two, "t", "cat note.txt"))["stdout"] == "kept\n"
            running = asyncio.create_task(managers.exec(one, "t", "touch begun; sleep 4; echo whole"))
            while "begun" not in (await managers.exec(two, "t", "ls"))["stdout"]:
                await asyncio.sleep(0.1)
            ending = asyncio.create_task(one.ended(signal.SIGTERM))  # waits for what runs
            answers = await asyncio.gather(*(managers.exec(two, f"t{number}", ["true"]) for number in range(3)))
            assert [answer["exit_code"] for answer in answers] == [0, 0, 0]
            assert (await running)["stdout"] == "whole\n"
            assert await ending == 0
            async with managers.serving("c") as three:
                assert await two.ended(signal.SIGKILL) == -signal.SIGKILL
                answer = await managers.exec(three, "t", "cat note.txt")
                assert (answer["stdout"], answer["pod_id"]) == ("kept\n", first["pod_id"])
