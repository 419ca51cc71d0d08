"""Layers of a running executor's workspace, out and in, in both tiers: exact, whole or not at all, and no way out."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from executor.layerformat import GONE, WHITEOUT
from executor.layers import refusal
from executor.layerwire import END_BYTES, LAYER_BASE_HEADER, LAYER_STATE_HEADER, LayerReport, NoLayerEnd, read_layer_end
from executor.tarread import TarRefused
from manager.executor_client import ExecutorClient, PodRef, pod_token
from tests.support.executor_pod import IS_ROOT, PYTHON, ExecutorProcess, Pod, connected
from tests.support.tar_corpus import END, directory, fingerprint, hardlink, make_canary, member, pax, symlink
from tests.support.trees import Picture, apply, differences, packed, picture, unpacked

pytestmark = pytest.mark.skipif(shutil.which("zstd") is None, reason="no zstd program here")
MiB = 1 << 20


@pytest.fixture
async def pod(any_tier: Pod) -> Pod:
    """Nothing in its workspace, and no state known to anybody."""
    await any_tier.exec("chmod -R u+rwx . ; find . -mindepth 1 -delete")
    return any_tier


async def changes(pod: Pod, since: str | None = None) -> tuple[bytes, LayerReport]:
    """The layer, which is whole."""
    reply = await pod.call("GET", "/v1/changes" + (f"?since={since}" if since else ""))
    assert reply.status == 200, reply.body
    report = read_layer_end(reply.body[-END_BYTES:])
    assert report.sha256 == hashlib.sha256(reply.body[:-END_BYTES]).hexdigest()
    assert reply.headers[LAYER_STATE_HEADER] == report.state
    assert reply.headers[LAYER_BASE_HEADER] == (report.base or "none")
    return reply.body, report


async def put(pod: Pod, layer: bytes, query: str = "", sha256: str | None = None) -> Any:
    digest = hashlib.sha256(layer).hexdigest() if sha256 is None else sha256
    return await pod.call("PUT", f"/v1/layers?sha256={digest}{query}", layer)


SCRIPT = r"""
mkdir -p dir/empty 'with space' && echo hello >dir/file && chmod 640 dir/file && ln dir/file dir/second
ln -s /usr/bin/env tool && ln -s missing broken && mkfifo fifo && truncate -s 5M sparse && echo tail >>sparse
printf x >$'\xff\xfe' && printf x >.wh.file && chmod 1777 dir/empty && chmod 0 'with space'
touch -d '2001-02-03 04:05:06.789012345' dir/file && head -c 3000000 /dev/urandom >random
sleep 0.2
"""


async def test_a_workspace_comes_back_as_it_was_out_of_the_layers_of_its_changes(pod: Pod) -> None:
    """Modes, owners, links, holes, times; layer after layer, each with only what changed."""
    await pod.exec(["bash", "-c", SCRIPT])
    first, one = await changes(pod)
    assert one.base is None
    await pod.exec(
        "echo more >>dir/second; rm tool; mv random renamed; mkdir new; chmod 700 'with space'; echo x >new/x;sleep 0.2"
    )
    second, two = await changes(pod, one.state)
    assert two.base == one.state
    assert two.removed == 2
    await pod.exec("rm -r new; printf y >.wh.file; sleep 0.2")
    third, three = await changes(pod, two.state)
    assert len(third) < len(second) < len(first) + 4096
    before = picture(pod.workspace)

    await pod.exec("find . -mindepth 1 -delete; echo image >from-the-image")
    states = []
    for layer, last in ((first, ""), (second, ""), (third, "&last=true")):
        reply = await put(pod, layer, last)
        assert reply.status == 200, reply.body
        states.append(reply.json["state"])
        assert reply.headers.get(LAYER_STATE_HEADER) == states[-1]
    assert states[:2] == [None, None]
    assert differences(before, picture(pod.workspace)) == []

    fourth, four = await changes(pod, states[2])
    assert (four.base, four.entries, four.removed) == (states[2], 0, 0)
    await pod.exec("echo changed >dir/file")
    fourth, four = await changes(pod, states[2])
    assert (four.entries, b"changed" in unpacked(fourth)) == (2, True)  # its two names
    del three


async def test_a_state_becomes_the_base_only_when_it_is_named(pod: Pod) -> None:
    """F24: a manager that dies before it has noted the new state asks with the old one again."""
    await pod.exec("echo 1 >one")
    _, first = await changes(pod)
    await pod.exec("echo 2 >two")
    await changes(pod, first.state)  # whose answer is lost
    await pod.exec("echo 3 >three")
    layer, third = await changes(pod, first.state)
    assert third.base == first.state
    assert {b"two", b"three"} <= set(unpacked(layer).replace(b"\0", b" ").split())
    _, fourth = await changes(pod, third.state)
    assert fourth.base == third.state
    _, gone = await changes(pod, first.state)
    assert gone.base is None  # it cannot be named any more: a full layer


async def test_a_state_of_another_pod_gives_a_full_layer(pod: Pod) -> None:
    await pod.exec("echo 1 >one")
    layer, report = await changes(pod, "0" * 32)
    assert report.base is None
    assert b"SOJOURN.whiteout=emptied" in unpacked(layer)


@pytest.mark.parametrize("since", ["x", "0" * 31, "0" * 33, "G" * 32, ""])
async def test_a_state_that_is_none_is_refused(pod: Pod, since: str) -> None:
    reply = await pod.call("GET", f"/v1/changes?since={since}")
    assert (reply.status, reply.code) == (400, "invalid_request")


async def test_a_call_that_breaks_off_changes_no_state_and_frees_its_turn(pod: Pod) -> None:
    """F24: half a layer has no end mark, and the next one starts from the same base."""
    await pod.exec("echo 1 >one")
    _, first = await changes(pod)
    await pod.exec("head -c 20000000 /dev/urandom >random")
    headers = {"Authorization": f"Bearer {pod.token}"}
    async with pod.session.get(f"{pod.url}/v1/changes?since={first.state}", headers=headers) as answer:
        half = await answer.content.read(300_000)
        again = await pod.call("GET", f"/v1/changes?since={first.state}")
        assert (again.status, again.code) == (409, "conflict")
        answer.close()
    with pytest.raises(NoLayerEnd):
        read_layer_end(half[-END_BYTES:])
    layer = b""
    for _ in range(600):  # the call before ends when its connection is seen to be gone
        reply = await pod.call("GET", f"/v1/changes?since={first.state}")
        if reply.status == 200:
            layer = reply.body
            break
        await asyncio.sleep(0.1)
    report = read_layer_end(layer[-END_BYTES:])
    assert report.base == first.state
    assert report.bytes >= 20_000_000


async def test_layers_count_as_work(pod: Pod) -> None:
    """Design 5: the pod does not end itself while one is under way."""
    await pod.exec("head -c 20000000 /dev/urandom >random")
    async with pod.session.get(f"{pod.url}/v1/changes", headers={"Authorization": f"Bearer {pod.token}"}) as answer:
        await answer.content.read(1000)
        lease = (await pod.call("GET", "/v1/lease")).json
        assert lease["operations"] == 1
        assert len(await answer.read()) > 19_000_000


async def test_the_manager_takes_layers_out_of_one_pod_and_lays_them_over_another(
    fresh_executor: Callable[..., AbstractContextManager[ExecutorProcess]],
) -> None:
    """S12: with a base that the new pod knows from then on."""
    secret, layers, state = b"secret", list[bytes](), None
    before: Picture = {}
    token = pod_token(secret, "pod-1")
    client = ExecutorClient(secret)
    try:
        for life in range(2):
            with fresh_executor(token=token, env={"SOJOURN_POD_NAME": "pod-1"}) as process:
                pod = PodRef("pod-1", f"unix:{process.socket}", 60)
                for number, data in enumerate(layers):
                    applied = await client.apply_layer(
                        pod, in_pieces(data), sha256=hashlib.sha256(data).hexdigest(),
                        last=number == len(layers) - 1, max_bytes=len(data) + MiB, max_entries=100,
                    )  # fmt: skip
                    state = applied.state
                if life:
                    assert differences(before, picture(process.workspace)) == []
                for step in range(2):
                    path = process.workspace / f"file-{life}-{step}"
                    path.write_bytes(os.urandom(500_000))
                    async with client.changes(pod, state) as layer:
                        layers.append(b"".join([chunk async for chunk in layer.chunks()]))
                        assert (layer.base is None) == (not life and not step)
                        assert layer.report.bytes < 1_100_000
                        state = layer.report.state
                before = picture(process.workspace)
        assert len(layers) == 4
    finally:
        await client.close()


async def in_pieces(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), 50_000):
        yield data[at : at + 50_000]


# ── refused ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def own_pod(
    request: pytest.FixtureRequest, fresh_executor: Callable[..., AbstractContextManager[ExecutorProcess]]
) -> AsyncIterator[Pod]:
    """One that a test may ruin."""
    with fresh_executor(getattr(request, "param", "split" if IS_ROOT else "single")) as process:
        async with connected(process) as one:
            yield one


def mark(name: bytes, what: bytes = GONE) -> bytes:
    return pax((WHITEOUT, what)) + member(name, b"", mode=0)


def device(kind: bytes) -> bytes:
    return member(b"dev", kind=kind)


ATTACKS: dict[str, tuple[str, bytes]] = {
    "dot_dot": ("invalid_path", member(b"../evil", b"x")),
    "dot_dot_inside": ("invalid_path", member(b"a/../../evil", b"x")),
    "absolute": ("invalid_path", member(b"/tmp/evil", b"x")),
    "through_a_link": ("invalid_path", symlink(b"out", b"../outside") + member(b"out/evil", b"x")),
    "through_a_link_of_the_workspace": ("invalid_path", member(b"old-link/evil", b"x")),
    "directory_through_a_link": ("invalid_path", directory(b"old-link/evil")),
    "mark_through_a_link": ("invalid_path", mark(b"old-link/.wh.secret")),
    "emptied_through_a_link": ("invalid_path", mark(b"old-link/.wh..wh..opq", b"emptied")),
    "hard_link_through_a_link": ("invalid_path", hardlink(b"mine", b"old-link/secret")),
    "hard_link_to_a_link": ("invalid_path", symlink(b"l", b"../outside/secret") + hardlink(b"mine", b"l")),
    "hard_link_outside": ("invalid_path", hardlink(b"mine", b"../outside/secret")),
    "hard_link_to_nothing": ("invalid_path", hardlink(b"mine", b"nothing")),
    "hard_link_to_itself": ("invalid_path", member(b"f", b"x") + hardlink(b"f", b"f")),
    "mark_of_dot_dot": ("invalid_request", mark(b".wh...")),
    "mark_of_the_parent": ("invalid_path", mark(b"../.wh.outside")),
    "mark_without_a_name": ("invalid_request", mark(b"a/.wh.")),
    "mark_of_a_kind_that_is_none": ("invalid_request", mark(b".wh.a", b"other")),
    "mark_with_content": ("invalid_request", pax((WHITEOUT, GONE)) + member(b".wh.a", b"content")),
    "character_device": ("invalid_request", device(b"3")),
    "block_device": ("invalid_request", device(b"4")),
    "unknown_type": ("invalid_request", device(b"V")),
    "root_as_a_file": ("invalid_path", member(b".", b"x")),
    "nul_in_a_target": ("invalid_path", pax((b"linkpath", b"a\0b")) + member(b"l", kind=b"2")),
    "capabilities": ("invalid_request", pax((b"SCHILY.xattr.security.capability", b"x")) + member(b"f", b"x")),
    "trusted_attribute": ("invalid_request", pax((b"SCHILY.xattr.trusted.overlay.opaque", b"y")) + member(b"f", b"x")),
    "negative_hole": (
        "invalid_request", pax((b"SOJOURN.sparse", b"-1,1"), (b"SOJOURN.size", b"9")) + member(b"f", b"x"),
    ),
    "overlapping_extents": (
        "invalid_request", pax((b"SOJOURN.sparse", b"5,1,0,1"), (b"SOJOURN.size", b"9")) + member(b"f", b"xy"),
    ),
    "extents_beyond_the_end": (
        "invalid_request", pax((b"SOJOURN.sparse", b"9,1"), (b"SOJOURN.size", b"9")) + member(b"f", b"x"),
    ),
    "extents_of_other_content": (
        "invalid_request", pax((b"SOJOURN.sparse", b"0,5"), (b"SOJOURN.size", b"9")) + member(b"f", b"x"),
    ),
    "owner_that_is_none": ("invalid_request", pax((b"uid", b"4294967295")) + member(b"f", b"x")),
    "owner_of_all": ("invalid_request", pax((b"uid", b"0"), kind=b"g") + member(b"f", b"x")),
    "gnu_sparse": ("invalid_request", pax((b"GNU.sparse.major", b"1")) + member(b"f", b"x")),
    "too_deep": ("too_large", pax((b"path", b"d/" * 257 + b"f")) + member(b"f", b"x")),
    "name_too_long": ("invalid_path", pax((b"path", b"n" * 256)) + member(b"f", b"x")),
    "huge_file": ("too_large", pax((b"size", b"2000000000000")) + member(b"f", b"", size=0)),
    "data_behind_the_end": ("invalid_request", END + member(b"f", b"x")),
    "checksum": ("invalid_request", member(b"f", b"x", checksum=1)),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_no_layer_leads_out_of_the_workspace_or_brings_what_it_must_not(name: str, tmp_path: Path) -> None:
    """S8, S12: a layer is a stranger's bytes, laid over the workspace by root."""
    outside, workspace = tmp_path / "outside", tmp_path / "workspace"
    workspace.mkdir()
    make_canary(outside)
    (workspace / "old-link").symlink_to("../outside")
    before = fingerprint(outside)
    code, tar = ATTACKS[name]
    with pytest.raises(TarRefused) as refused:
        apply(member(b"good", b"good") + tar + END, workspace)
    assert refusal(refused.value).code == code
    assert fingerprint(outside) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "workspace"]
    for path in workspace.rglob("*"):
        assert stat.S_IFMT(path.lstat().st_mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)


