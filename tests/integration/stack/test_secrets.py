"""No API key and no secret of the manager's is in its log, its figures, its errors, or a sandbox (S2, S23)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stack import Stack, free_port

CLEANUP = "canary-of-the-teardown-secret"


@pytest.fixture(scope="module")
def talkative() -> Iterator[tuple[Stack, int]]:
    """A stack that logs all it can, and the port of its figures."""
    port = free_port()
    stack = Stack(
        SOJOURN_LOG_LEVEL="DEBUG", SOJOURN_METRICS_PORT=str(port), SANDBOX_CLEANUP_AUTH_SECRET=CLEANUP
    ).start()
    yield stack, port
    stack.remove()


async def test_secrets_are_neither_logged_nor_counted_nor_told_nor_in_a_sandbox(talkative: tuple[Stack, int]) -> None:
    stack, port = talkative
    said: list[str] = []
    async with stack:

        async def call(method: str, path: str, **options: object) -> None:
            said.append(repr(await stack.call(method, path, **options)))

        _, made = await stack.call("POST", "/api/v1/keys", json={"name": "canary", "role": "admin"})
        key: str = made["key"]
        secret = key.rpartition("_")[2]
        mine = {"X-Api-Key": key}
        mistyped = {"X-Api-Key": key[:-1] + ("a" if key[-1] != "a" else "b")}
        for headers in (mine, mistyped, {"X-Api-Key": "", "Authorization": f"Bearer {key}"}, {"Cookie": f"k={key}"}):
            await call("GET", "/api/v1/targets", headers=headers)
            await call("POST", "/sandbox/task/t/exec", json={"command": "true"}, headers=headers)
            await call("POST", "/sandbox/task/t/exec", data=b"{", headers=headers)
        await call("GET", f"/api/v1/targets?api_key={key}&X-Api-Key={key}")
        await call("DELETE", "/sandbox/task/none", headers={"X-Api-Key": "", "Authorization": f"Bearer {CLEANUP}"})
        await call("DELETE", "/sandbox/task/none", headers={"X-Api-Key": "", "Authorization": f"Bearer x{CLEANUP}"})
        look = "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline; grep -rsaI . /etc /run /tmp /workspace"
        inside = (await stack.exec("t", look + " 2>&1 | head -c 8000000", max_output_bytes=16 << 20))["stdout"]
        _, listed = await stack.call("GET", "/api/v1/keys")
        said.append(repr(listed))
        async with stack.http.get(f"http://127.0.0.1:{port}/metrics") as scraped:
            figures = await scraped.text()
    log = stack.log.read_text()
    kept = [(stack.data / name).read_text().strip() for name in ("manager-secret", "key-pepper", "api-key")]
    assert '"request' in log or '"event"' in log  # it is the log that was meant
    assert "sojourn_requests_total" in figures
    assert "SOJOURN_SANDBOX_ID" in inside
    for canary in (secret, CLEANUP, *kept[:2]):
        assert len(canary) > 20
        for place, text in (("log", log), ("figures", figures), ("answers", "".join(said)), ("sandbox", inside)):
            assert canary not in text, place
    assert kept[2] not in inside
    assert kept[2] not in figures
