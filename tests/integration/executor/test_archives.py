"""Archives in and out of a running executor: what is kept, what is refused, and that nothing refused leaves a trace."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import pwd
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support import tar_corpus
from tests.support.executor_pod import ExecutorProcess, Pod, connected
from tests.support.tar_corpus import END, directory, fingerprint, make_canary, member, symlink

TAR = shutil.which("tar")
needs_tar = pytest.mark.skipif(TAR is None, reason="no tar program here")
needs_zstd = pytest.mark.skipif(shutil.which("zstd") is None, reason="no zstd program here")
MiB = 1 << 20


@pytest.fixture
def empty(executor: Pod) -> Pod:
    """The shared executor, nothing in its workspace."""
    for path in executor.workspace.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return executor


@pytest.fixture
def outside(executor: Pod) -> Path:
    """A tree beside the workspace, the command user's own: no permission keeps an archive out of it."""
    path = executor.workspace.parent / "outside"
    if path.exists():
        shutil.rmtree(path)
    make_canary(path)
    for one in [path, *path.rglob("*")]:
        os.chown(one, executor.user.pw_uid, executor.user.pw_gid, follow_symlinks=False)
    return path


def tree_of(path: Path) -> dict[str, tuple[int, str | bytes]]:
    """name -> (mode, content or target)."""
    found: dict[str, tuple[int, str | bytes]] = {}
    for one in sorted(path.rglob("*")):
        mode = one.lstat().st_mode
        content: str | bytes = (
            os.readlink(one) if stat.S_ISLNK(mode) else one.read_bytes() if stat.S_ISREG(mode) else ""
        )
        found[str(one.relative_to(path))] = (stat.S_IMODE(mode), content)
    return found


def unpacked_by_tar(data: bytes, into: Path) -> str:
    """What the system's tar says on stderr; the files are in `into`."""
    command = ["tar", "xpf", "-", "-C", str(into)]
    done = subprocess.run(command, input=data, capture_output=True, check=False, env=os.environ | {"LC_ALL": "C"})
    assert done.returncode == 0, done.stderr
    return done.stderr.decode()


# ── in ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", sorted(tar_corpus.REFUSED))
async def test_an_attack_is_refused_whole_and_leaves_nothing(empty: Pod, outside: Path, name: str) -> None:
    before, code_and_data = fingerprint(outside), tar_corpus.attack(name, outside)
    for target in (".", "new/below"):
        reply = await empty.call("PUT", f"/v1/archive?path={target}", code_and_data[1])
        assert reply.code == code_and_data[0], reply.body
        assert os.listdir(empty.workspace) == []
    assert fingerprint(outside) == before
    assert sorted(os.listdir(empty.workspace.parent)) == ["outside", "workspace"]


async def test_the_error_names_the_member(empty: Pod) -> None:
    reply = await empty.call("PUT", "/v1/archive?path=x", member(b"fine") + member(b"a/../b", b"x") + END)
    assert reply.json["error"]["details"]["member"] == "a/../b"
    assert "a/../b" in reply.json["error"]["message"]


async def test_modes_links_and_empty_directories_are_kept_and_all_is_the_command_users(any_tier: Pod) -> None:
    target = any_tier.workspace / "kept"
    reply = await any_tier.call("PUT", "/v1/archive?path=kept", tar_corpus.ordinary())
    assert reply.status == 201, reply.body
    assert (reply.json["entries"], reply.json["files"]) == (8, 3)
    found = tree_of(target)
    assert found["run.sh"] == (0o755, b"#!/bin/sh\n")
    assert found["secret"][0] == 0o600
    assert (found["relative"][1], found["dangling"][1], found["a/up"][1]) == ("run.sh", "nowhere/yet", "../run.sh")
    assert (target / "empty").is_dir()
    assert (target / "hard").stat().st_ino == (target / "secret").stat().st_ino
    assert {path.lstat().st_uid for path in [target, *target.rglob("*")]} == {any_tier.user.pw_uid}
    assert (await any_tier.exec(["./kept/run.sh"]))["exit_code"] == 0


async def test_set_id_and_sticky_bits_are_masked(empty: Pod) -> None:
    data = member(b"suid", b"x", mode=0o6755) + directory(b"sticky", 0o1777) + directory(b"sgid", 0o2755) + END
    assert (await empty.call("PUT", "/v1/archive?path=m", data)).status == 201
    found = tree_of(empty.workspace / "m")
    assert [found[name][0] for name in ("suid", "sticky", "sgid")] == [0o755, 0o777, 0o755]


