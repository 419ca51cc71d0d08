"""The C floor and the load client, built and run for real."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest

from benchmarks.harness.load import (
    NOOP_OPTIONS,
    download_options,
    exec_options,
    raw_options,
    run_bulk,
    run_count,
    run_load,
    run_stream,
    upload_options,
)
from benchmarks.harness.memory import alone_bytes, pss_bytes, tree, wakeups
from benchmarks.harness.servers import Target, Workshop, floor_server, request, workshop

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="needs a C compiler"
)


@pytest.fixture(scope="module", params=["tcp", "unix"])
def shop(request: pytest.FixtureRequest) -> Iterator[Workshop]:
    with workshop(request.param) as built:
        yield built


@pytest.fixture(scope="module")
def floor(shop: Workshop) -> Iterator[Target]:
    with floor_server(shop) as target:
        yield target


def test_the_floor_runs_commands_with_their_output_and_exit_code(floor: Target) -> None:
    body = json.dumps({"command": ["sh", "-c", 'echo "a\tb"; echo no >&2; exit 3']})
    status, answer = request(floor, "POST", "/v1/exec", body)
    assert status == 200
    assert json.loads(answer) == {"exit_code": 3, "stdout": "a\tb\n", "stderr": "no\n"}


def test_a_command_that_closes_its_output_early_is_still_waited_for(floor: Target) -> None:
    body = json.dumps({"command": ["sh", "-c", "exec >&- 2>&-; sleep 0.1; exit 4"]})
    assert json.loads(request(floor, "POST", "/v1/exec", body)[1])["exit_code"] == 4


def test_commands_of_the_floor_run_as_the_command_user(shop: Workshop, floor: Target) -> None:
    body = json.dumps({"command": ["id", "-u"]})
    uid = int(json.loads(request(floor, "POST", "/v1/exec", body)[1])["stdout"])
    assert shop.user is None or uid == shop.user.uid != 0


def test_many_at_once_each_get_their_own_answer(shop: Workshop, floor: Target) -> None:
    options = exec_options(floor, '{"command": "echo {n}"}', '"stdout":"{n}\\n"')
    sample = run_count(shop, floor, options, connections=16, count=200)
    assert (sample.requests, sample.errors) == (200, 0), sample.first_error


def test_the_load_client_counts_wrong_answers(shop: Workshop, floor: Target) -> None:
    sample = run_count(shop, floor, exec_options(floor, expect='"exit_code":77'), connections=2, count=10)
    assert sample.errors == 10
    assert "200" in sample.first_error


def test_the_load_client_counts_refusals(shop: Workshop, floor: Target) -> None:
    options = ["--method", "POST", "--path", "/nowhere", "--body", "{}", "--expect", ""]
    assert run_count(shop, floor, options, connections=1, count=3).errors == 3


def test_a_timed_load_measures_something_and_its_percentiles_are_in_order(shop: Workshop, floor: Target) -> None:
    sample = run_load(shop, floor, NOOP_OPTIONS, connections=2, seconds=0.2, warmup_sec=0.05)
    assert sample.requests > 0
    assert sample.errors == 0
    assert 0 < sample.p50_us <= sample.p90_us <= sample.p99_us <= sample.max_us


def test_streamed_output_is_counted_and_its_exit_read(shop: Workshop, floor: Target) -> None:
    size = 3_000_001
    sample = run_stream(shop, floor, json.dumps({"command": ["head", "-c", str(size), "/dev/zero"]}))
    assert sample.whole(size)
    assert not run_stream(shop, floor, json.dumps({"command": ["false"]})).whole(0)


def test_raw_output_is_counted_and_its_first_byte_timed(shop: Workshop, floor: Target) -> None:
    body = json.dumps({"command": ["head", "-c", "3000001", "/dev/zero"]})
    sample = run_bulk(shop, floor, raw_options(floor, body, 3_000_001), count=3)
    assert (sample.requests, sample.errors, sample.bytes) == (3, 0, 9_000_003), sample.first_error
    assert 0 < sample.first_byte_p50_us <= sample.p50_us
    assert run_bulk(shop, floor, raw_options(floor, body, 3_000_002)).errors == 1


def test_files_come_back_as_they_went(shop: Workshop, floor: Target) -> None:
    for size in (0, 1, 5_000_000):  # over the pattern's length, so that its end meets its beginning
        up = run_bulk(shop, floor, upload_options(floor, "file", size), count=2)
        assert (up.errors, up.bytes) == (0, 2 * size or up.bytes), up.first_error
        down = run_bulk(shop, floor, download_options(floor, "file", size), count=2, verify=True)
        assert (down.errors, down.bytes) == (0, 2 * size), down.first_error


def test_other_bytes_than_were_sent_are_noticed(shop: Workshop, floor: Target) -> None:
    body = json.dumps({"command": ["head", "-c", "1000", "/dev/zero"]})
    sample = run_bulk(shop, floor, raw_options(floor, body, 1000), verify=True)
    assert (sample.errors, "other bytes" in sample.first_error) == (1, True)


def test_a_missing_file_is_an_error_with_its_answer(shop: Workshop, floor: Target) -> None:
    sample = run_bulk(shop, floor, download_options(floor, "nothing", 5), count=3)
    assert sample.errors == 3
    assert "404" in sample.first_error


def test_a_process_tree_and_its_memory_are_found(floor: Target) -> None:
    pids = tree(floor.pid)
    assert len(pids) == 2  # the server and its helper
    used = pss_bytes(pids)
    assert used is None or used > 0
    alone = alone_bytes(pids)
    assert (used is None) == (alone is None)
    assert used is None or alone is None or alone >= used - 65_536  # what others share counts in full


def test_a_process_that_is_asked_something_is_seen_to_wake_up(floor: Target) -> None:
    before = wakeups([floor.pid])
    request(floor, "GET", "/healthz")
    assert wakeups([floor.pid]) > before
