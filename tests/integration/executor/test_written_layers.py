"""What file calls have changed comes out of a running executor as a layer of just these paths, in both tiers."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from executor.layerwire import END_BYTES, LAYER_BASE_HEADER, LAYER_STATE_HEADER, LayerReport, read_layer_end
from tests.support.executor_pod import ExecutorProcess, Pod, connected
from tests.support.trees import differences, picture, unpacked

pytestmark = pytest.mark.skipif(shutil.which("zstd") is None, reason="no zstd program here")
UNKNOWN = "0" * 32


@pytest.fixture
async def pod(any_tier: Pod) -> Pod:
    """Nothing in its workspace."""
    await any_tier.exec("chmod -R u+rwx . ; find . -mindepth 1 -delete")
    return any_tier


async def state_of(pod: Pod) -> str:
    _, report = await everything(pod)
    assert report.written is not None
    return report.written


async def written(pod: Pod, since: str) -> tuple[bytes, LayerReport]:
    """The layer, which is whole."""
    reply = await pod.call("GET", f"/v1/changes?written={since}")
    assert reply.status == 200, reply.body
    report = read_layer_end(reply.body[-END_BYTES:])
    assert report.sha256 == hashlib.sha256(reply.body[:-END_BYTES]).hexdigest()
    assert reply.headers[LAYER_STATE_HEADER] == report.state == report.written
    assert reply.headers[LAYER_BASE_HEADER] == (report.base or "none")
    return reply.body, report


async def everything(pod: Pod, since: str | None = None) -> tuple[bytes, LayerReport]:
    reply = await pod.call("GET", "/v1/changes" + (f"?since={since}" if since else ""))
    assert reply.status == 200, reply.body
    return reply.body, read_layer_end(reply.body[-END_BYTES:])


async def lay(pod: Pod, *layers: bytes) -> None:
    """An empty workspace, and the layers over it."""
    await pod.exec("chmod -R u+rwx . ; find . -mindepth 1 -delete")
    for number, layer in enumerate(layers):
        digest = hashlib.sha256(layer).hexdigest()
        said = read_layer_end(layer[-END_BYTES:])
        query = f"sha256={digest}&max_entries={said.entries + said.removed}&max_bytes={said.bytes}"
        last = "true" if number == len(layers) - 1 else "false"
        reply = await pod.call("PUT", f"/v1/layers?{query}&last={last}", layer)
        assert reply.status == 200, reply.body


async def do(pod: Pod, method: str, path: str, body: object = None) -> None:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    reply = await pod.call(method, path, data)
    assert reply.status < 300, reply.body


def names(layer: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(unpacked(layer))) as tar:
        return [member.name for member in tar if member.name != "."]


def archive(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


async def test_a_layer_of_what_file_calls_changed_has_these_paths_and_no_others(pod: Pod) -> None:
    """S32: nothing that a command made goes with it."""
    start = await state_of(pod)
    await pod.exec("mkdir -p big && head -c 300000 /dev/urandom >big/data && echo x >big/other")
    await do(pod, "PUT", "/v1/files?path=src/deep/main.py", b"print()\n")
    layer, report = await written(pod, start)
    assert names(layer) == ["src", "src/deep", "src/deep/main.py"]
    assert (report.base, report.entries, report.removed) == (start, 3, 0)
    assert len(layer) < 20_000
    await do(pod, "PUT", "/v1/files?path=big/other", b"y")
    layer, report = await written(pod, report.state)
    assert names(layer) == ["big", "big/other"]
    again, after = await written(pod, report.state)
    assert (after.entries, after.state, names(again)) == (0, report.state, [])


async def test_every_changing_file_call_is_in_the_layer_of_its_changes_exactly(pod: Pod) -> None:
    """Over the last whole layer the workspace is again what file calls have made of it."""
    await pod.exec(
        "mkdir -p old/tree/inner keep && echo 1 >old/tree/inner/file && ln old/tree/inner/file old/tree/link &&"
        "echo 2 >gone && echo 3 >mode && mkdir -p merged/a && echo 4 >merged/a/stays && echo 5 >merged/a/replaced"
    )
    whole, report = await everything(pod)
    assert report.written is not None
    start = report.written
    await do(pod, "PUT", "/v1/files?path=new/file", b"content")
    await do(pod, "PUT", "/v1/files?path=empty&mode=600", b"")
    await do(pod, "DELETE", "/v1/files?path=gone")
    await do(pod, "POST", "/v1/files/mkdir", {"path": "made/of/nothing", "mode": 0o750})
    await do(pod, "POST", "/v1/files/move", {"source": "old/tree", "target": "moved"})
    await do(pod, "POST", "/v1/files/chmod", {"path": "mode", "mode": 0o755})
    await do(pod, "POST", "/v1/files/chmod", {"path": "moved", "mode": 0o700, "recursive": True})
    await do(pod, "PUT", "/v1/archive?path=merged", archive({"a/replaced": b"6", "a/b/c": b"7", "top": b"8"}))
    await do(pod, "PUT", "/v1/archive?path=fresh/place", archive({"x/y": b"9"}))
    layer, _ = await written(pod, start)
    before = picture(pod.workspace)
    assert "merged/a/stays" not in names(layer)
    await lay(pod, whole, layer)
    assert differences(before, picture(pod.workspace)) == []


async def test_what_a_commands_hand_changed_meanwhile_is_in_the_layer_as_it_is_by_then(pod: Pod) -> None:
    """F24: no layer of written paths can be one that cannot be laid over the tree it is for."""
    await pod.exec("mkdir -p a/b && echo 1 >a/b/c && mkdir d && echo 2 >d/e && mkdir h && echo 3 >h/i")
    whole, _ = await everything(pod)
    start = await state_of(pod)
    for path in ("a/b/c", "d/e", "f/g", "h/i"):
        await do(pod, "PUT", f"/v1/files?path={path}", b"written")
    await pod.exec("rm -r a/b; echo now-a-file >a/b; rm -r d; rm -r f; ln -s a f; rm h/i; mkdir h/i; touch h/i/in")
    layer, _ = await written(pod, start)
    before = picture(pod.workspace)
    await lay(pod, whole, layer)
    found = picture(pod.workspace)
    assert sorted(found) == sorted(set(before) - {b"h/i/in"})
    assert (pod.workspace / "a/b").read_text() == "now-a-file\n"
    assert (pod.workspace / "f").readlink().name == "a"


async def test_what_was_deleted_and_made_anew_has_nothing_of_what_it_was(pod: Pod) -> None:
    await pod.exec("mkdir -p box && echo old >box/old")
    whole, _ = await everything(pod)
    start = await state_of(pod)
    await do(pod, "DELETE", "/v1/files?path=box&recursive=true")
    await do(pod, "POST", "/v1/files/mkdir", {"path": "box"})
    await do(pod, "PUT", "/v1/files?path=box/new", b"new")
    layer, _ = await written(pod, start)
    await lay(pod, whole, layer)
    assert [path.name for path in (pod.workspace / "box").iterdir()] == ["new"]


async def test_a_refused_file_call_is_no_change(pod: Pod) -> None:
    await pod.exec("mkdir full && echo x >full/file")
    start = await state_of(pod)
    assert (await pod.call("DELETE", "/v1/files?path=full")).status == 409
    body = json.dumps({"source": "none", "target": "full"}).encode()
    assert (await pod.call("POST", "/v1/files/move", body)).status == 404
    layer, report = await written(pod, start)
    assert (names(layer), report.state) == ([], start)


async def test_a_bound_secret_is_in_no_layer_of_written_files(
    fresh_executor: Callable[..., AbstractContextManager[ExecutorProcess]],
) -> None:
    """S32: whatever file calls do to it."""
    secret = {"path": "conf/secret", "content_base64": base64.b64encode(b"canary").decode(), "secret": True}
    with fresh_executor() as process:
        async with connected(process) as pod:
            start = await state_of(pod)
            await do(pod, "POST", "/v1/bind", {"sandbox_id": "s1", "files": [secret]})
            await do(pod, "PUT", "/v1/files?path=conf/secret", b"canary-2")
            await do(pod, "PUT", "/v1/files?path=conf/plain", b"plain")
            layer, _ = await written(pod, start)
            assert names(layer) == ["conf", "conf/plain"]
            await do(pod, "POST", "/v1/files/chmod", {"path": "conf", "mode": 0o755, "recursive": True})
            layer, _ = await written(pod, start)
            assert "conf/plain" in names(layer)
            assert b"canary" not in unpacked(layer)
            assert b"secret" not in unpacked(layer)


async def test_a_state_that_is_none_or_of_another_life_is_told_from_one_that_is_known(
    fresh_executor: Callable[..., AbstractContextManager[ExecutorProcess]],
) -> None:
    with fresh_executor() as process:  # one that has forgotten nothing yet
        async with connected(process) as pod:
            assert (await pod.call("GET", "/v1/changes?written=xyz")).status == 400
            assert (await pod.call("GET", f"/v1/changes?written={UNKNOWN}&since={UNKNOWN}")).status == 400
            await do(pod, "PUT", "/v1/files?path=one", b"1")
            layer, report = await written(pod, "f" * 32)
            assert report.base is None
            assert "one" in names(layer)


async def test_more_than_is_remembered_is_said_and_a_chmod_of_everything_is_such(pod: Pod) -> None:
    start = await state_of(pod)
    await do(pod, "POST", "/v1/files/chmod", {"path": ".", "mode": 0o755, "recursive": True})
    assert (await pod.call("GET", f"/v1/changes?written={start}")).status == 409
    _, report = await everything(pod)
    assert report.written is not None
    assert (await written(pod, report.written))[1].entries == 0