async def test_directories_that_their_owner_may_not_use_are_filled_first(empty: Pod) -> None:
    data = (
        directory(b"./", 0o700)
        + directory(b"shut", 0o500)
        + directory(b"shut/in", 0)
        + member(b"shut/in/f", b"x")
        + END
    )
    for _ in ("new", "again, into what is there"):
        reply = await empty.call("PUT", "/v1/archive?path=m", data)
        if reply.status == 403:  # in a directory of mode 500 nothing can be replaced, and that was seen beforehand
            continue
        assert reply.status == 201, reply.body
    assert stat.S_IMODE((empty.workspace / "m").stat().st_mode) == 0o700
    assert stat.S_IMODE((empty.workspace / "m/shut").stat().st_mode) == 0o500
    assert sorted(os.listdir(empty.workspace / "m")) == ["shut"]


async def test_names_that_are_no_text_and_names_that_differ_by_case_come_back_as_they_were(
    empty: Pod, tmp_path: Path
) -> None:
    names = [
        b"\xff\xfe",
        b"a b\n",
        b"CON",
        b"con",
        "é".encode(),
        "e\u0301".encode(),
        b"\\",
        b"n" * 255,
        b"-rf",
        b"\xfe" * 200,
    ]
    data = b"".join(tar_corpus.long_name(name) + member(b"x", name) for name in names) + END
    assert (await empty.call("PUT", "/v1/archive?path=odd", data)).status == 201
    assert sorted(os.listdir(os.fsencode(empty.workspace / "odd"))) == sorted(names)
    back = await empty.call("GET", "/v1/archive?path=odd")
    with tarfile.open(fileobj=io.BytesIO(back.body)) as tar:
        assert sorted(os.fsencode(name) for name in tar.getnames() if name != ".") == sorted(names)
    assert (await empty.call("PUT", "/v1/archive?path=odd2", back.body)).status == 201
    assert tree_of(empty.workspace / "odd2") == tree_of(empty.workspace / "odd")


async def test_an_archive_is_joined_with_what_is_there_and_replaces_files_in_one_step(empty: Pod) -> None:
    first = member(b"a/old", b"old") + member(b"a/f", b"one") + symlink(b"l", b"a") + END
    assert (await empty.call("PUT", "/v1/archive?path=.", first)).status == 200
    second = member(b"a/f", b"two") + member(b"a/new/g", b"new") + member(b"l", b"a file now") + END
    assert (await empty.call("PUT", "/v1/archive?path=.", second)).status == 200
    found = {name: content for name, (_, content) in tree_of(empty.workspace).items() if content}
    assert found == {"a/old": b"old", "a/f": b"two", "a/new/g": b"new", "l": b"a file now"}


@pytest.mark.parametrize(
    ("there", "data"),
    [
        (symlink(b"d", b"elsewhere"), member(b"d/f", b"x")),
        (member(b"d", b"file"), member(b"d/f", b"x")),
        (member(b"d/f", b"file"), member(b"d", b"x")),
        (directory(b"z/z"), member(b"a", b"x") + member(b"z/z", b"x")),
    ],
    ids=["below a link", "below a file", "over a directory", "the last of several"],
)
async def test_what_cannot_be_replaced_is_told_before_anything_is(empty: Pod, there: bytes, data: bytes) -> None:
    assert (await empty.call("PUT", "/v1/archive?path=.", there + END)).status == 200
    before = fingerprint(empty.workspace / os.listdir(empty.workspace)[0])
    assert (await empty.call("PUT", "/v1/archive?path=.", data + END)).code == "conflict"
    assert len(os.listdir(empty.workspace)) == 1
    assert fingerprint(empty.workspace / os.listdir(empty.workspace)[0]) == before


async def test_a_target_that_is_or_lies_behind_a_link_is_refused(empty: Pod, outside: Path) -> None:
    (empty.workspace / "l").symlink_to(outside)
    before = fingerprint(outside)
    for path in ("l", "l/inner", "l/new"):
        assert (await empty.call("PUT", f"/v1/archive?path={path}", member(b"f", b"x") + END)).code == "invalid_path"
        assert (await empty.call("GET", f"/v1/archive?path={path}")).code == "invalid_path"
    assert fingerprint(outside) == before


@pytest.mark.parametrize("query", ["", "path=", "path=../x", "path=x&format=zip", "path=x&formt=tar", "path=%00"])
async def test_what_is_no_request_is_refused(empty: Pod, query: str) -> None:
    reply = await empty.call("PUT", f"/v1/archive?{query}", member(b"f") + END)
    assert (reply.status, os.listdir(empty.workspace)) == (400, [])


