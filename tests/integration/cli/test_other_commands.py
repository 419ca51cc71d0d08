"""`ls`, `top`, `keys`, `rm`, `doctor`, and a whole session of the client against a stack."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from sojourn import AsyncClient, Client, Gap, Output
from sojourn.errors import Conflict, FileMissing, InvalidPath, NotFound, SojournError, Unauthenticated
from tests.integration.cli.conftest import Sojourn
from tests.support.user_stack import Stack


def test_ls_shows_sandboxes_and_files(sojourn: Sojourn, task: str) -> None:
    assert sojourn("exec", task, "--", "mkdir d; echo hello > d/f; ln -s f d/l").returncode == 0
    assert task in sojourn("ls").stdout.decode()
    shown = sojourn("ls", task, "d").stdout.decode().splitlines()
    assert [line.split()[-1] for line in shown] == ["f", "f"]
    assert "l -> f" in shown[1]
    entries = json.loads(sojourn("ls", task, "d", "--json").stdout)
    assert [(entry["name"], entry["type"]) for entry in entries] == [("f", "file"), ("l", "symlink")]


def test_a_task_that_was_never_used_is_not_found(sojourn: Sojourn) -> None:
    done = sojourn("ls", "never-used")
    assert done.returncode == 125
    assert b"not_found" in done.stderr


def test_top_shows_use_against_limits(sojourn: Sojourn, task: str) -> None:
    sojourn("exec", task, "--", "true")
    assert sojourn("top", task).stdout.decode().startswith("memory")
    assert json.loads(sojourn("top", task, "--json").stdout)["memory"]["working_set_bytes"] > 0


def test_top_goes_on_until_it_is_interrupted(stack: Stack, sojourn: Sojourn, task: str) -> None:
    sojourn("exec", task, "--", "true")
    watching = subprocess.Popen(
        [sys.executable, "-m", "sojourn", "top", task, "--watch", "--interval", "1", "--json"],
        env=stack.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert watching.stdout is not None
        samples = [json.loads(watching.stdout.readline()) for _ in range(2)]
        assert samples[0]["cpu_ms"] is None
        assert samples[1]["elapsed_sec"] >= 1
        assert samples[1]["usage"]["memory"]["working_set_bytes"] > 0
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 130
    finally:
        watching.kill()
        watching.communicate()


def test_top_watches_no_task_that_was_never_used(sojourn: Sojourn) -> None:
    done = sojourn("top", "never-used", "--watch")
    assert done.returncode == 125
    assert b"not_found" in done.stderr


def test_logs_lists_processes_shows_both_streams_as_they_are_and_follows_to_the_end(
    sojourn: Sojourn, stack: Stack, task: str
) -> None:
    with stack.client() as client:
        process = client.task(task).start("printf 'a\\377b'; echo oops >&2; read line; echo got $line")
        process.write_stdin("it\n")
        followed = sojourn("logs", task, process.id, "-f")
        assert (followed.returncode, followed.stdout, followed.stderr) == (0, b"a\xffbgot it\n", b"oops\n")
        assert sojourn("logs", task, process.id, "--stream", "stdout", "--offset", "3").stdout == b"got it\n"
        (row,) = [line for line in sojourn("logs", task).stdout.splitlines() if process.id.encode() in line]
        assert row.split()[1:5] == [b"ended", b"0", b"15", b"B"]
        assert row.endswith(b"printf 'a\\377b'; echo oops >&2; read line; echo got $line"), row
    assert sojourn("logs", task, "no-such-process").returncode == 125
    unnamed = sojourn("logs", task, "-f")
    assert (unnamed.returncode, b"lists those there are" in unnamed.stderr) == (125, True)


def test_a_key_works_until_it_is_revoked(sojourn: Sojourn, stack: Stack, task: str) -> None:
    made = sojourn("keys", "create", "for-a-test")
    secret = made.stdout.decode().strip()
    listed = json.loads(sojourn("keys", "list", "--json").stdout)
    key_id = next(key["key_id"] for key in listed if key["name"] == "for-a-test")
    assert secret not in json.dumps(listed)
    with Client(stack.address, secret) as client:
        assert client.task(task).exec("true").ok
        assert sojourn("keys", "revoke", key_id).returncode == 0
        with pytest.raises(Unauthenticated):
            client.task(task).exec("true")


def test_the_audit_log_tells_who_made_a_key_and_who_revoked_it(sojourn: Sojourn, stack: Stack, task: str) -> None:
    sojourn("keys", "create", "audited", "--member", "ann@example.org")
    listed = json.loads(sojourn("keys", "list", "--json").stdout)
    key_id = next(key["key_id"] for key in listed if key["name"] == "audited")
    assert sojourn("keys", "revoke", key_id).returncode == 0
    sojourn("exec", task, "--", "true")
    events = json.loads(sojourn("audit", "--json").stdout)
    about = [event for event in events if event["subject"] == key_id]
    assert [event["action"] for event in about] == ["key.created", "key.revoked"]
    assert about[0]["details"]["member_given"] == "ann@example.org"
    assert {(event["role"], event["address"]) for event in about} == {("admin", "127.0.0.1")}
    for line in sojourn("audit").stdout.decode().splitlines():
        assert line.split()[1] in {event["action"] for event in events}


def test_rm_ends_the_sandbox_and_is_no_error_twice(sojourn: Sojourn, task: str) -> None:
    sojourn("exec", task, "--", "touch kept")
    assert sojourn("rm", task).returncode == 0
    assert sojourn("rm", task).returncode == 0
    again = sojourn("exec", task, "--", "ls")
    assert again.stdout == b""
    assert b"empty workspace" in again.stderr


def test_doctor_is_found_beside_the_client(sojourn: Sojourn) -> None:
    assert b"namespaces" in sojourn("doctor").stdout


# ── the client ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_background_process_talks_waits_and_ends(stack: Stack, task: str) -> None:
    with stack.client() as client:
        process = client.task(task).start("while read line; do echo got $line; done; echo end >&2; exit 4")
        process.write_stdin("one\n")
        process.write_stdin(b"two\n")
        process.close_stdin()
        pieces = list(process.output(follow=True))
        out = b"".join(piece.data for piece in pieces if isinstance(piece, Output) and piece.stream == "stdout")
        err = b"".join(piece.data for piece in pieces if isinstance(piece, Output) and piece.stream == "stderr")
        assert (out, err) == (b"got one\ngot two\n", b"end\n")
        assert process.wait(30).exit_code == 4
        with pytest.raises(Conflict):
            process.write_stdin("three\n")
        process.delete()
        with pytest.raises(NotFound):
            process.info()


def test_a_background_process_takes_signals(stack: Stack, task: str) -> None:
    with stack.client() as client:
        process = client.task(task).start(["sleep", "600"])
        process.signal("TERM")
        assert process.wait(30).signal == "SIGTERM"


def test_the_same_id_runs_once(stack: Stack, task: str) -> None:
    with stack.client() as client:
        handle = client.task(task)
        first = handle.exec("echo x >> runs; wc -l < runs", id="only-once")
        second = handle.exec("echo x >> runs; wc -l < runs", id="only-once")
        assert first.stdout.strip() == second.stdout.strip() == "1"
        assert first.exit == second.exit


def test_large_output_arrives_whole(stack: Stack, task: str) -> None:
    size = 0
    with stack.client() as client, client.task(task).stream(["head", "-c", "50000000", "/dev/zero"]) as events:
        for event in events:
            assert not isinstance(event, Gap)
            if isinstance(event, Output):
                assert event.offset == size
                size += len(event.data)
    assert size == 50_000_000


def test_files_are_written_read_listed_moved_and_deleted(stack: Stack, task: str) -> None:
    with stack.client() as client:
        files = client.task(task).files
        data = bytes(range(256)) * 8192
        files.write("a/b/data.bin", data, mode=0o640)
        assert files.read("a/b/data.bin") == data
        assert files.read("a/b/data.bin", offset=100, length=3) == bytes([100, 101, 102])
        assert b"".join(files.iter("a/b/data.bin")) == data
        assert files.stat("a/b/data.bin").mode == 0o640
        files.mkdir("c")
        files.move("a/b/data.bin", "c/moved")
        assert [entry.name for entry in files.list("c")] == ["moved"]
        files.delete("c", recursive=True)
        assert not files.exists("c")
        with pytest.raises(FileMissing):
            files.read("c/moved")
        with pytest.raises(InvalidPath):
            files.read("../../etc/passwd")


async def test_the_asynchronous_client_does_the_same(stack: Stack, task: str) -> None:
    async with AsyncClient(stack.address, stack.api_key) as client:
        handle = client.task(task)
        result = await handle.exec("cat; exit 3", stdin="ä")
        assert (result.stdout, result.exit_code) == ("ä", 3)
        assert (await handle.info()).task_id == task
        with pytest.raises(SojournError):
            await client.task("never-used").usage()
