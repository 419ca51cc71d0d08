"""Long-lived sandboxes on a running stack: real pods, a real store, object storage in a directory."""

from __future__ import annotations

import asyncio
import json

from sojourn import AsyncClient
from tests.support.long_lived import ALL, made, run
from tests.support.stack import Stack


async def test_the_curl_lines_of_the_service_work_as_they_stand(stack: Stack) -> None:
    script = """
    SANDBOX_ID=$(curl -sS -X POST \
      -H "X-Api-Key: $SANDBOX_API_KEY" \
      -H "Content-Type: application/json" \
      -d '{
        "profile": "sandboxes-default",
        "autostop_sec": 1800,
        "ttl_sec": 14400
      }' \
      "$SANDBOX_GATEWAY_URL/sandbox/sandboxes/v1" | grep -o '"sandbox_id":"[^"]*' | cut -d'"' -f4)
    curl -sS -X POST \
      -H "X-Api-Key: $SANDBOX_API_KEY" \
      -H "Content-Type: application/json" \
      -d '{"command":["bash","-lc","echo kept > file && cat file"],"timeout_sec":300}' \
      "$SANDBOX_GATEWAY_URL/sandbox/sandboxes/v1/$SANDBOX_ID/exec"
    echo
    curl -sS -X POST -H "X-Api-Key: $SANDBOX_API_KEY" \
      "$SANDBOX_GATEWAY_URL/sandbox/sandboxes/v1/$SANDBOX_ID/stop"
    echo
    curl -sS -X POST -H "X-Api-Key: $SANDBOX_API_KEY" \
      "$SANDBOX_GATEWAY_URL/sandbox/sandboxes/v1/$SANDBOX_ID/start"
    echo
    curl -sS -X DELETE -o /dev/null -w '%{http_code}' -H "X-Api-Key: $SANDBOX_API_KEY" \
      "$SANDBOX_GATEWAY_URL/sandbox/sandboxes/v1/$SANDBOX_ID"
    """
    answer, stopped, started, status = (await asyncio.to_thread(run, stack, script)).splitlines()
    assert json.loads(answer)["stdout"] == "kept\n"
    assert (json.loads(stopped)["state"], json.loads(started)["state"]) == ("stopped", "running")
    assert status == "204"


async def test_everything_that_a_task_can_do_goes_on_in_one_pod_of_the_sandbox(stack: Stack) -> None:
    sandbox_id = await made(stack, env={"COLOUR": "blue"}, name="all of it")
    at = f"{ALL}/{sandbox_id}"
    first = await stack.call("POST", f"{at}/exec", json={"command": "echo $COLOUR $SOJOURN_SANDBOX_ID; echo x > a"})
    assert first[1]["stdout"] == f"blue {sandbox_id}\n"
    pods = {first[1]["pod_id"]}
    assert (await stack.call("GET", f"{at}/files?path=a"))[1] == b"x\n"
    assert (await stack.call("PUT", f"{at}/files?path=b", data=b"y"))[0] == 201
    status, session = await stack.call("POST", f"{at}/sessions")
    assert status == 201
    in_session = f"{at}/sessions/{session['id']}/exec"
    assert (await stack.call("POST", in_session, json={"command": "cd /tmp; V=5"}))[0] == 200
    status, said = await stack.call("POST", in_session, json={"command": "echo $PWD $V"})
    assert said["stdout"] == "/tmp 5\n"
    status, process = await stack.call("POST", f"{at}/processes", json={"command": "cat b; sleep 600"})
    assert status == 201
    status, terminal = await stack.call("POST", f"{at}/terminals", json={})
    assert status == 201
    assert (await stack.call("DELETE", f"{at}/terminals/{terminal['id']}"))[0] == 204
    assert (await stack.call("GET", f"{at}/usage"))[1]["memory"]["working_set_bytes"] > 0
    assert (await stack.call("GET", f"{at}/archive?path=."))[0] == 200
    assert (await stack.call("DELETE", f"{at}/processes/{process['id']}"))[0] == 204
    again = await stack.call("POST", f"{at}/exec", json={"command": "cat a b"})
    assert again[1]["stdout"] == "x\ny"
    assert {again[1]["pod_id"]} == pods
    status, shown = await stack.call("GET", f"/api/v1/sandboxes/{sandbox_id}")
    assert (status, shown["state"], shown["task_id"], shown["pod_id"]) == (200, "running", None, pods.pop())
    assert shown["usage"]["pids"]["current"] > 0
    assert sandbox_id in [one["sandbox_id"] for one in (await stack.call("GET", "/api/v1/sandboxes/"))[1]["sandboxes"]]
    assert (await stack.call("DELETE", at))[0] == 204
    assert (await stack.call("DELETE", at))[0] == 204
    status, gone = await stack.call("POST", f"{at}/exec", json={"command": "true"})
    assert (status, gone["error"]["code"], gone["error"]["details"]["reason"]) == (410, "sandbox_gone", "destroyed")
    assert sandbox_id not in [
        one["sandbox_id"] for one in (await stack.call("GET", "/api/v1/sandboxes/"))[1]["sandboxes"]
    ]


