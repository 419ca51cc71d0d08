"""Terminals in real local pods: their devpts, their system call filter, their user."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from manager.model import Pod, Profile
from manager.providers.local.provider import LocalProvider
from tests.support.local_pods import on_terminal, run, session_to, token_for

FREE = Profile(name="free", cpu=None, memory_bytes=None, pids=None)


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[Pod]:
    provider = LocalProvider("here", tmp_path, token_for)
    found = await provider.capabilities()
    if found.tier is None:
        await provider.close()
        pytest.skip(f"no isolation on this machine: {found.why_not}")
    try:
        yield await provider.create(FREE, "p1", {}, {})
        for each in await provider.list():
            await provider.delete(each.name)
    finally:
        await provider.close()


async def test_a_pods_terminal_is_whole_and_belongs_to_the_command_user(pod: Pod) -> None:
    """PT03, PT07"""
    script = "tty; stty size; stat -c '%u %a' $(tty); id -u; echo reopened >/dev/tty; ps -o tty= -p $$ 2>/dev/null"
    socket = await on_terminal(pod, script)
    lines = socket.stdout.decode().split("\r\n")
    assert lines[0].startswith("/dev/pts/")
    assert lines[1] == "30 100"
    assert lines[2] == f"{lines[3]} 620"
    assert lines[3] != "0"
    assert lines[4] == "reopened"
    assert (await run(pod, "grep Seccomp: /proc/self/status"))["stdout"].split() == ["Seccomp:", "2"]


async def test_a_pods_shell_has_job_control(pod: Pod) -> None:
    """PT07"""
    socket = await on_terminal(pod, "set -m; sleep 30 & jobs; kill %1; wait; echo done")
    assert b"Running" in socket.stdout
    assert b"job control" not in socket.stdout
    assert socket.stdout.endswith(b"done\r\n")


async def test_nobody_types_into_a_terminal_by_its_descriptor(pod: Pod) -> None:
    """S1: TIOCSTI would put words into another program's mouth."""
    script = "import fcntl; fcntl.ioctl(0, 0x5412, b'x')"
    socket = await on_terminal(pod, f'python3 -c "{script}"; echo code $?')
    assert b"code 1" in socket.stdout
    assert b"PermissionError" in socket.stdout or b"not permitted" in socket.stdout


async def test_one_terminal_cannot_open_another_users_master(pod: Pod) -> None:
    async with session_to(pod) as session, session.post("http://pod/v1/terminals", json={"command": ["cat"]}) as answer:
        assert answer.status == 201
    socket = await on_terminal(pod, "ls /dev/pts | tr '\\n' ' '; ls -l /proc/1/fd 2>&1 | grep -c ptmx")
    assert socket.stdout.split()[-1] == b"0"
