"""Images that buildah really makes of the Containerfiles."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.executor_pod import IS_ROOT, ROOT

_AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
_CALL_SEC = 300.0
_BUILD_SEC = 900.0  # packages are fetched


def missing() -> str | None:
    """What this machine lacks, as a sentence; None where nothing is known to be."""
    if shutil.which("buildah") is None:
        return "no buildah here (Debian: apt-get install buildah)"
    return None if IS_ROOT else "building without a container runtime needs root"


class Buildah:
    """buildah with a storage of its own; the machine's images stay as they are."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._storage = [
            "--root", str(directory / "root"), "--runroot", str(directory / "run"), "--storage-driver", "vfs",
        ]  # fmt: skip

    def argv(self, *arguments: str) -> list[str]:
        return ["buildah", *self._storage, *arguments]

    def __call__(self, *arguments: str, limit_sec: float = _CALL_SEC) -> str:
        done = subprocess.run(self.argv(*arguments), capture_output=True, text=True, timeout=limit_sec, check=False)
        assert done.returncode == 0, f"buildah {arguments[0]}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
        return done.stdout.strip()

    def imported(self, tree: Path, name: str, *, env: str) -> str:
        """An image of a directory or of a tar archive with a root file system, and nothing else."""
        container = self("from", "scratch")
        self("add", container, str(tree), "/")
        self("config", "--env", env, container)
        self("commit", "--rm", container, name)
        return f"localhost/{name}"

    def build(self, kind: str, context: Path, *, trust: bool = False, **arguments: str) -> str:
        """The image that images/KIND/Containerfile makes. `trust`: pip believes whom this machine believes."""
        given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        if trust and _AUTHORITIES.exists():
            config = self._directory / "pip.conf"
            config.write_text(f"[global]\ncert = {_AUTHORITIES}\n")
            given += [f"--volume={path}:{there}:ro" for path, there in ((config, "/etc/pip.conf"), (_AUTHORITIES,) * 2)]
        file, name = str(ROOT / "images" / kind / "Containerfile"), f"sojourn-test-{kind}"
        self(
            "bud", "--isolation", "chroot", "--pull-never", *given, "-f", file, "-t", name, str(context),
            limit_sec=_BUILD_SEC,
        )  # fmt: skip
        return f"localhost/{name}"

    def saved(self, image: str, at: Path, name: str) -> Path:
        """The image as an archive for containerd, in which it is called `name`."""
        self("push", image, f"docker-archive:{at}:{name}")
        return at

    def remove_everything(self) -> None:
        self("rm", "--all")
        self("rmi", "--all", "--force")
        shutil.rmtree(self._directory, ignore_errors=True)


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[Buildah]:
    """Its images, in `directory`, are gone in the end."""
    made = Buildah(directory)
    try:
        yield made
    finally:
        made.remove_everything()


def sandbox_context(at: Path, bundle: Path) -> Path:
    """What a sandbox's image is built from, in a new directory `at`."""
    (at / "images").mkdir(parents=True)
    shutil.copy(ROOT / "images" / "prepare.sh", at / "images")
    (at / "dist").mkdir()
    subprocess.run(["cp", "-a", bundle, at / "dist" / "sojourn-executor"], timeout=60, check=True)
    return at
