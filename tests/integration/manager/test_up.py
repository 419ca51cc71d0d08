"""The whole stack as a newcomer starts it: one command, real sandboxes, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
from pathlib import Path

import psutil
import pytest

from manager.providers.local.capability import probe
from tests.support.server_process import Stack, started, up
from tests.support.world import until


@pytest.fixture(scope="module")
def isolated(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = probe(tmp_path_factory.mktemp("probe"))
    if found.tier is None:
        pytest.skip(f"this machine gives no isolation: {found.why_not}")


@pytest.fixture
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("d")  # short: pods have sockets under it


def processes_of(data_dir: Path) -> list[str]:
    """Every living process that names the directory on its command line, or works in it, as the store does."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if any(str(data_dir) in word for word in (*process.cmdline(), process.cwd())):
                found.append(" ".join(process.cmdline())[:200])
        except psutil.Error:
            continue
    return found


def pods_in(data_dir: Path) -> list[str]:
    return sorted(os.listdir(data_dir / "pods")) if (data_dir / "pods").exists() else []


async def nothing_left(data_dir: Path) -> None:
    await until(lambda: not processes_of(data_dir))
    assert pods_in(data_dir) == []
    assert not (data_dir / "address").exists()


@pytest.mark.usefixtures("isolated")
async def test_up_says_what_it_does_and_how_to_go_on_and_ctrl_c_leaves_nothing_behind(data_dir: Path) -> None:
    async with up(data_dir) as stack:
        said = "\n".join(stack.lines)
        for words in (
            "store ",
            "isolation namespaces",
            "2 of 2 sandboxes warm",
            "SANDBOX_CLEANUP_AUTH_SECRET is not set",
        ):
            assert words in said
        assert said.count(" exec my-task -- ") == 2
        assert (data_dir / "address").read_text().strip() == stack.address
        assert stack.key in said
        for kept, mode in ((data_dir, 0o700), (data_dir / "api-key", 0o600), (data_dir / "manager-secret", 0o600)):
            assert stat.S_IMODE(kept.stat().st_mode) == mode
        answer = await stack.exec("t", "echo hello; echo oops >&2; exit 3")
        assert (answer["stdout"], answer["stderr"], answer["exit_code"]) == ("hello\n", "oops\n", 3)
        assert answer["provisioned"] == "warm"
        assert len(pods_in(data_dir)) >= 2
        assert await stack.ended(signal.SIGINT, group=True) == 0
        assert "Traceback" not in "\n".join(stack.lines)
    await nothing_left(data_dir)


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_after_sigterm_or_a_crash_sandboxes_and_what_runs_in_them_are_found_again(
    data_dir: Path, number: signal.Signals
) -> None:
    async with up(data_dir) as stack:
        first = await stack.exec("t", "echo kept > file")
        await stack.call(
            "POST", "/sandbox/task/t/processes", {"command": "cat; echo end", "id": "bg", "stdin_open": True}
        )
        key = stack.key
        await stack.ended(number)
    async with up(data_dir) as stack:
        assert stack.key == key
        assert "of an earlier run found again" in "\n".join(stack.lines)
        again = await stack.exec("t", "cat file")
        assert (again["stdout"], again["pod_id"], again["workspace"]) == ("kept\n", first["pod_id"], "kept")
        process = await stack.call("GET", "/sandbox/task/t/processes/bg")
        assert process["state"] == "running"
        await _close_stdin(stack)
        process = await stack.call("GET", "/sandbox/task/t/processes/bg?wait_sec=20")
        assert (process["state"], process["exit_code"]) == ("ended", 0)
        assert await stack.ended(signal.SIGINT) == 0
    await nothing_left(data_dir)


async def _close_stdin(stack: Stack) -> None:
    import aiohttp

    url = f"{stack.address}/sandbox/task/t/processes/bg/stdin/close"
    async with aiohttp.ClientSession() as session, session.post(url, headers={"X-Api-Key": stack.key}) as response:
        assert response.status == 204


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize("words", ["Starting", "store ", "isolation ", "pool      0"])
async def test_ctrl_c_while_it_starts_leaves_nothing_behind(data_dir: Path, words: str) -> None:
    async with started(data_dir, "up") as stack:
        await stack.said(words)
        assert await stack.ended(signal.SIGINT, group=True) in (0, 130)
        assert "Traceback" not in "\n".join(stack.lines)
    await nothing_left(data_dir)


@pytest.mark.usefixtures("isolated")
async def test_two_stacks_cannot_share_a_data_directory_and_the_second_says_why(data_dir: Path) -> None:
    async with up(data_dir) as first, started(data_dir, "up") as second:
        assert await second.ended() == 2
        assert str(data_dir) in "\n".join(second.lines)
        assert "Traceback" not in "\n".join(second.lines)
        assert (await first.exec("t", "echo on"))["stdout"] == "on\n"
        assert (data_dir / "address").read_text().strip() == first.address


