"""Searching, watching and modes of a running executor's files."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.support.executor_pod import PYTHON, Pod, processes_with, until


@pytest.fixture
async def empty(executor: Pod) -> Pod:
    """The shared executor, nothing in its workspace."""
    for path in executor.workspace.iterdir():
        if path.is_dir() and not path.is_symlink():
            await executor.call("DELETE", f"/v1/files?{urlencode({'path': str(path), 'recursive': 'true'})}")
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    return executor


async def search(pod: Pod, **query: Any) -> Any:
    reply = await pod.call("GET", f"/v1/files/search?{urlencode(query)}")
    assert reply.status == 200, reply.body
    return reply.json


async def all_pages(pod: Pod, **query: Any) -> list[Any]:
    found: list[Any] = []
    for _ in range(1000):
        page = await search(pod, **query)
        found += page["matches"]
        if page["next"] is None:
            return found
        query["after"] = page["next"]
    raise AssertionError("the pages have no end")


def below(pod: Pod, matches: list[Any]) -> list[str]:
    return [os.path.relpath(one["path"], pod.workspace) for one in matches]


# ── search ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_names_are_found_by_their_pattern_and_contents_by_their_lines(any_tier: Pod) -> None:
    await any_tier.exec(
        "rm -rf s; mkdir -p s/a/b; cd s; printf 'one\\ntwo Hello\\nthree\\nhello' > a/x.py; echo hello > a/b/y.py;"
        "printf 'a\\0hello' > bin; mkfifo fifo; ln -s a/x.py link.py"
    )
    page = await search(any_tier, path="s", name="*.py")
    assert [(os.path.basename(one["path"]), one["type"]) for one in page["matches"]] == [
        ("y.py", "file"), ("x.py", "file"), ("link.py", "symlink"),
    ]  # fmt: skip
    page = await search(any_tier, path="s", content="hello")
    assert [(one["line"], one["column"], one["text"]) for one in page["matches"]] == [(1, 1, "hello"), (4, 1, "hello")]
    assert (page["truncated"], page["files_searched"], page["skipped"]["binary"]) == (False, 2, 1)
    page = await search(any_tier, path="s", name="x*", content="hello", ignore_case="true")
    assert [(one["line"], one["column"]) for one in page["matches"]] == [(2, 5), (4, 1)]
    page = await search(any_tier, path="s", content=r"^t\w+e$", regex="true")
    assert [one["text"] for one in page["matches"]] == ["three"]


async def test_lines_are_cut_around_the_match_and_text_that_is_none_is_rendered(empty: Pod) -> None:
    (empty.workspace / "long").write_bytes(b"x" * 5000 + b"needle" + b"y" * 5000)
    (empty.workspace / "odd").write_bytes(b"\xff\xfe needle \xff")
    odd_name = os.fsencode(empty.workspace) + b"/\xff.txt"
    with open(odd_name, "wb") as file:
        file.write(b"needle")
    for more in ({}, {"regex": "true"}):
        found = {
            one["path"].rpartition("/")[2]: one for one in (await search(empty, content="needle", **more))["matches"]
        }
        assert "needle" in found["long"]["text"]
        assert len(found["long"]["text"]) <= 400
        assert found["long"]["column"] == 5001
        assert found["odd"]["text"] == "\ufffd\ufffd needle \ufffd"
        assert "path_base64" in found["\ufffd.txt"]


@pytest.mark.parametrize("limit", [1, 2, 3, 1000])
async def test_pages_put_together_are_the_whole_search(empty: Pod, limit: int) -> None:
    for name in ("a/1", "a/b/2", "a.txt", "c/d/e/3", "z"):
        path = empty.workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x\nhit\nx\nhit hit\n")
    whole = [(one["path"], one["line"]) for one in await all_pages(empty, content="hit", limit=10_000)]
    assert len(whole) == 10
    assert [(one["path"], one["line"]) for one in await all_pages(empty, content="hit", limit=limit)] == whole
    names = below(empty, await all_pages(empty, name="*", limit=limit))
    assert names == ["a", "a/1", "a/b", "a/b/2", "a.txt", "c", "c/d", "c/d/e", "c/d/e/3", "z"]


async def test_an_expression_without_end_is_given_up_and_the_executor_answers_meanwhile(empty: Pod) -> None:
    (empty.workspace / "bad").write_text("a" * 60 + "b")
    (empty.workspace / "good").write_text("aaaa")
    searching = asyncio.create_task(search(empty, content="(a+)+$", regex="true"))
    answered = 0
    while not searching.done():
        async with asyncio.timeout(20):
            assert (await empty.call("GET", "/healthz", token="")).status == 200
        answered += 1
        await asyncio.sleep(0.05)
    page = searching.result()
    assert answered > 5
    assert below(empty, page["matches"]) == ["good"]
    assert page["skipped"]["slow"] == 1


async def test_a_search_keeps_its_deadline_and_can_be_gone_on_with(empty: Pod) -> None:
    for at in range(3):
        (empty.workspace / f"bad{at}").write_text("a" * 60 + "b")
    (empty.workspace / "z").write_text("aaa")
    page = await search(empty, content="(a+)+$", regex="true", timeout_sec=1)
    assert page["truncated"]
    assert page["next"]
    rest = await all_pages(empty, content="(a+)+$", regex="true", timeout_sec=30, after=page["next"])
    assert below(empty, rest) == ["z"]


async def test_a_caller_that_hangs_up_ends_the_search(empty: Pod) -> None:
    (empty.workspace / "bad").write_text("a" * 60 + "b")
    searching = asyncio.create_task(search(empty, content="(a+)+$", regex="true"))
    await until(lambda: bool(processes_with("search_child")), "the search runs")
    searching.cancel()
    await asyncio.gather(searching, return_exceptions=True)
    await until(lambda: not processes_with("search_child"), "the search has ended")


async def test_a_tree_of_very_many_files_is_bounded_by_pages(empty: Pod) -> None:
    await empty.exec([PYTHON, "-c", "import os\nos.mkdir('m')\nfor i in range(30_000): os.mknod(f'm/{i}')"])
    listed = (await empty.call("GET", "/v1/files/list?path=m&limit=1000")).json
    assert (len(listed["entries"]), listed["truncated"]) == (1000, True)
    page = await search(empty, name="*", limit=1000)
    assert (len(page["matches"]), page["truncated"]) == (1000, True)
    assert len(await all_pages(empty, name="5*", limit=10_000)) == 1_111


async def test_a_tree_of_ten_thousand_levels_is_searched_as_far_as_it_goes(empty: Pod) -> None:
    deep = "import os\nfor i in range(10_000):\n  os.mkdir('d'); os.chdir('d')"
    await empty.exec([PYTHON, "-c", deep])
    page = await search(empty, name="d")
    assert (len(page["matches"]), page["truncated"], page["skipped"]["too_deep"], page["next"]) == (64, True, 1, None)
    reply = await empty.call("POST", "/v1/files/chmod", {"path": "d", "mode": 0o700, "recursive": True})
    assert (reply.status, reply.json["truncated"]) == (200, True)
    async with watched(empty) as events:
        assert events.first["truncated"] is True
    assert (await empty.call("DELETE", "/v1/files?path=d&recursive=true")).status == 204


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ({}, "invalid_request"), ({"content": ""}, "invalid_request"), ({"name": "a/b"}, "invalid_request"),
        ({"content": "(", "regex": "true"}, "invalid_request"), ({"content": "x" * 1001}, "invalid_request"),
        ({"content": "a{1000000000000}", "regex": "true"}, "invalid_request"), ({"name": "\0"}, "invalid_request"),
        ({"name": "x", "limit": 0}, "invalid_request"), ({"name": "x", "limit": 10_001}, "invalid_request"),
        ({"name": "x", "after": "x"}, "invalid_request"), ({"name": "x", "after": "e30="}, "invalid_request"),
        ({"name": "x", "path": "/etc"}, "invalid_path"), ({"name": "x", "path": "../x"}, "invalid_path"),
        ({"name": "x", "path": "missing"}, "file_not_found"), ({"name": "x", "user": "root"}, "user_not_allowed"),
        ({"name": "x", "timeout_sec": 61}, "invalid_request"), ({"name": "x", "colour": "red"}, "invalid_request"),
    ],
)  # fmt: skip
async def test_what_is_no_search_is_refused(empty: Pod, query: dict[str, Any], code: str) -> None:
    reply = await empty.call("GET", f"/v1/files/search?{urlencode(query)}")
    if code == "user_not_allowed" and empty.process.tier == "single" and os.geteuid() == 0:
        pytest.skip("the user is root itself")
    assert reply.code == code, reply.body


async def test_links_are_not_searched_through_and_what_may_not_be_read_is_counted(empty: Pod) -> None:
    outside = empty.workspace.parent / "elsewhere"
    outside.mkdir(exist_ok=True)
    (outside / "f").write_text("needle")
    (empty.workspace / "l").symlink_to(outside)
    await empty.exec("echo needle > shut; mkdir closed; chmod 0 shut closed")
    page = await search(empty, content="needle")
    assert page["matches"] == []
    if os.geteuid() != 0 or empty.process.tier == "split":
        assert page["skipped"]["unreadable"] == 2
    await empty.exec("chmod 700 closed")


# ── modes ───────────────────────────────────────────────────────────────────────────────────────────────────────


def mode_of(pod: Pod, name: str) -> int:
    return stat.S_IMODE((pod.workspace / name).lstat().st_mode)


async def chmod(pod: Pod, path: str, mode: int, **more: Any) -> Any:
    return await pod.call("POST", "/v1/files/chmod", {"path": path, "mode": mode, **more})


async def test_modes_of_files_directories_and_fifos_are_changed_and_never_of_what_a_link_leads_to(
    any_tier: Pod,
) -> None:
    await any_tier.exec("rm -rf c; mkdir -p c/d/e; cd c; touch f d/g; mkfifo p; ln -s f l; ln -s d k; chmod 0 f d/e")
    assert (await chmod(any_tier, "c/f", 0o640)).json["entry"]["mode"] == 0o640
    assert (await chmod(any_tier, "c/p", 0o600)).status == 200
    assert (await chmod(any_tier, "c/l", 0o777)).code == "invalid_path"
    assert (await chmod(any_tier, "c/k/g", 0o777)).code == "invalid_path"
    reply = await chmod(any_tier, "c", 0o750, recursive=True)
    assert (reply.json["changed"], reply.json["failed"], reply.json["truncated"]) == (6, 0, False)
    assert [mode_of(any_tier, f"c/{name}") for name in ("", "f", "p", "d", "d/g", "d/e")] == [0o750] * 6
    assert (await chmod(any_tier, "c", 0o000, recursive=True)).json["changed"] == 6
    assert mode_of(any_tier, "c/d/g") == 0


@pytest.mark.parametrize("body", [{"mode": 0o4755}, {"mode": -1}, {"mode": "755"}, {"mode": 0o755, "extra": 1}, {}])
async def test_modes_that_are_none_are_refused(empty: Pod, body: dict[str, Any]) -> None:
    (empty.workspace / "f").touch()
    before = mode_of(empty, "f")
    reply = await empty.call("POST", "/v1/files/chmod", {"path": "f", **body})
    assert reply.code == "invalid_request"
    assert mode_of(empty, "f") == before


async def test_a_file_of_another_user_is_refused(empty: Pod) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a file of another user")
    (empty.workspace / "theirs").touch()
    assert (await chmod(empty, "theirs", 0o666)).code == "permission_denied"
    reply = await chmod(empty, ".", 0o755, recursive=True)
    assert (reply.json["failed"], mode_of(empty, "theirs")) == (1, 0o644)
    assert (await chmod(empty, "missing", 0o666)).code == "file_not_found"


# ── watch ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Events:
    def __init__(self, pod: Pod, lines: AsyncIterator[bytes], first: Any) -> None:
        self._pod = pod
        self._lines = lines
        self.first = first

    async def next(self) -> tuple[str, str]:
        """(type, path below the workspace) of the next event."""
        async with asyncio.timeout(60):
            event = json.loads(await anext(self._lines))
        return event["type"], os.path.relpath(event["path"], self._pod.workspace) if "path" in event else ""

    async def until(self, wanted: tuple[str, str]) -> list[tuple[str, str]]:
        seen = []
        while True:
            seen.append(await self.next())
            if seen[-1] == wanted:
                return seen


@asynccontextmanager
async def watched(pod: Pod, method: str = "GET", **query: Any) -> AsyncIterator[Events]:
    headers = {"Authorization": f"Bearer {pod.token}"}
    body = json.dumps(query) if method == "POST" else None
    url = f"{pod.url}/v1/files/watch" + (f"?{urlencode(query)}" if method == "GET" else "")
    async with pod.session.request(method, url, headers=headers, data=body) as answer:
        assert answer.status == 200, await answer.read()
        assert answer.headers["Content-Type"] == "application/x-ndjson"
        lines = aiter(answer.content)
        first = json.loads(await anext(lines))
        assert first["type"] == "watching"
        yield Events(pod, lines, first)


async def test_changes_are_told_as_they_happen_also_in_directories_that_are_new(any_tier: Pod) -> None:
    await any_tier.exec("rm -rf w; mkdir -p w/a; echo x > w/a/old")
    async with watched(any_tier, path="w") as events:
        assert events.first["directories"] == 2
        await any_tier.exec("mkdir -p w/n/m; echo x > w/n/m/f")
        assert {("created", "w/n"), ("created", "w/n/m")} <= set(await events.until(("created", "w/n/m/f")))
        await any_tier.exec("echo y > w/n/m/f")
        await events.until(("modified", "w/n/m/f"))
        await any_tier.exec("mv w/n/m w/a/m")
        await events.until(("moved", "w/a/m"))
        await any_tier.exec("echo z > w/a/m/f")  # known by its new name
        await events.until(("modified", "w/a/m/f"))
        await any_tier.exec("chmod 600 w/a/old")
        await events.until(("attributes", "w/a/old"))
        await any_tier.exec("mv w/a/m elsewhere; rm -rf elsewhere")
        await events.until(("deleted", "w/a/m"))
        await any_tier.exec("rm w/a/old")
        await events.until(("deleted", "w/a/old"))
        await any_tier.exec("rm -rf w")
        await events.until(("ended", ""))


async def test_only_the_directory_itself_is_watched_on_demand(empty: Pod) -> None:
    await empty.exec("mkdir -p a/b")
    async with watched(empty, "POST", path="a", recursive=False) as events:
        assert events.first["directories"] == 1
        await empty.exec("touch a/b/unseen a/seen")
        assert ("created", "a/b/unseen") not in await events.until(("created", "a/seen"))


async def test_more_than_the_kernel_keeps_is_told_as_an_overflow_and_the_watch_goes_on(empty: Pod) -> None:
    kept = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    await empty.exec("mkdir w")
    script = (
        "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
        "os.mknod('w/a'); os.mknod('w/b')\n"
        f"for i in range({kept}): os.utime('w/a'); os.utime('w/b')\n"
        "os.mkdir('w/new'); os.mknod('done')"
    )
    async with watched(empty, path="w") as events:
        id = await empty.start([PYTHON, "-c", script])
        os.kill(empty.pid, signal.SIGSTOP)  # an executor that gets no time to read
        try:
            (empty.workspace / "go").touch()
            await until((empty.workspace / "done").exists, "all is done")
        finally:
            os.kill(empty.pid, signal.SIGCONT)
        await events.until(("overflow", ""))
        await empty.ended(id)
        await empty.exec("touch w/new/it")  # whose directory appeared unseen
        await events.until(("created", "w/new/it"))


async def test_a_watch_that_its_reader_left_holds_nothing(empty: Pod) -> None:
    before = len(os.listdir(f"/proc/{empty.pid}/fd"))
    for _ in range(40):  # more than may be open at once
        async with watched(empty) as events:
            assert events.first["directories"] == 1
    await until(lambda: len(os.listdir(f"/proc/{empty.pid}/fd")) <= before, "its descriptors are closed")


async def test_watching_is_no_work_that_would_keep_the_pod(empty: Pod) -> None:
    async with watched(empty):
        lease = (await empty.call("GET", "/v1/lease")).json
        assert lease["operations"] == 0


@pytest.mark.parametrize(
    ("query", "code"),
    [("path=/etc", "invalid_path"), ("path=missing", "file_not_found"), ("path=f", "not_a_directory"),
     ("path=l", "invalid_path"), ("recursive=maybe", "invalid_request"), ("user=root", "user_not_allowed")],
)  # fmt: skip
async def test_what_cannot_be_watched_is_told_before_the_stream_begins(empty: Pod, query: str, code: str) -> None:
    (empty.workspace / "f").touch()
    (empty.workspace / "l").symlink_to("/etc")
    if code == "user_not_allowed" and empty.process.tier == "single" and os.geteuid() == 0:
        pytest.skip("the user is root itself")
    assert (await empty.call("GET", f"/v1/files/watch?{query}")).code == code


async def test_a_directory_that_the_user_may_not_read_is_not_watched(empty: Pod) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a directory that the user may not read")
    (empty.workspace / "theirs").mkdir(mode=0o700)
    assert (await empty.call("GET", "/v1/files/watch?path=theirs")).code == "permission_denied"
    async with watched(empty) as events:
        assert events.first["directories"] == 1
