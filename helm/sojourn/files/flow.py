"""What a release can do, from inside the cluster: a key of its own, a task's sandbox that keeps its files, its end."""

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request

GATEWAY = os.environ["SANDBOX_GATEWAY_URL"]
MANAGER = [sys.executable, "-I", "-m", "manager"]
WAIT_SEC = 240


def call(method, path, key, body=None):
    headers = {"X-Api-Key": key, "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(GATEWAY + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as refused:
        return refused.code, json.loads(refused.read() or b"{}")


def patiently(what, attempt):
    """The first answer of 200; whatever may come right by itself is tried again."""
    give_up = time.monotonic() + WAIT_SEC
    while True:
        try:
            status, body = attempt()
        except OSError as why:
            status, body = 0, why
        if status == 200:
            return body
        if time.monotonic() > give_up or status in (400, 401, 403):
            sys.exit(f"{what}: {status} {body}")
        time.sleep(1)


patiently("the gateway is ready", lambda: call("GET", "/readyz", ""))
status, _ = call("POST", "/sandbox/task/helm-test/exec", "no-key", {"command": "true"})
assert status == 401, f"without a key: {status}"
made = subprocess.run(
    [*MANAGER, "keys", "create", "--tenant", "helm", "--project", "test", "--expires-in-sec", "900"],
    capture_output=True,
    text=True,
    check=False,
    timeout=120,
)
assert made.returncode == 0, made.stderr
key = made.stdout.split()[-1]
task = f"/sandbox/task/helm-test-{secrets.token_hex(4)}"
try:
    note = {"command": "echo kept > note.txt; echo $((6 * 7))"}
    first = patiently("the first command", lambda: call("POST", f"{task}/exec", key, note))
    assert (first["stdout"], first["exit_code"]) == ("42\n", 0), first
    second = patiently("the second command", lambda: call("POST", f"{task}/exec", key, {"command": "cat note.txt"}))
    assert (second["stdout"], second["pod_id"]) == ("kept\n", first["pod_id"]), second
finally:
    status, body = call("DELETE", task, key)
assert status == 204, f"the task's end: {status} {body}"
how = f"in {first['pod_id']}, {first['provisioned']}"
sys.stdout.write(f"a sandbox {how}: its files were there for the next command, and it is gone\n")
