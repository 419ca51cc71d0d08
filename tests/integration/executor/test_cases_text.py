"""Cases of *Text and bytes*, against a running executor."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from executor.wire import NDJSON_TYPE
from tests.support.executor_pod import PYTHON, Pod

SPLIT_DASH = (
    "import os, time\n"
    "for fd in (1, 2):\n"
    "    os.write(fd, b'\\xe2'); time.sleep(0.05); os.write(fd, b'\\x80\\x94')\n"
)  # fmt: skip


async def ndjson_of(pod: Pod, command: str | list[str], **fields: Any) -> list[dict[str, Any]]:
    async with pod.open_stream(command, accept=NDJSON_TYPE, **fields) as answer:
        return [json.loads(line) for line in (await answer.read()).splitlines()]


async def test_a_character_split_over_two_writes_stays_one(executor: Pod) -> None:
    """UN01"""
    events = await ndjson_of(executor, [PYTHON, "-c", SPLIT_DASH])
    for stream in ("stdout", "stderr"):
        pieces = [event for event in events if event["type"] == stream]
        assert "".join(piece["text"] for piece in pieces) == "—"
        assert pieces[0]["offset"] == 0
        assert pieces[-1]["end_offset"] == 3
    result = await executor.exec([PYTHON, "-c", SPLIT_DASH])
    assert (result["stdout"], result["stderr"]) == ("—", "—")
    got = await executor.stream([PYTHON, "-c", SPLIT_DASH])
    assert (got.stdout, got.stderr) == ("—".encode(), "—".encode())


async def test_a_character_that_never_becomes_whole_shows_as_one_replacement(executor: Pod) -> None:
    """UN01"""
    events = await ndjson_of(executor, ["printf", "a\\xe2"])
    text = "".join(event["text"] for event in events if event["type"] == "stdout")
    assert text == "a\ufffd"
    assert (await executor.exec(["printf", "\\xff\\xfe"]))["stdout"] == "\ufffd\ufffd"


EUROS = "import sys; sys.stdout.buffer.write('€'.encode() * 10**6)"


async def test_truncation_never_falls_inside_a_character(executor: Pod) -> None:
    """UN03"""
    for cap in (100_001, 100_002, 100_003, 7):
        result = await executor.exec([PYTHON, "-c", EUROS], max_output_bytes=cap)
        assert result["truncated"] is True
        assert result["stdout_bytes"] == 3_000_000
        assert "\ufffd" not in result["stdout"]
        assert result["stdout"].count("€") <= cap // 3
        exact = await executor.exec([PYTHON, "-c", EUROS], max_output_bytes=cap, encoding="base64")
        kept = base64.b64decode(exact["stdout_base64"])
        whole = "€".encode() * 10**6
        half = len(kept) // 2
        assert whole.startswith(kept[:half])
        assert whole.endswith(kept[-half:])


async def test_a_log_read_in_pages_is_exact(executor: Pod) -> None:
    """UN03"""
    whole = "€".encode() * 20_000
    id = await executor.start([PYTHON, "-c", EUROS.replace("10**6", "20000")])
    await executor.ended(id)
    got = b""
    while True:
        page = await executor.output(id, offset=len(got), limit=1000)
        assert int(page.headers["Sandbox-Output-Offset"]) == len(got)
        if not page.body:
            break
        assert len(page.body) <= 1000
        got += page.body
    assert got == whole


async def test_streamed_text_of_a_large_output_breaks_no_character(executor: Pod) -> None:
    """UN03"""
    events = await ndjson_of(executor, [PYTHON, "-c", EUROS])
    text = "".join(event["text"] for event in events if event["type"] == "stdout")
    assert text == "€" * 10**6
    ends = [(event["offset"], event["end_offset"]) for event in events if event["type"] == "stdout"]
    assert [start for start, _end in ends[1:]] == [end for _start, end in ends[:-1]]


@pytest.mark.parametrize("body", [
    {"command": "echo a\0b"}, {"command": ["echo", "a\0b"]}, {"command": ["true"], "env": {"A": "x\0y"}},
    {"command": ["true"], "env": {"A\0B": "x"}}, {"command": ["true"], "cwd": "/tmp\0x"},
    {"command": ["true"], "user": "no\0body"},
])  # fmt: skip
async def test_nul_in_a_command_is_refused(executor: Pod, body: dict[str, Any]) -> None:
    """UN05"""
    for path in ("/v1/exec", "/v1/processes"):
        reply = await executor.call("POST", path, body)
        assert (reply.status, reply.code) == (400, "invalid_request"), reply.body


@pytest.mark.parametrize("call", ["/v1/files", "/v1/files/stat", "/v1/files/list"])
async def test_nul_in_a_path_is_refused(executor: Pod, call: str) -> None:
    """UN05"""
    reply = await executor.call("GET", f"{call}?path=a%00b")
    assert reply.status == 400, reply.body
    assert reply.code in ("invalid_path", "invalid_request")


async def test_nul_in_a_process_id_is_only_an_unknown_process(executor: Pod) -> None:
    """UN05"""
    assert (await executor.call("GET", "/v1/processes/a%00b")).status in (400, 404)


@pytest.mark.parametrize("half", ["\\ud800", "\\udfff", "a\\ud83d"])
async def test_half_a_character_in_json_is_refused(executor: Pod, half: str) -> None:
    """UN05"""
    for body in (f'{{"command": ["echo", "{half}"]}}', f'{{"command": ["true"], "stdin": "{half}"}}'):
        reply = await executor.call("POST", "/v1/exec", body.encode())
        assert (reply.status, reply.code) == (400, "invalid_request")


async def test_output_is_never_altered(any_tier: Pod) -> None:
    """UN07"""
    raw = b"a\r\nb\x1b[31mc\td\x08"
    command = r"printf 'a\r\nb\033[31mc\td\b'"
    assert (await any_tier.exec(command))["stdout"].encode() == raw
    assert (await any_tier.stream(command)).stdout == raw
    exact = await any_tier.exec(command, encoding="base64")
    assert base64.b64decode(exact["stdout_base64"]) == raw
    id = await any_tier.start(command)
    await any_tier.ended(id)
    assert (await any_tier.output(id)).body == raw
    events = await ndjson_of(any_tier, command, encoding="base64")
    assert b"".join(base64.b64decode(e["data_base64"]) for e in events if e["type"] == "stdout") == raw


async def test_every_byte_comes_through_in_binary_form(executor: Pod) -> None:
    """UN07"""
    command = [PYTHON, "-c", "import sys; sys.stdout.buffer.write(bytes(range(256)) * 257)"]
    raw = bytes(range(256)) * 257
    assert base64.b64decode((await executor.exec(command, encoding="base64"))["stdout_base64"]) == raw
    assert (await executor.stream(command)).stdout == raw


async def test_arguments_environment_and_input_take_any_text(executor: Pod) -> None:
    """UN07"""
    text = "Grüße — 你好 🎉 \u202e \x1b[0m \t\"'\\"
    assert (await executor.exec(["printf", "%s", text]))["stdout"] == text
    assert (await executor.exec('printf %s "$T"', env={"T": text}))["stdout"] == text
    assert (await executor.exec(["cat"], stdin=text))["stdout"] == text
