"""A manager's part that makes one pod, to be killed hard: `python -m tests.support.creator DATA_DIR PROFILE [PACKAGE]`.

PROFILE is a Profile as JSON. With SOJOURN_TEST_NO_LOOP in the environment there are no loop devices. Says "made"."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from manager.model import Profile
from manager.providers.local import disks
from manager.providers.local.provider import LocalProvider
from tests.support.local_pods import WAIT_SEC, token_for

ROOT: Final = Path(__file__).resolve().parents[2]
NO_LOOP: Final = "SOJOURN_TEST_NO_LOOP"
POD: Final = "p1"


def no_loop_devices(home: Path, size_bytes: int) -> None:
    """Stands in for `disks.make_image` of a machine without them."""
    raise OSError(errno.ENODEV, f"no loop devices for {size_bytes} bytes in {home}")


def start_creator(
    data_dir: Path, profile: Profile, package: Path | None = None, *, loop: bool = True
) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "tests.support.creator", str(data_dir), msgspec.json.encode(profile).decode()]
    env = os.environ | ({} if loop else {NO_LOOP: "1"})
    return subprocess.Popen(
        [*argv, *([str(package)] if package else [])], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


async def made(creator: subprocess.Popen[str]) -> None:
    """Waits until its pod is there."""
    assert creator.stdout is not None
    async with asyncio.timeout(WAIT_SEC):
        line = await asyncio.to_thread(creator.stdout.readline)
    assert line == "made\n"


def kill_hard(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(WAIT_SEC)
    if process.stdout is not None:
        process.stdout.close()


async def _main(data_dir: str, profile: str, package: str | None = None) -> None:
    if NO_LOOP in os.environ:
        disks.make_image = no_loop_devices
    provider = LocalProvider("here", Path(data_dir), token_for, package=Path(package) if package else None)
    await provider.create(msgspec.json.decode(profile, type=Profile), POD, {}, {})
    sys.stdout.write("made\n")
    sys.stdout.flush()
    await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
