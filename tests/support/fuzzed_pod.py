"""Run in a pod of its own: an executor, and Schemathesis against everything that its OpenAPI document tells of.

`python fuzzed_pod.py SECONDS SEED`, alone in its pid, network and mount namespaces, so that whatever the made-up
commands do, they do it to nobody else. Prints Schemathesis's report; its exit code, or 3 where the executor ended."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

TOKEN: Final = "fuzzed"
URL: Final = "http://127.0.0.1:8080"
CHECKS: Final = ("not_a_server_error", "status_code_conformance", "content_type_conformance",
                 "response_schema_conformance")  # fmt: skip
# What ends the pod by design when its argument says so, and streams that go on until the caller hangs up.
LEFT_OUT: Final = {
    ("/v1/bind", "post"), ("/v1/lease", "post"), ("/v1/files/watch", "get"), ("/v1/files/watch", "post"),
    ("/v1/usage/stream", "get"),
}  # fmt: skip


def call(method: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"Authorization": f"Bearer {TOKEN}"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


def reduced(document: dict[str, Any], left_out: set[tuple[str, str]], values: dict[str, list[Any]]) -> dict[str, Any]:
    """The document less the calls left out and the headers that say whom a call is for. `values`: what parameters of
    that name are to be, so that most calls meet something that is there."""
    for path, operations in document["paths"].items():
        for method in list(operations):
            if (path, method) in left_out:
                del operations[method]
                continue
            given = operations[method].get("parameters", [])
            operations[method]["parameters"] = kept = [one for one in given if "$ref" not in one]
            for one in kept:
                if one["name"] in values:
                    one["schema"] = {"enum": values[one["name"]]}
    document["paths"] = {path: operations for path, operations in document["paths"].items() if operations}
    document["components"]["parameters"] = {}
    return document


def settings(url: str) -> str:
    """Schemathesis's own configuration."""
    lines = [f'base-url = "{url}"', "request-timeout = 60", "workers = 1", "continue-on-failure = true",
             "[phases.examples]", "enabled = false", "[checks]", "enabled = false"]  # fmt: skip
    lines += [f"{check}.enabled = true" for check in CHECKS]
    return "\n".join(lines) + "\n"


def command(config: Path, document: Path, header: str, seconds: int, seed: int) -> list[str]:
    """How Schemathesis is started; unmodified, as its users start it."""
    return [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", str(document), "-H", header,
            "--max-time", str(seconds), "--seed", str(seed), "--no-color"]  # fmt: skip


def main() -> int:
    seconds, seed = int(sys.argv[1]), int(sys.argv[2])
    here = Path("/tmp/fuzzed")
    workspace = here / "workspace"
    workspace.mkdir(parents=True)
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": os.environ["PYTHONPATH"],
        "SOJOURN_POD_TOKEN_SHA256": hashlib.sha256(TOKEN.encode()).hexdigest(),
        "SOJOURN_WORKSPACE": str(workspace),
        "SOJOURN_EXECUTOR_HOST": "127.0.0.1",
    }
    if os.geteuid() == 0:
        env["SOJOURN_COMMAND_USER"] = "nobody"
    with (here / "log").open("wb") as log:
        executor = subprocess.Popen([sys.executable, "-m", "executor"], env=env, stderr=log, cwd="/")
    deadline = time.monotonic() + 60
    while True:
        try:
            call("GET", "/readyz")
            break
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline or executor.poll() is not None:
                print((here / "log").read_text())  # noqa: T201
                return 3
            time.sleep(0.05)
    for one in ("s1", "s2"):
        call("POST", "/v1/sessions", {"id": one})
    call("POST", "/v1/processes", {"id": "p1", "command": ["cat"]})
    call("POST", "/v1/processes", {"id": "p2", "command": ["python3", "-m", "http.server", "9000"]})
    call("POST", "/v1/terminals", {"id": "t1"})
    values: dict[str, list[Any]] = {
        "id": ["s1", "s2", "p1", "p2", "t1", "none"],
        "port": [9000, 9001],
        "wait_sec": [0, 1],  # more of it, and following what does not end, only take time
        "follow": [False],
        "path": [".", "a", "a/b", "made/here", "..", "/etc/passwd", "a\0b", "x" * 300],
        "user": ["nobody", "root", ""],
    }
    (here / "openapi.json").write_text(json.dumps(reduced(call("GET", "/openapi.json"), LEFT_OUT, values)))
    (here / "config.toml").write_text(settings(URL))
    asked = command(here / "config.toml", here / "openapi.json", f"Authorization: Bearer {TOKEN}", seconds, seed)
    code = subprocess.run(asked, cwd=here, check=False).returncode
    if executor.poll() is not None or call("GET", "/healthz")["status"] != "ok":
        print("the executor did not survive")  # noqa: T201
        code = 3
    executor.terminate()
    executor.wait(30)
    log_text = (here / "log").read_text()
    failures = [line for line in log_text.splitlines() if "request_failed" in line or '"error"' in line]
    print("\n".join(failures[:20]))  # noqa: T201
    return code if not failures else code or 4


if __name__ == "__main__":
    sys.exit(main())
