"""Long-lived sandboxes of a running stack, for its tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from tests.support.stack import Stack

ALL: Final = "/sandbox/sandboxes/v1"


async def made(stack: Stack, **fields: Any) -> str:
    status, body = await stack.call("POST", ALL, json=fields)
    assert status == 201, body
    assert body["state"] == "running"
    sandbox_id: str = body["sandbox_id"]
    return sandbox_id


def run(stack: Stack, script: str) -> str:
    """A shell script of a user of the stack; its stdout."""
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SANDBOX_GATEWAY_URL": stack.url}
    done = subprocess.run(
        ["bash", "-euc", script], env=env | {"SANDBOX_API_KEY": stack.key}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