async def test_the_user_is_one_that_the_profile_allows(empty: Pod) -> None:
    for method in ("PUT", "GET"):
        reply = await empty.call(
            method, "/v1/archive?path=.&user=root", member(b"f") + END if method == "PUT" else None
        )
        assert reply.code in ("user_not_allowed", "permission_denied"), reply.body
    assert os.listdir(empty.workspace) == []


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a third user")
async def test_all_calls_on_trees_act_as_the_user_that_they_name(
    fresh_executor: Callable[..., AbstractContextManager[ExecutorProcess]],
) -> None:
    with fresh_executor("split", env={"SOJOURN_USERS": "games"}) as process:
        other = pwd.getpwnam("games")
        async with connected(process) as pod:
            base = Path(tempfile.mkdtemp(prefix="theirs-", dir="/tmp"))
            try:
                os.chown(base, other.pw_uid, other.pw_gid)  # and closed to the command user
                for target in (f"{base}/t", f"{base}/t"):
                    url = f"/v1/archive?path={target}"
                    assert (await pod.call("PUT", url, tar_corpus.ordinary())).code == "permission_denied"
                    assert (await pod.call("PUT", f"{url}&user=games", tar_corpus.ordinary())).status in (200, 201)
                assert {path.lstat().st_uid for path in base.rglob("*")} == {other.pw_uid}
                for call in (f"archive?path={base}", f"files/search?path={base}&name=*.sh", f"files/watch?path={base}"):
                    assert (await pod.call("GET", f"/v1/{call}")).code == "permission_denied"
                found = await pod.call("GET", f"/v1/files/search?path={base}&name=*.sh&user=games")
                assert [one["path"] for one in found.json["matches"]] == [f"{base}/t/run.sh"]
                packed = await pod.call("GET", f"/v1/archive?path={base}/t&user=games")
                with tarfile.open(fileobj=io.BytesIO(packed.body)) as tar:
                    assert "secret" in tar.getnames()
                body = {"path": f"{base}/t/secret", "mode": 0o640}
                assert (await pod.call("POST", "/v1/files/chmod", body)).code == "permission_denied"
                assert (await pod.call("POST", "/v1/files/chmod?user=games", body)).json["entry"]["mode"] == 0o640
            finally:
                shutil.rmtree(base)


async def test_formats_are_told_by_query_by_content_type_or_by_the_first_bytes(empty: Pod) -> None:
    plain = member(b"f", b"x") + END
    packed = gzip.compress(plain)
    for at, (data, query, kind) in enumerate([
        (packed, "&format=gzip", ""), (packed, "", "application/gzip"), (packed, "", ""), (plain, "&format=tar", ""),
        (plain, "", "application/x-tar"), (plain, "", "application/octet-stream"),
    ]):  # fmt: skip
        headers = {"Content-Type": kind} if kind else {}
        reply = await empty.call("PUT", f"/v1/archive?path=t{at}{query}", data, headers=headers)
        assert reply.status == 201, reply.body
    assert (await empty.call("PUT", "/v1/archive?path=no&format=tar", packed)).code == "invalid_request"
    assert (await empty.call("PUT", "/v1/archive?path=no&format=gzip", plain)).code == "invalid_request"
    reply = await empty.call("PUT", "/v1/archive?path=no", packed, headers={"Content-Encoding": "gzip"})
    assert reply.code == "invalid_request"
    assert not (empty.workspace / "no").exists()


async def test_gzip_members_one_after_the_other_are_one_archive(empty: Pod) -> None:
    plain = member(b"f", os.urandom(100_000)) + END
    pieces = [gzip.compress(plain[at : at + 5000]) for at in range(0, len(plain), 5000)]
    assert (await empty.call("PUT", "/v1/archive?path=t", b"".join(pieces) + bytes(512))).status == 201
    assert (empty.workspace / "t/f").stat().st_size == 100_000


