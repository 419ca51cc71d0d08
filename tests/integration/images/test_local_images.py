"""Local pods of images on disk, with the executor's bundle: a musl-like one, one with nothing in it, a whole one."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from images.bundle.elf import loader_of
from manager.errors import ImagePullFailed, IsolationUnavailable
from manager.model import Pod, Profile
from manager.providers.local.images import BUNDLE_PATH
from manager.providers.local.network import OutboundSettings
from manager.providers.local.provider import LocalProvider
from tests.support import netlab
from tests.support.executor_pod import ROOT
from tests.support.images import directory, docker_archive, file, layer, link, oci_archive, oci_layout
from tests.support.local_pods import nothing_left, on_terminal, run, session_to, skip_without_isolation, token_for

pytestmark = pytest.mark.timeout(600)  # builds a bundle


@pytest.fixture
async def provider(bundle: Path, tmp_path: Path) -> AsyncIterator[LocalProvider]:
    opened = LocalProvider("here", tmp_path / "data", token_for, bundle=bundle)
    await skip_without_isolation(opened)
    yield opened
    for pod in await opened.list():
        await opened.delete(pod.name)
    await opened.close()


def profile(image: str, isolation: str = "namespaces") -> Profile:
    return Profile(name="image", image=image, isolation=isolation, cpu=None, memory_bytes=None, pids=None)


@pytest.fixture
def busybox() -> bytes:
    program = Path("/bin/busybox")
    if not program.is_file() or loader_of(program) is not None:
        pytest.skip("no static busybox here (Debian: apt-get install busybox-static)")
    return program.read_bytes()


NAMES = ("sh", "cat", "echo", "env", "id", "ls", "stat", "touch", "sleep", "grep", "head")


PASSWD = b"root:x:0:0::/:/bin/sh\nnode:x:1000:1000::/:/bin/sh\nweb:x:33:33::/:/bin/sh\n"


def busybox_layers(program: bytes) -> tuple[bytes, bytes]:
    """A system that has only what is in it, without any library, in two layers."""
    first = layer(
        directory("bin"), file("bin/busybox", program, mode=0o755), *(link(f"bin/{name}", "busybox") for name in NAMES),
        directory("etc"), file("etc/passwd", PASSWD),
        file("etc/motd", b"first\n"), file("gone", b"1"), directory("opt/tool"), file("opt/tool/x", b"tool\n"),
    )  # fmt: skip
    return first, layer(file("etc/motd", b"second\n"), file(".wh.gone"))


async def check_a_system(pod: Pod) -> None:
    look = "id; cat /etc/motd /opt/tool/x; ls -A /gone; pwd; echo x > file; cat file; grep web /etc/passwd"
    seen = await run(pod, look)
    assert seen["stdout"].splitlines() == [
        "uid=1000(sandbox) gid=1000(sandbox) groups=1000(sandbox)", "second", "tool", "/workspace", "x",
        "web:x:33:33::/:/bin/sh",
    ], seen  # fmt: skip
    write = "for d in / /bin /etc /opt /var; do touch $d/x 2>/dev/null && echo $d; done; touch /tmp/x /var/tmp/x"
    written = await run(pod, write)
    assert (written["stdout"], written["exit_code"]) == ("", 0), written
    env = dict(line.split("=", 1) for line in (await run(pod, "env"))["stdout"].splitlines())
    assert (env["PATH"], env["MORE"], env["HOME"]) == ("/bin:/opt/tool", "of the image", "/workspace")
    assert not {name for name in env if name.startswith(("SOJOURN", "LD_"))}
    async with session_to(pod) as http, http.put("http://pod/v1/files", params={"path": "f"}, data=b"1") as answer:
        assert answer.status in (200, 201)
    assert b"/dev/pts/" in (await on_terminal(pod, "ls -l /proc/self/fd/0")).stdout


@pytest.mark.parametrize("kind", ["oci", "oci-archive", "docker-archive"])
async def test_a_pod_of_an_image_without_python_or_a_c_library_is_whole(
    provider: LocalProvider, tmp_path: Path, busybox: bytes, kind: str
) -> None:
    make: Callable[..., Path] = {"oci": oci_layout, "oci-archive": oci_archive, "docker-archive": docker_archive}[kind]
    at = tmp_path / "image"
    image = make(at, *busybox_layers(busybox), env=["PATH=/bin:/opt/tool", "MORE=of the image"])
    pod = await provider.create(profile(f"{kind}:{image}"), "p1", {}, {})
    await check_a_system(pod)
    await provider.delete("p1")
    assert nothing_left(tmp_path / "data", "p1")


REACH = """
import socket, sys
way, *hosts = sys.argv[1:]
for host in hosts:
    try:
        there = socket.create_connection((host, 80) if way == "routed" else ("127.0.0.1", 3128), 20)
        there.sendall(b"GET %s HTTP/1.1\\r\\n\\r\\n" % (b"/" if way == "routed" else f"http://{host}/".encode()))
        said = b"".join(iter(lambda: there.recv(65536), b""))
        status, body = said.split(b" ")[1], said.partition(b"\\r\\n\\r\\n")[2]
        print(body.split(b"\\n")[0].decode().replace(" ", "") if status == b"200" else "refused")
    except OSError:
        print("refused")