@pytest.mark.parametrize("own_pod", ["split", "single"] if IS_ROOT else ["single"], indirect=True)
async def test_after_half_a_layer_nothing_of_the_workspace_is_ever_sent_again(own_pod: Pod) -> None:
    """F24: what is neither old nor new must not become a checkpoint."""
    good = packed(member(b"one", b"x") + END)
    assert (await put(own_pod, good)).status == 200
    early = await put(own_pod, b"no zstd")
    assert (early.status, early.code, early.json["error"]["details"].get("partial")) == (400, "invalid_request", None)
    half = await put(own_pod, packed(member(b"two", b"x") + member(b"/three", b"x") + END))
    assert (half.status, half.code, half.json["error"]["details"]["partial"]) == (400, "invalid_path", True)
    for reply in (await own_pod.call("GET", "/v1/changes"), await put(own_pod, good)):
        assert (reply.status, reply.code, reply.json["error"]["details"]["partial"]) == (409, "conflict", True)
    assert (await own_pod.exec("cat one two"))["stdout"] == "xx"


@pytest.mark.parametrize("what", ["sha256", "cut", "cut tar", "max_bytes", "max_entries", "zeros", "bomb"])
async def test_a_layer_that_is_not_the_one_meant_is_told_of(own_pod: Pod, what: str) -> None:
    tar = b"".join(member(b"f%d" % index, b"x" * 1000) for index in range(300)) + END
    query, sha256, layer = "", None, packed(tar)
    code = "invalid_request"
    match what:
        case "sha256":
            sha256 = "0" * 64
        case "cut":
            layer = layer[:-20]
        case "cut tar":
            layer = packed(tar[: len(tar) // 2])
        case "max_bytes":
            query, code = "&max_bytes=299999", "too_large"
        case "max_entries":
            query, code = "&max_entries=290", "too_large"
        case "zeros":
            layer, code = packed(tar + bytes(9 * MiB)), "too_large"
        case "bomb":
            bomb = member(b"bomb", b"", size=4 << 30)
            layer, query, code = packed(bomb + bytes(64 * MiB)), "&max_bytes=1000000", "too_large"
    reply = await put(own_pod, layer, query, sha256)
    assert reply.code == code, reply.body
    exact = await put(own_pod, packed(tar), "&max_bytes=300000&max_entries=300")
    partial = reply.json["error"]["details"].get("partial", False)
    assert exact.status == (409 if partial else 200)
    assert partial == (what != "bomb")


@pytest.mark.parametrize("query", ["", "?sha256=1", "?sha256=" + "0" * 64 + "&last=perhaps", "?other=1"])
async def test_a_layer_without_its_hash_is_refused_unread(pod: Pod, query: str) -> None:
    reply = await pod.call("PUT", "/v1/layers" + query, b"x")
    assert (reply.status, reply.code) == (400, "invalid_request")


async def test_two_layers_are_never_laid_over_a_workspace_at_once(pod: Pod) -> None:
    began, go_on = asyncio.Event(), asyncio.Event()
    layer = packed(member(b"slow", b"x") + END)

    async def slowly() -> AsyncIterator[bytes]:
        yield layer[:10]
        began.set()
        await go_on.wait()
        yield layer[10:]

    async def first() -> int:
        digest = hashlib.sha256(layer).hexdigest()
        headers = {"Authorization": f"Bearer {pod.token}"}
        async with pod.session.put(f"{pod.url}/v1/layers?sha256={digest}", data=slowly(), headers=headers) as answer:
            return answer.status

    task = asyncio.get_running_loop().create_task(first())
    await began.wait()
    for _ in range(600):  # until the first one's head was read
        if (await pod.call("GET", "/v1/lease")).json["operations"]:
            break
        await asyncio.sleep(0.1)
    code = (await put(pod, layer)).code
    other = await pod.call("GET", "/v1/changes")
    go_on.set()
    assert await task == 200
    assert (code, other.code) == ("conflict", "conflict")


# ── secrets, owners, what runs meanwhile ────────────────────────────────────────────────────────────────────────


async def test_a_file_bound_as_a_secret_is_in_no_layer_and_no_layer_touches_it(own_pod: Pod) -> None:
    """S32: also not one in which the user had a file of that name."""
    files = [
        {"path": "conf/token", "content": "TOPSECRET", "mode": 0o600, "secret": True},
        {"path": "conf/plain", "content": "PLAIN"},
    ]
    bound = await own_pod.call("POST", "/v1/bind", {"sandbox_id": "s", "secrets": {"KEY": "ENVSECRET"}, "files": files})
    assert bound.status == 200, bound.body
    layer, report = await changes(own_pod)
    tar = unpacked(layer)
    assert (report.entries, b"PLAIN" in tar, b"SECRET" in tar, b"token" in tar) == (3, True, False, False)
    intruder = packed(member(b"conf/token", b"other") + mark(b"conf/.wh.token") + mark(b".wh.conf") + END)
    assert (await put(own_pod, intruder)).json["left_alone"] == 2
    assert (await own_pod.exec("cat conf/token; ls conf"))["stdout"] == "TOPSECRETtoken\n"


@pytest.mark.root
@pytest.mark.skipif(not IS_ROOT, reason="the split tier needs root")
async def test_files_that_only_their_owner_or_root_may_read_keep_their_owners(own_pod: Pod) -> None:
    await own_pod.exec("umask 077; echo mine >mine; mkdir closed; echo x >closed/x; chmod 0 mine closed; mkdir drop")
    (own_pod.workspace / "of-root").write_text("root")
    (own_pod.workspace / "of-root").chmod(0o600)
    (own_pod.workspace / "drop" / "set").write_text("#!")
    os.chown(own_pod.workspace / "drop" / "set", own_pod.user.pw_uid, own_pod.user.pw_gid)
    (own_pod.workspace / "drop" / "set").chmod(0o6755)
    before = picture(own_pod.workspace)
    layer, report = await changes(own_pod)
    assert report.unreadable == 0
    await own_pod.exec("chmod 700 closed; find . -mindepth 1 -delete")
    reply = await put(own_pod, layer)
    assert (reply.status, reply.json["owners_lost"], reply.json["set_id_dropped"]) == (200, 0, 0)
    assert differences(before, picture(own_pod.workspace)) == []


async def test_links_swapped_in_while_the_tree_is_walked_lead_nowhere(pod: Pod) -> None:
    """S8: the walk is root's; a command replaces directories by links to others and back meanwhile."""
    outside = pod.workspace.parent / f"outside-{pod.process.tier}"
    outside.mkdir()
    try:
        (outside / "f").write_text("FROM-OUTSIDE")
        await pod.exec("for i in $(seq 40); do mkdir -p d$i/in; echo x >d$i/in/f; done")
        swap = (
            f"while :; do for i in $(seq 40); do mv d$i/in d$i/away; ln -s {outside} d$i/in; "
            "rm d$i/in; mv d$i/away d$i/in; done; done"
        )
        running = await pod.start(["bash", "-c", swap])
        try:
            for _ in range(15):
                layer, _ = await changes(pod)
                assert b"FROM-OUTSIDE" not in unpacked(layer)
        finally:
            await pod.call("DELETE", f"/v1/processes/{running}")
    finally:
        shutil.rmtree(outside)


async def test_changes_while_a_command_writes_are_in_this_layer_or_in_the_next(pod: Pod) -> None:
    """F24: after the last layer nothing is missing, whatever was half written in those before."""
    write = (
        "import os, sys\n"
        "for step in range(100000):\n"
        "    open(f'f{step % 50}', 'w').write(str(step) * (step % 3000))\n"
        "    if step % 7 == 0 and os.path.exists(f'f{step % 11}'): os.remove(f'f{step % 11}')\n"
        "    if os.path.exists('stop'): sys.exit()\n"
    )
    running = await pod.start([PYTHON, "-c", write])
    layers, since = [], None
    for _ in range(6):
        layer, report = await changes(pod, since)
        layers.append(layer)
        since = report.state
    await pod.exec("touch stop")
    await pod.ended(running)
    layers.append((await changes(pod, since))[0])
    before = picture(pod.workspace)
    await pod.exec("find . -mindepth 1 -delete")
    for layer in layers:
        assert (await put(pod, layer)).status == 200
    assert differences(before, picture(pod.workspace)) == []


async def test_what_is_written_through_a_shared_map_is_in_the_next_layer(pod: Pod) -> None:
    """The kernel notes no time for a second write to a page that is not written out yet."""
    write = (
        "import mmap, os, sys\n"
        "with open('map', 'wb') as f: f.truncate(4096)\n"
        "m = mmap.mmap(os.open('map', os.O_RDWR), 4096)\n"
        "m[:5] = b'FIRST'\n"
        "print('one', flush=True)\n"
        "sys.stdin.readline()\n"
        "m[:6] = b'SECOND'\n"
        "print('two', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    running = await pod.start([PYTHON, "-c", write])
    await until_written(pod, running, b"one\n")
    await asyncio.sleep(0.2)
    first, one = await changes(pod)
    await pod.call("POST", f"/v1/processes/{running}/stdin", b"\n")
    await until_written(pod, running, b"one\ntwo\n")
    second, _ = await changes(pod, one.state)
    await pod.call("DELETE", f"/v1/processes/{running}")
    assert b"FIRST" in unpacked(first)
    assert b"SECOND" in unpacked(second)


async def until_written(pod: Pod, running: str, output: bytes) -> None:
    for _ in range(600):
        if (await pod.output(running)).body == output:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{output!r} did not come")


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_200_000_entries_cost_no_memory_and_ten_changes_a_fraction_of_the_first(own_pod: Pod) -> None:
    """Constant memory, and a second layer under a tenth of the first."""

    def make(directories: range) -> None:
        for number in directories:  # names of few files: they are made faster, and looked at like others
            above = own_pod.workspace / f"d{number}"
            above.mkdir()
            (above / "first").write_text("x")
            for index in range(5000):
                os.link(above / "first", above / f"a-name-of-some-length-{index}")
        time.sleep(0.2)

    await asyncio.to_thread(make, range(2))
    await changes(own_pod)
    await asyncio.to_thread(make, range(2, 40))
    before = own_pod.process.status_kib("VmHWM")
    began = cpu_sec(own_pod.pid)
    layer, first = await changes(own_pod)
    first_sec = cpu_sec(own_pod.pid) - began
    assert first.entries == 200_081
    for number in range(10):
        (own_pod.workspace / f"d{number}" / "new").write_text("x")
    began = cpu_sec(own_pod.pid)
    small, second = await changes(own_pod, first.state)
    second_sec = cpu_sec(own_pod.pid) - began
    assert second.entries == 20
    assert len(small) * 10 < len(layer)
    assert second.tar_bytes * 10 < first.tar_bytes
    # Half of it, mostly. Two processors that share a core bill each other's work, now this one, now that.
    assert second_sec * 4 < first_sec * 3, (first_sec, second_sec)
    assert own_pod.process.status_kib("VmHWM") - before < 30 * 1024


async def test_a_large_layer_is_laid_over_in_constant_memory(own_pod: Pod) -> None:
    small = b"".join(member(b"d/f%d" % index, b"x" * 600) for index in range(500))
    assert (await put(own_pod, packed(small + END))).status == 200
    before = own_pod.process.status_kib("VmHWM")
    large = b"".join(member(b"d/f%d" % index, b"x" * 600) for index in range(3000))
    large += member(b"large", os.urandom(MiB) * 64)
    assert (await put(own_pod, packed(large + END), "&last=true")).status == 200
    assert own_pod.process.status_kib("VmHWM") - before < 30 * 1024


def cpu_sec(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