@needs_zstd
async def test_zstd_is_unpacked_and_its_bombs_windows_and_damage_are_refused(empty: Pod) -> None:
    def zstd(data: bytes, *options: str) -> bytes:
        return subprocess.run(["zstd", "-cq", *options], input=data, capture_output=True, check=True).stdout

    plain = tar_corpus.ordinary()
    assert (await empty.call("PUT", "/v1/archive?path=z", zstd(plain))).status == 201
    assert (await empty.call("PUT", "/v1/archive?path=z2&format=zstd", zstd(plain))).status == 201
    assert tree_of(empty.workspace / "z") == tree_of(empty.workspace / "z2")
    header = member(b"zeros", size=300 * MiB)
    bomb = zstd(header + bytes(300 * MiB) + END)
    assert (await empty.call("PUT", "/v1/archive?path=no", bomb)).code == "too_large"
    assert (await empty.call("PUT", "/v1/archive?path=no", zstd(header + bytes(MiB), "--ultra", "--long=31"))).code == (
        "invalid_request"
    )
    for broken in (zstd(plain)[:-10], zstd(plain)[:20] + b"\xff" * 50, b"\x28\xb5\x2f\xfd" + os.urandom(5000)):
        assert (await empty.call("PUT", "/v1/archive?path=no&format=zstd", broken)).code == "invalid_request"
    assert sorted(os.listdir(empty.workspace)) == ["z", "z2"]