"""


@pytest.mark.root
@pytest.mark.parametrize("way", ["routed", "proxy"])
async def test_a_pod_of_an_image_reaches_public_servers_on_both_ways_out(
    bundle: Path, tmp_path: Path, busybox: bytes, way: Literal["routed", "proxy"]
) -> None:
    env = ["PATH=/bin", "HTTP_PROXY=http://192.0.2.1:1"]
    image = oci_layout(tmp_path / "image", *busybox_layers(busybox), env=env)
    python = [f"{BUNDLE_PATH}/bin/python3", "-I", "-S", "-c"]
    with netlab.lab() as lab:
        outbound = OutboundSettings(way=way, resolvers=(netlab.RESOLVER,))
        provider = LocalProvider("here", tmp_path / "data", token_for, bundle=bundle, outbound=outbound)
        await skip_without_isolation(provider)
        try:
            wanted = msgspec.structs.replace(profile(f"oci:{image}"), network="outbound")
            pod = await provider.create(wanted, "p1", {}, {})
            seen = await run(pod, "cat /etc/resolv.conf; echo $HTTP_PROXY")
            if way == "routed":
                assert seen["stdout"].split() == ["nameserver", netlab.RESOLVER, "http://192.0.2.1:1"]
            else:  # over the image's own: there is no other way out
                assert seen["stdout"] == "http://127.0.0.1:3128\n"
            reached = await run(pod, [*python, REACH, way, netlab.PUBLIC, netlab.FORBIDDEN[0]], timeout_sec=60)
            assert reached["stdout"].split() == [f"hello{netlab.MACHINE}", "refused"], reached
            assert lab.internet.targets == {netlab.PUBLIC}
        finally:
            for left in await provider.list():
                await provider.delete(left.name)
            await provider.close()


async def test_the_same_under_gvisor(provider: LocalProvider, tmp_path: Path, busybox: bytes) -> None:
    found = await provider.capabilities(gvisor=True)
    assert found.gvisor is not None
    if found.gvisor.platform is None:
        pytest.skip(f"NOT TESTED, no gVisor here: {found.gvisor.why_not} (Debian: apt-get install runsc)")
    env = ["PATH=/bin:/opt/tool", "MORE=of the image"]
    image = oci_layout(tmp_path / "image", *busybox_layers(busybox), env=env)
    await check_a_system(await provider.create(profile(f"oci:{image}", "gvisor"), "p1", {}, {}))


async def test_a_directory_with_one_program_is_image_enough_and_stays_as_it_is(
    provider: LocalProvider, tmp_path: Path, static_command: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(static_command, root / "tell")
    pod = await provider.create(profile(f"rootfs:{root}"), "p1", {}, {})
    said = await run(pod, ["/tell", "one"])
    assert said["exit_code"] == 7
    assert said["stdout"].splitlines()[0] == "argument one"
    assert said["stderr"] == "and an error line\n"
    assert [path.name for path in root.iterdir()] == ["tell"]


async def test_the_machines_own_system_as_a_directory_runs_its_python(provider: LocalProvider) -> None:
    pod = await provider.create(profile("rootfs:/"), "p1", {}, {})
    seen = await run(pod, ["/usr/bin/env", "sh", "-c", "command -v ls && test -d /etc/ssl && echo whole"])
    assert seen["stdout"].split()[-1] == "whole", seen


async def test_without_the_bundle_or_the_image_nothing_is_begun(tmp_path: Path, bundle: Path) -> None:
    data = tmp_path / "data"
    bare = LocalProvider("here", data, token_for, bundle=tmp_path / "nowhere")
    await skip_without_isolation(bare)
    (tmp_path / "root").mkdir()
    with pytest.raises(IsolationUnavailable, match="make bundle"):
        await bare.create(profile(f"rootfs:{tmp_path / 'root'}"), "p1", {}, {})
    await bare.close()
    whole = LocalProvider("here", data, token_for, bundle=bundle)
    with pytest.raises(ImagePullFailed, match="there is no such directory"):
        await whole.create(profile(f"rootfs:{tmp_path / 'none'}"), "p1", {}, {})
    with pytest.raises(ImagePullFailed, match="rootfs:/path"):
        await whole.create(profile("docker.io/library/python:3.12"), "p1", {}, {})
    await whole.close()
    assert nothing_left(data, "p1")


@pytest.mark.root
async def test_what_buildah_writes_can_be_run(provider: LocalProvider, tmp_path: Path, busybox: bytes) -> None:
    program = shutil.which("buildah")
    if program is None:
        pytest.skip("no buildah here (Debian: apt-get install buildah)")
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "busybox").write_bytes(busybox)
    (root / "bin" / "busybox").chmod(0o755)
    for name in NAMES:
        (root / "bin" / name).symlink_to("busybox")
    storage = ["--root", str(tmp_path / "s"), "--runroot", str(tmp_path / "r"), "--storage-driver", "vfs"]

    def buildah(*arguments: str) -> str:
        argv = [str(program), *storage, *arguments]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    container = buildah("from", "scratch")
    buildah("add", container, str(root), "/")
    buildah("config", "--env", "PATH=/bin", container)
    buildah("commit", container, "made")
    buildah("push", "made", f"oci-archive:{tmp_path / 'made.tar'}")
    buildah("push", "made", f"docker-archive:{tmp_path / 'saved.tar'}:made:1")
    buildah("rm", "--all")
    for kind, name in (("oci-archive", "made.tar"), ("docker-archive", "saved.tar")):
        pod = await provider.create(profile(f"{kind}:{tmp_path / name}"), kind, {}, {})
        assert (await run(pod, "id -un; echo $PATH"))["stdout"] == "sandbox\n/bin\n"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: to become another user")
async def test_an_unprivileged_user_runs_images_too(
    bundle: Path, busybox: bytes, unprivileged_python: tuple[str, int]
) -> None:
    python, uid = unprivileged_python
    script = textwrap.dedent(
        """
        import asyncio, json, sys
        from pathlib import Path
        from manager.errors import IsolationUnavailable
        from manager.model import Profile
        from manager.providers.local.provider import LocalProvider
        from tests.support.local_pods import run, token_for

        async def main():
            data, bundle, image = sys.argv[1:]
            provider = LocalProvider("here", Path(data), token_for, bundle=Path(bundle))
            profile = Profile(name="image", image=image, cpu=None, memory_bytes=None, pids=None)
            try:
                pod = await provider.create(profile, "p1", {}, {})
                said = await run(pod, "id; cat /etc/motd; touch /x /bin/x 2>/dev/null || echo not written")
                await provider.delete("p1")
            except IsolationUnavailable as why:
                said = {"refused": str(why)}
            await provider.close()
            print(json.dumps(said))

        asyncio.run(main())
        """
    )
    home = Path(tempfile.mkdtemp(prefix="sojourn-home-"))
    oci_layout(home / "image", *busybox_layers(busybox), env=["PATH=/bin"])
    shutil.copytree(bundle, home / "bundle", symlinks=True)
    os.chown(home, uid, uid)
    argv = [python, "-c", script, str(home / "data"), str(home / "bundle"), f"oci:{home / 'image'}"]
    env = {"HOME": str(home), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)}
    try:
        done = await asyncio.to_thread(
            subprocess.run, argv, cwd=ROOT, user=uid, group=uid, extra_groups=[], env=env, capture_output=True,
            text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(home)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    if "refused" in said:
        pytest.skip(f"no user namespaces here: {said['refused']}")
    assert said["stdout"].splitlines() == ["uid=1000(sandbox) gid=1000(sandbox)", "second", "not written"], said
