"""Images of ours, as their Containerfiles make them, on a Debian that debootstrap makes: once, and kept beside the
cluster's tools."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from images.bundle.build import build
from tests.support import buildah
from tests.support.cluster import tools
from tests.support.executor_pod import ROOT

RELEASE: Final = "bookworm"
PATH: Final = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MAKE_SEC: Final = 900.0


def missing() -> str | None:
    """What this machine lacks, as a sentence; None where nothing is known to be."""
    if shutil.which("debootstrap") is None:
        return "no debootstrap here (Debian: apt-get install debootstrap)"
    return buildah.missing()


def base_image(directory: Path, name: str) -> Path:
    """An archive, in `directory`, with the image that images/base makes."""
    context = buildah.sandbox_context(directory / "context", build(directory))
    with buildah.opened(directory / "buildah") as builder:
        debian = builder.imported(root(), "sojourn-test-debian", env=PATH)
        return builder.saved(builder.build("base", context, FROM=debian), directory / "base.tar", name)


def manager_image(directory: Path, name: str) -> Path:
    """The same of the image that images/manager makes."""
    with buildah.opened(directory / "buildah") as builder:
        python = builder.imported(root("python3", "python3-venv", "ca-certificates"), "sojourn-test-python", env=PATH)
        return builder.saved(builder.build("manager", ROOT, trust=True, FROM=python), directory / "manager.tar", name)


def root(*packages: str) -> Path:
    """An archive with a minimal Debian's root file system and these packages, from debootstrap's own mirror."""
    state = hashlib.sha256(repr((RELEASE, packages)).encode()).hexdigest()[:16]
    kept = tools.home().parent / f"debian-{state}" / "root.tar"
    if kept.exists():
        os.utime(kept.parent)  # as a mark of its use
        return kept
    sys.stderr.write(f"making a Debian with {', '.join(packages) or 'nothing more'} (once)\n")
    kept.parent.mkdir(parents=True, exist_ok=True)
    # /var/tmp: device files cannot be made on every tmpfs.
    with tempfile.TemporaryDirectory(prefix="sojourn-debian-", dir="/var/tmp") as name:
        made, packed = Path(name, "root"), Path(name, "root.tar")
        include = [f"--include={','.join(packages)}"] if packages else []
        _run("debootstrap", "--variant=minbase", *include, RELEASE, str(made))
        for fetched in (made / "var/cache/apt/archives").glob("*.deb"):
            fetched.unlink()
        _run("tar", "-C", str(made), "--numeric-owner", "--exclude=./dev/*", "-cf", str(packed), ".")
        shutil.move(packed, kept.with_suffix(".new"))
    kept.with_suffix(".new").rename(kept)
    return kept


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_MAKE_SEC, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-3000:]}{done.stderr[-1000:]}"
