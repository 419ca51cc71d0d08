"""Schemathesis, unmodified, makes up requests from both OpenAPI documents: no 5xx that is not told of, no answer of
another shape than the document says, and both programs live on.

SOJOURN_TEST_FUZZ_SEC says for how long each (default 30)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from manager.providers.local.capability import find_bwrap
from tests.support import fuzzed_pod
from tests.support.stack import Stack

ROOT = Path(__file__).parents[2]
SECONDS = int(os.environ.get("SOJOURN_TEST_FUZZ_SEC", "30"))
SEED = int(os.environ.get("SOJOURN_TEST_SEED", "1"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS * 3 + 120)]


def made(report: str) -> int:
    """How many requests a report tells of."""
    match = re.search(r"([\d,]+) generated", report)
    assert match is not None, report[-4000:]
    return int(match.group(1).replace(",", ""))


def test_the_executor_answers_whatever_its_document_allows_to_be_asked() -> None:
    bwrap = find_bwrap()
    assert bwrap is not None, "bubblewrap comes with the development environment: scripts/bootstrap.sh dev"
    pod = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--die-with-parent", "--ro-bind", "/", "/",
           "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--ro-bind", str(ROOT), str(ROOT),
           "--setenv", "PYTHONPATH", str(ROOT), "--chdir", "/"]  # fmt: skip
    program = ROOT / "tests/support/fuzzed_pod.py"
    done = subprocess.run(
        [*pod, sys.executable, str(program), str(SECONDS), str(SEED)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=SECONDS * 3 + 100,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert made(done.stdout) > 40, "on a slow machine; a fast one makes a thousand"


@pytest.fixture
def stack() -> Iterator[Stack]:
    # Few sandboxes: what is asked for beyond them is refused, and no time goes into making pods.
    running = Stack(config='[projects."dev/default"]\nprofiles = ["sandboxes-default"]\nconcurrency = 5\n').start()
    yield running
    running.remove()


async def test_the_manager_answers_whatever_its_document_allows_to_be_asked(stack: Stack, tmp_path: Path) -> None:
    task = stack.task("fuzzed-1")
    async with stack:
        status, _ = await stack.call("POST", f"{task}/sessions", json={"id": "s1"})
        assert status == 201
        status, _ = await stack.call("POST", f"{task}/processes", json={"id": "p1", "command": ["cat"]})
        assert status == 201
        status, document = await stack.call("GET", "/openapi.json")
        assert status == 200
    streams = {(path, method) for path, methods in document["paths"].items() for method in methods
               if path.endswith(("/files/watch", "/usage/stream"))}  # fmt: skip
    values = {
        "task_id": ["fuzzed-1", "fuzzed-2", "~ZnV6emVkLTM", ".."],
        "session_id": ["s1", "none"],
        "process_id": ["p1", "none"],
        "terminal_id": ["none"],
        "sandbox_id": ["none", "a-b"],
        "snapshot_id": ["none"],
        "port": ["9000", "8080"],
        "wait_sec": ["0", "1"],
        "follow": ["false"],
        "path": [".", "a", "a/b", "..", "/etc/passwd"],
    }
    (tmp_path / "openapi.json").write_text(json.dumps(fuzzed_pod.reduced(document, streams, values)))
    (tmp_path / "config.toml").write_text(fuzzed_pod.settings(stack.url))
    asked = fuzzed_pod.command(
        tmp_path / "config.toml", tmp_path / "openapi.json", f"X-Api-Key: {stack.key}", SECONDS, SEED
    )
    process = await asyncio.create_subprocess_exec(
        *asked, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), SECONDS * 3 + 60)
    report = output.decode()
    assert process.returncode == 0, report[-8000:]
    assert made(report) > 40
    async with stack:
        assert (await stack.call("GET", "/readyz"))[0] == 200
    assert "request_failed" not in stack.log.read_text()