@pytest.mark.parametrize(
    ("command", "env", "code", "words"),
    [
        ("up", {"SANDBOX_TASK_IDLE_TTL": "0"}, 2, "SANDBOX_TASK_IDLE_TTL must be a whole number of seconds"),
        ("up", {"SOJOURN_PORT": "eighty"}, 2, "SOJOURN_PORT"),
        ("up", {"SOJOURN_DATA_DIR": "/proc/nothing"}, 2, "SOJOURN_DATA_DIR"),
        ("up", {"SOJOURN_REDIS_URL": "unix:///nothing/here.sock"}, 1, "sojourn-server: "),
        ("serve", {}, 2, "SOJOURN_REDIS_URL is not set"),
        ("serve", {"SOJOURN_REDIS_URL": "unix:///nothing/here.sock"}, 2, "SOJOURN_MANAGER_SECRET is not set"),
        ("config", {"SOJOURN_CONFIG": "/nothing/here.toml"}, 2, "/nothing/here.toml"),
    ],
)
async def test_what_cannot_start_says_why_in_a_line(
    data_dir: Path, command: str, env: dict[str, str], code: int, words: str
) -> None:
    async with started(data_dir, command, **env) as stack:
        assert await stack.ended() == code
        said = [line for line in stack.lines if not line.startswith("{")]
        assert words in "\n".join(said)
        assert "Traceback" not in "\n".join(said)


@pytest.mark.usefixtures("isolated")
async def test_a_port_that_is_taken_is_told_and_nothing_is_left(data_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        async with started(data_dir, "up", "--port", str(held.getsockname()[1])) as stack:
            assert await stack.ended() == 2
            said = "\n".join(stack.lines)
            assert "is taken" in said
            assert "SOJOURN_PORT" in said
            assert "Traceback" not in said
    await nothing_left(data_dir)


async def test_config_tells_each_value_with_its_origin_and_no_secret(data_dir: Path) -> None:
    env = {"SANDBOX_CLEANUP_AUTH_SECRET": "canary", "SANDBOX_TASK_IDLE_TTL": "77"}
    async with started(data_dir, "config", "--port", "7", **env) as stack:
        assert await stack.ended() == 0
    said = "\n".join(stack.lines)
    assert "port = 7  # SOJOURN_PORT, flag --port" in said
    assert "idle_ttl_sec = 77  # SANDBOX_TASK_IDLE_TTL, environment SANDBOX_TASK_IDLE_TTL" in said
    assert "canary" not in said


@pytest.mark.parametrize("command", ["up", "serve", "config", "keys", "doctor"])
async def test_every_command_teaches_itself(data_dir: Path, command: str) -> None:
    async with started(data_dir, command, "--help") as stack:
        assert await stack.ended() == 0
    said = "\n".join(stack.lines)
    assert "usage:" in said
    assert len(said) > 300


@pytest.mark.usefixtures("isolated")
async def test_serve_uses_your_redis_takes_keys_made_offline_and_leaves_sandboxes_at_the_end(
    data_dir: Path, valkey_url: str
) -> None:
    env = {
        "SOJOURN_REDIS_URL": valkey_url,
        "SOJOURN_MANAGER_SECRET": "m" * 32,
        "SOJOURN_KEY_PEPPER": "p" * 32,
        "SOJOURN_HOST": "127.0.0.1",
    }
    make = ("keys", "create", "--tenant", "acme", "--project", "web", "--role", "admin", "--name", "ci")
    async with started(data_dir, *make, **env) as keys:
        assert await keys.ended() == 0
    key, key_id = keys.lines[-1], keys.lines[0].split()[0]
    async with started(data_dir, "keys", "list", "--tenant", "acme", **env) as keys:
        assert await keys.ended() == 0
    assert any(line.startswith(key_id) and "acme/web" in line for line in keys.lines)
    assert key not in "\n".join(keys.lines)
    async with started(data_dir, "serve", **env) as stack:
        line = json.loads(await stack.said('"serving"'))
        assert any("cleanup_secret_unset" in each for each in stack.lines)
        stack.address = line["address"]
        headers = {"X-Api-Key": key}
        answer = await stack.call("POST", "/sandbox/task/t/exec", {"command": "echo served"}, headers)
        assert answer["stdout"] == "served\n"
        async with started(data_dir, "keys", "revoke", key_id, **env) as keys:
            assert await keys.ended() == 0

        async def refused() -> bool:
            return "error" in await stack.call("GET", "/api/v1/targets", None, headers)

        await until(refused)
        assert await stack.ended(signal.SIGINT) == 0
        assert all(json.loads(line)["event"] for line in stack.lines)
    assert answer["pod_id"] in pods_in(data_dir)
    async with up(data_dir, SOJOURN_REDIS_URL=valkey_url, SOJOURN_MANAGER_SECRET="m" * 32, SOJOURN_KEY_PEPPER="p" * 32):
        pass
    await nothing_left(data_dir)
