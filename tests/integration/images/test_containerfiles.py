"""The Containerfiles: what they promise by their text, and one of them really built and run."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from images.bundle.elf import loader_of
from tests.support.buildah import Buildah, missing, opened, sandbox_context
from tests.support.executor_pod import ROOT

pytestmark = pytest.mark.timeout(600)  # builds a bundle and an image

CONTAINERFILES: Final = sorted((ROOT / "images").glob("*/Containerfile"))
MANAGER: Final = ROOT / "images" / "manager" / "Containerfile"
OF_SANDBOXES: Final = [file for file in CONTAINERFILES if file != MANAGER]
START_SEC: Final = 60.0


def instructions_of(file: Path) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", file.read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def test_there_is_one_for_each_image_that_is_promised() -> None:
    assert [file.parent.name for file in CONTAINERFILES] == ["base", "manager", "node", "python"]


@pytest.mark.parametrize("file", OF_SANDBOXES, ids=lambda file: file.parent.name)
def test_an_image_starts_the_executor_and_carries_no_secret(file: Path) -> None:
    instructions = instructions_of(file)
    words = [word for word, _ in instructions]
    assert words[:2] == ["ARG", "FROM"], "the base can be another"
    assert dict(instructions)["FROM"] == "${FROM}"
    base = next(rest for word, rest in instructions if word == "ARG")
    assert re.fullmatch(r"FROM=[a-z]+:[a-z0-9.-]+", base), "a base is named with a version"
    assert "latest" not in base
    assert json.loads(dict(instructions)["ENTRYPOINT"]) == ["/opt/sojourn/sojourn-executor"]
    assert ("COPY", "dist/sojourn-executor /opt/sojourn") in instructions
    assert ("ARG", "RUN_AS=0:0") in instructions, "split unless one asks for single"
    assert words.index("COPY") < words.index("USER"), "files belong to root"
    assert not {"ENV", "ADD", "VOLUME", "CMD"} & set(words), "nothing is set that commands would see"
    assert "TOKEN" not in file.read_text().upper()


def test_the_managers_image_is_nobodys_root_and_holds_what_is_locked_and_no_more() -> None:
    instructions = instructions_of(MANAGER)
    last = len(instructions) - 1 - [word for word, _ in instructions][::-1].index("FROM")
    image = instructions[last:]
    assert image[0] == ("FROM", "${FROM}")
    assert dict(image)["USER"] == "65532:65532"
    assert [word for word, _ in image].index("COPY") < [word for word, _ in image].index("USER")
    assert json.loads(dict(image)["ENTRYPOINT"]) == ["sojourn-server"]
    assert json.loads(dict(image)["CMD"]) == ["serve"]
    assert "RUN" not in dict(image), "nothing that building needs is in it"
    installs = [rest for word, rest in instructions if word == "RUN" and "pip install" in rest]
    assert "--require-hashes --only-binary :all: -r requirements/run.txt" in installs[0]
    assert "--no-deps --no-build-isolation ." in installs[1]
    assert len(installs) == 2
    words = MANAGER.read_text().upper()
    assert not {word for word in ("TOKEN", "PASSWORD", "SECRET") if word in words}


@pytest.mark.parametrize("file", CONTAINERFILES, ids=lambda file: file.parent.name)
def test_what_a_containerfile_copies_is_sent_to_the_builder(file: Path) -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for word, rest in instructions_of(file):
        if word == "COPY" and not rest.startswith("--from="):
            assert set(rest.split()[:-1]) <= sent
        for source in re.findall(r"source=([^, ]+)", rest):
            assert source in sent
            assert (ROOT / source).is_file()


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    if (lacking := missing()) is not None:
        pytest.skip(lacking)
    with opened(tmp_path_factory.mktemp("buildah")) as found:
        yield found


def busybox_image(buildah: Buildah, directory: Path) -> str:
    """An image without any library: one static program with many names."""
    busybox = Path("/bin/busybox")
    if not busybox.is_file() or loader_of(busybox) is not None:
        pytest.skip("no static busybox here (Debian: apt-get install busybox-static)")
    rootfs = directory / "rootfs"
    for name in ("bin", "etc", "tmp", "dev", "proc", "home"):
        (rootfs / name).mkdir(parents=True)
    (rootfs / "tmp").chmod(0o1777)
    shutil.copy(busybox, rootfs / "bin" / "busybox")
    for name in ("sh", "mkdir", "chown", "chmod", "sed", "mv", "id", "env", "cat", "echo"):
        (rootfs / "bin" / name).symlink_to("busybox")
    (rootfs / "etc" / "passwd").write_text("root:x:0:0::/:/bin/sh\nsomebody:x:1000:1000::/home/somebody:/bin/sh\n")
    (rootfs / "etc" / "group").write_text("root:x:0:\nsomebody:x:1000:\n")
    (rootfs / "home" / "somebody").mkdir()
    return buildah.imported(rootfs, "sojourn-test-busybox", env="PATH=/bin")


@asynccontextmanager
async def running(buildah: Buildah, image: str) -> AsyncIterator[tuple[str, str]]:
    """The address and the token of a container's executor."""
    token = secrets.token_hex(16)
    settings = {
        "SOJOURN_POD_TOKEN_SHA256": hashlib.sha256(token.encode()).hexdigest(),
        "SOJOURN_EXECUTOR_HOST": "127.0.0.1", "SOJOURN_EXECUTOR_PORT": "0",
    }  # fmt: skip
    container = buildah("from", "--pull-never", image)
    config = json.loads(buildah("inspect", container))["OCIv1"]["config"]
    argv = buildah.argv("run", "--isolation", "chroot", *(f"--env={name}={value}" for name, value in settings.items()))
    process = await asyncio.create_subprocess_exec(
        *argv, container, "--", *config["Entrypoint"], stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(START_SEC):
            where = await _address(process)
        yield f"http://{where}", token
    finally:
        if process.returncode is None:
            process.terminate()  # buildah passes it on
        await asyncio.wait_for(process.communicate(), 60)
        buildah("rm", container)


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    said = []
    while line := await process.stderr.readline():
        said.append(line.decode(errors="replace"))
        if "executor_ready" in said[-1]:
            return str(json.loads(line)["where"])
    raise AssertionError(f"the executor did not start:\n{''.join(said)}")


@pytest.mark.root
@pytest.mark.parametrize("run_as", ["0:0", "1000:1000"])
async def test_the_base_image_is_built_on_one_without_a_c_library_and_runs_commands(
    buildah: Buildah, bundle: Path, tmp_path: Path, run_as: str
) -> None:
    context = sandbox_context(tmp_path / "context", bundle)
    image = buildah.build("base", context, FROM=busybox_image(buildah, tmp_path), PACKAGES="", RUN_AS=run_as)
    async with running(buildah, image) as (url, token), aiohttp.ClientSession() as session:
        body = {"command": "id -u; id -g; echo $USER $HOME; pwd; echo kept > file; cat file; env"}
        async with session.post(f"{url}/v1/exec", json=body, headers={"Authorization": f"Bearer {token}"}) as answer:
            assert answer.status == 200, await answer.text()
            result: dict[str, Any] = await answer.json()
    assert result["exit_code"] == 0, result
    uid, gid, account, cwd, kept, *env = result["stdout"].splitlines()
    assert (uid, gid, cwd, kept) == ("1000", "1000", "/workspace", "kept")
    assert account == "sandbox /home/sandbox"
    names = {line.split("=", 1)[0] for line in env}
    assert names <= {"PATH", "LANG", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "SHLVL", "_"}
