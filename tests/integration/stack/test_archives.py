"""Archives, searching, modes and watching over the manager's interface, in real sandboxes."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import tarfile

from tests.support import tar_corpus
from tests.support.stack import Stack
from tests.support.tar_corpus import END, member


async def test_an_archive_makes_the_sandbox_and_comes_out_again(stack: Stack) -> None:
    path = stack.url + stack.task("archive-in-and-out")
    async with stack.http.get(f"{path}/archive?path=.") as answer:
        assert answer.status == 404
    for kind, data in (
        ("application/x-tar", tar_corpus.ordinary()),
        ("application/gzip", gzip.compress(tar_corpus.ordinary())),
    ):
        target = kind.rpartition("/")[2]
        async with stack.http.put(f"{path}/archive?path={target}", data=data, headers={"Content-Type": kind}) as answer:
            assert answer.status == 201, await answer.read()
            assert (await answer.json())["entries"] == 8
            assert answer.headers["Sandbox-Pod"]
        async with stack.http.get(f"{path}/archive?path={target}&format=gzip") as answer:
            assert answer.headers["Content-Type"] == "application/gzip"
            packed = await answer.read()
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            assert {"run.sh", "empty", "relative", "dangling", "a/up"} <= set(tar.getnames())


async def test_a_refusal_names_the_member_and_leaves_nothing(stack: Stack) -> None:
    path = stack.url + stack.task("archive-refused")
    async with stack.http.put(
        f"{path}/archive?path=x", data=member(b"fine") + member(b"../evil", b"x") + END
    ) as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert (error["code"], error["details"]["member"]) == ("invalid_path", "../evil")
    async with stack.http.get(f"{path}/files/list?path=.") as answer:
        assert (await answer.json())["entries"] == []


async def test_search_modes_and_watch_are_passed_on(stack: Stack) -> None:
    path = stack.url + stack.task("search-and-watch")
    async with stack.http.put(f"{path}/files?path=d/f.txt", data=b"one\nneedle\n") as answer:
        assert answer.status == 201
    async with stack.http.get(f"{path}/files/search?content=needle&name=*.txt") as answer:
        assert [match["line"] for match in (await answer.json())["matches"]] == [2]
    async with stack.http.post(f"{path}/files/chmod", json={"path": "d/f.txt", "mode": 0o600}) as answer:
        assert (await answer.json())["entry"]["mode"] == 0o600
    for method, where, body in (("GET", "?path=d", None), ("POST", "", {"path": "d"})):
        async with asyncio.timeout(60), stack.http.request(method, f"{path}/files/watch{where}", json=body) as answer:
            assert answer.headers["Content-Type"] == "application/x-ndjson"
            assert json.loads(await anext(aiter(answer.content)))["type"] == "watching"
            while True:  # looking on is no work: what was done before ends, and then there is none
                async with stack.http.get(path) as state:
                    if (await state.json())["lease"]["operations"] == 0:
                        break
                await asyncio.sleep(0.05)
            async with stack.http.put(f"{path}/files?path=d/{method}", data=b"x") as put:
                assert put.status == 201
            while True:
                event = json.loads(await anext(aiter(answer.content)))
                if event["path"].endswith(f"/d/{method}"):
                    break