async def test_sandboxes_are_listed_by_what_is_asked_for_in_pages(stack: Stack) -> None:
    ids = [await made(stack, name="listed", metadata={"turn": str(turn)}) for turn in range(3)]
    found: list[str] = []
    after = ""
    while after is not None:
        status, page = await stack.call("GET", f"{ALL}?name=listed&limit=2&after={after}")
        assert status == 200
        found += [one["sandbox_id"] for one in page["sandboxes"]]
        after = page["next"]
    assert sorted(found) == sorted(ids)
    second = await stack.call("GET", f"{ALL}?metadata=turn=1")
    assert [one["sandbox_id"] for one in second[1]["sandboxes"]] == [ids[1]]
    for sandbox_id in ids:
        await stack.call("DELETE", f"{ALL}/{sandbox_id}?purge=true")
    assert (await stack.call("GET", f"{ALL}?name=listed"))[1]["sandboxes"] == []
    destroyed = await stack.call("GET", f"{ALL}?name=listed&state=destroyed")
    assert {one["sandbox_id"] for one in destroyed[1]["sandboxes"]} == set(ids)


async def test_python_and_the_command_line_do_the_same(stack: Stack) -> None:
    async with AsyncClient(stack.url, stack.key) as client:
        sandbox = await client.long_lived.create(name="of python", ttl_sec=3000)
        await sandbox.files.write("greeting", "hello")
        assert (await sandbox.exec(["cat", "greeting"])).stdout == "hello"
        assert (await sandbox.change(metadata={"a": "b"})).metadata == {"a": "b"}
        assert [one.name for one in await client.long_lived.list(name="of python")] == ["of python"]
        shown = await asyncio.to_thread(
            run, stack, f"sojourn sandbox exec {sandbox.id} -- cat greeting; sojourn sandbox info {sandbox.id}"
        )
        assert shown.startswith("helloid ")
        assert "metadata  a=b" in shown
        await sandbox.delete()
        quota = (await client.quotas())[0]
        assert quota.slots_limit == 200
    script = """
    id=$(sojourn sandbox create --name cli -e COLOUR=red --ttl 600)
    sojourn sandbox exec $id -- 'echo $COLOUR > out; cat out'
    sojourn sandbox cp $id:out ./out && cat ./out && rm ./out
    sojourn sandbox set $id --name other --autostop 60
    sojourn sandbox list --name other --json
    sojourn sandbox ls $id
    sojourn sandbox rm $id
    """
    said = await asyncio.to_thread(run, stack, f"cd {stack.base}\n{script}")
    assert said.startswith("red\nred\n")
    assert '"autostop_sec":60' in said.replace(" ", "")


async def test_what_is_wrong_with_a_request_is_named(stack: Stack) -> None:
    for body, field in (
        ({"autostop_sec": 0}, "autostop_sec"),
        ({"ttl_sec": "long"}, "ttl_sec"),
        ({"image": "x"}, "image"),
        ({"wait_sec": 1e9}, "wait_sec"),
    ):
        status, answer = await stack.call("POST", ALL, json=body)
        assert (status, answer["error"]["details"].get("field")) == (400, field)
    status, answer = await stack.call("POST", ALL, json={"profile": "no such"})
    assert (status, answer["error"]["code"]) == (400, "unknown_profile")
    for query in ("state=odd", "limit=0", "what=1", "metadata=x"):
        assert (await stack.call("GET", f"{ALL}?{query}"))[0] == 400


async def test_a_sandbox_outlives_the_managers_crash() -> None:
    stack = Stack().start()
    try:
        async with stack:
            sandbox_id = await made(stack)
            before = (await stack.call("POST", f"{ALL}/{sandbox_id}/exec", json={"command": "echo 1 > a"}))[1]
        stack.end(9)
        stack.start()
        async with stack:
            after = (await stack.call("POST", f"{ALL}/{sandbox_id}/exec", json={"command": "cat a"}))[1]
            assert (after["stdout"], after["pod_id"]) == ("1\n", before["pod_id"])
            quota = (await stack.call("GET", "/api/v1/quotas"))[1]["quotas"][0]
            assert quota["slots_held"] == 1
    finally:
        stack.remove()
