"""The bundle, built once for all, and images made of nothing to run it in."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.executor_pod import ROOT

# A command for an image that has neither a shell nor a C library: says what it was given.
COMMAND_SOURCE: Final = r"""
#include <stdio.h>
#include <stdlib.h>
extern char **environ;
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) printf("argument %s\n", argv[i]);
    for (char **entry = environ; *entry; entry++) printf("variable %s\n", *entry);
    fprintf(stderr, "and an error line\n");
    return 7;
}
"""


@pytest.fixture(scope="session")
def compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc")
    if found is None:
        pytest.skip("no C compiler (cc or gcc) here, which the bundle's launcher is made with")
    return found


@pytest.fixture(scope="session")
def bundle(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The built directory, where every user may reach it."""
    out = tmp_path_factory.mktemp("bundle")
    for directory in (out, *out.parents[:2]):
        directory.chmod(directory.stat().st_mode | 0o011)
    done = subprocess.run(
        [sys.executable, "-m", "images.bundle.build", "--out", out, "--no-archives"], cwd=ROOT, capture_output=True,
        text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    yield out / "sojourn-executor"
    shutil.rmtree(out, ignore_errors=True)


@pytest.fixture(scope="session")
def static_command(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("command")
    source, program = directory / "tell.c", directory / "tell"
    source.write_text(COMMAND_SOURCE)
    done = subprocess.run([compiler, "-static", "-o", program, source], capture_output=True, timeout=120, check=False)
    if done.returncode:
        pytest.skip("the C compiler here makes no static programs (libc.a is missing)")
    return program


@pytest.fixture
def empty_image(bundle: Path, static_command: Path, tmp_path: Path) -> Path:
    """A root directory with the bundle copied in, one static program, and empty /proc and /dev. Nothing else."""
    image = tmp_path / "image"
    for name in ("opt", "proc", "dev", "tmp"):
        (image / name).mkdir(parents=True)
    (image / "tmp").chmod(0o1777)
    (image / "dev" / "null").touch()
    subprocess.run(["cp", "-a", bundle, image / "opt" / "sojourn"], timeout=120, check=True)
    shutil.copy(static_command, image / "tell")
    image.chmod(0o755)
    return image
