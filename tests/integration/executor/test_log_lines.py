"""Names, paths, headers and output that mean harm to whoever reads the log, the figures or a terminal (S24)."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

from tests.support.executor_pod import Pod

EVIL = (
    'x\r\n{"at":"2026","level":"error","event":"forged"}\r\ny',
    "\x1b]52;c;ZXZpbA==\x07\x1b]8;;http://evil/\x07link\x1b]8;;\x07",
    "\x1bP+q544e\x1b\\\x9b31m\x7f",
    "\u202egpj.exe\u2066\u2028\u2029",
    "%0d%0aSet-Cookie: a=b",
    "\udcff\udcfe",
)
STEERING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


async def series(pod: Pod) -> set[str]:
    text = (await pod.call("GET", "/metrics")).body.decode()
    return {line.rpartition(" ")[0] for line in text.splitlines() if line and not line.startswith("#")}


async def test_nobody_can_forge_a_line_of_the_log_a_header_or_a_figure(any_tier: Pod) -> None:
    await any_tier.exec("true")
    figures = await series(any_tier)
    said: list[Any] = []

    async def call(method: str, path: str, body: Any = None, **more: Any) -> None:
        reply = await any_tier.call(method, path, body, **more)
        assert reply.status < 500, (method, path, reply.body)
        assert "Set-Cookie" not in reply.headers
        assert not STEERING.search("".join(f"{name}{value}" for name, value in reply.headers.items()))
        if reply.code:
            assert not STEERING.search(reply.json["error"]["message"]), reply.body
        said.append(reply)

    since = any_tier.log.stat().st_size
    for evil in EVIL:
        name = quote(evil.encode("utf-8", "surrogateescape"))
        as_json = json.dumps(evil).replace("\\udcff\\udcfe", "\\u00ff")
        for method, path in (
            ("GET", f"/v1/files?path={name}"), ("GET", f"/v1/files/stat?path={name}"), ("GET", f"/{name}"),
            ("GET", f"/v1/processes/{name}"), ("DELETE", f"/v1/sessions/{name}"), ("GET", f"/v1/terminals/{name}"),
            ("GET", f"/v1/files/list?user={name}"), ("GET", f"/v1/files/search?name={name}"),
            ("GET", f"/v1/ports/{name}/x"), ("GET", f"/v1/files?{name}={name}"), ("PUT", f"/v1/archive?format={name}"),
        ):  # fmt: skip
            await call(method, path)
        for path, field in (("exec", "command"), ("exec", "id"), ("exec", "cwd"), ("exec", "user"), ("bind", "x")):
            body = f'{{"command": ["true"], {json.dumps(field)}: {as_json}}}'.encode()
            if field != "command":
                await call("POST", f"/v1/{path}", body)
            await call("POST", f"/v1/{path}", f'{{"command": ["no-such-program", {as_json}]}}'.encode())
            await call("POST", f"/v1/{path}", f'{{"command": "true", {as_json}: 1}}'.encode())
        await call("POST", "/v1/terminals", f'{{"command": {as_json}}}'.encode())
    assert len(said) > 100
    for line in any_tier.process.log_text(since).splitlines():
        event = json.loads(line)
        assert event["event"] != "forged"
        assert not STEERING.search(line), line
    assert await series(any_tier) == figures, "no label comes from outside"
    for listed in (await any_tier.call("GET", "/v1/terminals")).json["terminals"]:
        await any_tier.call("DELETE", f"/v1/terminals/{listed['id']}")
