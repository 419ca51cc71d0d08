"""A server in a real local pod, reached through the whole stack."""

from __future__ import annotations

import asyncio
import json
import time

from tests.support.stack import Stack

ECHO = """
import http.server, json, os, socket, sys
class Echo(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"headers": list(self.headers.items()), "environ": dict(os.environ), "path": self.path})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())
    def log_message(self, *_):
        pass
class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
Server((sys.argv[1], int(sys.argv[2])), Echo).serve_forever()
"""


async def ask(stack: Stack, task: str, port: int, path: str) -> tuple[int, object]:
    """The answer once the server is up."""
    give_up = time.monotonic() + 60
    while True:
        status, answer = await stack.call("GET", f"{stack.task(task)}/ports/{port}{path}")
        if status != 404 or time.monotonic() > give_up:
            return status, answer
        await asyncio.sleep(0.05)


async def test_a_server_on_the_pods_loopback_is_reached_and_gets_nothing_of_ours(stack: Stack) -> None:
    """S31"""
    for host, port in (("127.0.0.1", 3000), ("::1", 3001)):
        status, started = await stack.call(
            "POST", f"{stack.task('web')}/processes", json={"command": ["python3", "-c", ECHO, host, str(port)]}
        )
        assert status == 201, started
        status, got = await ask(stack, "web", port, "/a?b=c")
        assert status == 200, got
        assert isinstance(got, dict)
        assert got["path"] == "/a?b=c"
        names = {name.lower() for name, _ in got["headers"]}
        assert names <= {"host", "accept", "accept-encoding", "user-agent", "connection"}
        everything = json.dumps(got)
        for secret in [stack.key, "Bearer", "Sandbox-", "SOJOURN_POD_TOKEN"]:
            assert secret not in everything


async def test_one_pods_loopback_is_no_other_pods_nor_the_machines(stack: Stack) -> None:
    await stack.exec("one", ["true"])
    status, got = await stack.call("GET", f"{stack.task('one')}/ports/{stack.port}/healthz")
    assert (status, got["error"]["code"]) == (404, "not_found")
    status, got = await stack.call("GET", f"{stack.task('one')}/ports/8080/healthz")
    assert (status, got["error"]["code"]) == (400, "invalid_request")