async def test_an_upload_that_breaks_off_leaves_nothing(empty: Pod) -> None:
    begun = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield member(b"f", b"x" * MiB)[: MiB // 2]
        begun.set()
        await asyncio.sleep(3600)

    headers = {"Authorization": f"Bearer {empty.token}"}
    sending = asyncio.create_task(_put(empty, body(), headers))
    await begun.wait()
    while not os.listdir(empty.workspace):  # the stage
        await asyncio.sleep(0.01)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    while os.listdir(empty.workspace):
        await asyncio.sleep(0.01)


async def _put(pod: Pod, body: AsyncIterator[bytes], headers: dict[str, str]) -> None:
    async with pod.session.put(f"{pod.url}/v1/archive?path=t", data=body, headers=headers) as answer:
        await answer.read()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
async def test_a_full_disk_is_told_and_leaves_nothing(
    fresh_executor: Callable[..., AbstractContextManager[ExecutorProcess]],
) -> None:
    with fresh_executor() as process:
        where = str(process.workspace)
        options = f"size=8m,nr_inodes=200,uid={process.user.pw_uid},mode=755"
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", where], check=False)
        if mounted.returncode:
            pytest.skip("no tmpfs can be mounted here")
        try:
            async with connected(process) as pod:
                for data in (member(b"big", bytes(9 * MiB)), b"".join(member(b"f%d" % at) for at in range(300))):
                    reply = await pod.call("PUT", "/v1/archive?path=t", data + END)
                    assert reply.code == "no_space", reply.body
                    assert os.listdir(where) == []
        finally:
            subprocess.run(["umount", "-l", where], check=True)


async def test_bombs_and_large_archives_cost_no_memory(
    fresh_executor: Callable[..., AbstractContextManager[ExecutorProcess]],
) -> None:
    with fresh_executor() as process:
        async with connected(process) as pod:
            await pod.call("PUT", "/v1/archive?path=warm", tar_corpus.ordinary())
            before = process.status_kib("VmRSS")
            assert (await pod.call("PUT", "/v1/archive?path=t", tar_corpus.bomb(512))).code == "too_large"
            big = member(b"f", bytes(128 * MiB)) + END
            assert (await pod.call("PUT", "/v1/archive?path=t", big)).status == 201
            async with pod.session.get(
                f"{pod.url}/v1/archive?path=t", headers={"Authorization": f"Bearer {pod.token}"}
            ) as answer:
                size = sum([len(piece) async for piece in answer.content.iter_any()])
            assert size > 128 * MiB
            assert process.status_kib("VmHWM") - before < 64 * 1024


# ── out ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@needs_tar
@pytest.mark.parametrize("format", ["tar", "gzip", pytest.param("zstd", marks=needs_zstd)])
async def test_a_directory_comes_out_as_a_tar_that_the_systems_tar_unpacks(
    empty: Pod, tmp_path: Path, format: str
) -> None:
    assert (await empty.call("PUT", "/v1/archive?path=t", tar_corpus.ordinary())).status == 201
    reply = await empty.call("GET", f"/v1/archive?path=t&format={format}")
    assert reply.status == 200
    assert reply.headers["Content-Type"] == f"application/{'x-tar' if format == 'tar' else format}"
    data = reply.body
    if format == "zstd":
        data = subprocess.run(["zstd", "-dcq"], input=data, capture_output=True, check=True).stdout
    assert unpacked_by_tar(gzip.decompress(data) if format == "gzip" else data, tmp_path) == ""
    assert tree_of(tmp_path) == tree_of(empty.workspace / "t")


@needs_tar
async def test_a_directory_whose_files_never_rest_gives_a_valid_archive_every_time(empty: Pod, tmp_path: Path) -> None:
    script = "mkdir d; while :; do echo line >> d/log; head -c 200000 /dev/urandom > d/cut; : > d/cut; done"
    id = await empty.start(script)
    while not (empty.workspace / "d/cut").exists():
        await asyncio.sleep(0.01)
    for at in range(10):
        reply = await empty.call("GET", "/v1/archive?path=d")
        assert reply.status == 200
        into = tmp_path / str(at)
        into.mkdir()
        assert unpacked_by_tar(reply.body, into) == ""
        assert {"log"} <= set(os.listdir(into)) <= {"log", "cut"}
        with tarfile.open(fileobj=io.BytesIO(reply.body)) as tar:
            last = tar.getmembers()[-1]
        assert last.name == "."
        assert last.pax_headers["comment"].startswith("sojourn: {")
    await empty.call("DELETE", f"/v1/processes/{id}")


@needs_tar
@pytest.mark.parametrize("change", ["echo more >> d/log", ": > d/log", "rm d/log; mkfifo d/log"])
async def test_a_file_that_changes_while_it_is_packed_is_named_in_the_report(
    empty: Pod, tmp_path: Path, change: str
) -> None:
    size = 64 * MiB
    await empty.exec(f"mkdir d; truncate -s {size} d/log")
    headers = {"Authorization": f"Bearer {empty.token}"}
    async with empty.session.get(f"{empty.url}/v1/archive?path=d", headers=headers) as answer:
        data = await answer.content.readexactly(1024)  # nobody reads the rest, so it is not packed yet
        await empty.exec(change)
        data += await answer.read()
    assert unpacked_by_tar(data, tmp_path) == ""
    assert (tmp_path / "log").stat().st_size == size
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert '"changed": {"count": 1, "names": ["log"]}' in tar.getmembers()[-1].pax_headers["comment"]


@needs_tar
async def test_what_has_no_content_is_left_out_and_counted_and_what_may_not_be_read_is_named(
    empty: Pod, tmp_path: Path
) -> None:
    await empty.exec(
        "mkdir -p d/shut d/ok; mkfifo d/fifo;"
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"d/sock\")';"
        "echo x > d/ok/f; echo x > d/hidden; chmod 0 d/hidden d/shut; ln -s /etc/passwd d/out"
    )
    reply = await empty.call("GET", "/v1/archive?path=d")
    unpacked_by_tar(reply.body, tmp_path)
    with tarfile.open(fileobj=io.BytesIO(reply.body)) as tar:
        comment = tar.getmembers()[-1].pax_headers["comment"]
    assert '"special": {"count": 2' in comment
    if empty.process.tier == "split" or os.geteuid() != 0:
        assert '"unreadable": {"count": 2' in comment
    assert (tmp_path / "ok/f").read_text() == "x\n"
    assert os.readlink(tmp_path / "out") == "/etc/passwd"
    await empty.exec("chmod -R u+rwX d")


async def test_what_is_no_directory_is_told_before_the_answer_begins(empty: Pod) -> None:
    (empty.workspace / "f").write_text("x")
    assert (await empty.call("GET", "/v1/archive?path=f")).code == "not_a_directory"
    assert (await empty.call("GET", "/v1/archive?path=missing")).code == "file_not_found"
    assert (await empty.call("GET", "/v1/archive?path=/etc")).code == "invalid_path"


async def test_a_directory_that_is_too_deep_comes_as_far_as_it_goes_and_says_so(empty: Pod) -> None:
    await empty.exec("mkdir -p d; cd d; for i in $(seq 300); do mkdir x; cd x; done")
    reply = await empty.call("GET", "/v1/archive?path=d")
    assert b'"too_deep": {"count": 1' in reply.body
    assert (await empty.call("DELETE", "/v1/files?path=d&recursive=true")).status == 204


async def test_a_file_that_grows_while_it_is_packed_spoils_no_archive(empty: Pod) -> None:
    """FI13"""
    await empty.exec("mkdir growing; echo first > growing/log")
    id = await empty.start("while :; do head -c 100000 /dev/zero >> growing/log; done")
    try:
        for _ in range(10):
            reply = await empty.call("GET", "/v1/archive?path=growing")
            assert reply.status == 200
            with tarfile.open(fileobj=io.BytesIO(reply.body)) as archive:
                assert "log" in {Path(name).name for name in archive.getnames()}
                for member in archive.getmembers():
                    if member.isfile():
                        content = archive.extractfile(member)
                        assert content is not None
                        assert len(content.read()) == member.size
    finally:
        await empty.call("DELETE", f"/v1/processes/{id}")
        await empty.exec("rm -rf growing")
