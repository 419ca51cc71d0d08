"""The other servers that the benchmark runs beside ours, as far as they can be had without a network."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness import peers
from benchmarks.harness.load import (
    download_options,
    exec_options,
    raw_options,
    run_bulk,
    run_count,
    upload_options,
)
from benchmarks.harness.servers import (
    CannotMeasure,
    Target,
    Workshop,
    free_port,
    running,
    wait_until_ready,
    workshop,
)

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="needs a C compiler"
)

CLOSING_SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def shop() -> Iterator[Workshop]:
    with workshop("tcp") as built:
        yield built


@pytest.fixture(scope="module")
def go(shop: Workshop) -> Iterator[Target]:
    if shutil.which("go") is None:
        pytest.skip("needs go")
    with peers.go_server(shop) as target:
        yield target


def test_the_go_server_runs_commands_and_gives_their_output_raw(shop: Workshop, go: Target) -> None:
    sample = run_count(shop, go, exec_options(go), connections=4, count=40)
    assert (sample.requests, sample.errors) == (40, 0), sample.first_error
    assert run_count(shop, go, exec_options(go, '{"command": ["false"]}'), connections=1, count=1).errors == 1
    raw = run_bulk(shop, go, raw_options(go, '{"command": ["head", "-c", "3000001", "/dev/zero"]}', 3_000_001))
    assert not raw.errors, raw.first_error


def test_the_go_server_keeps_files(shop: Workshop, go: Target) -> None:
    assert not run_bulk(shop, go, upload_options(go, "file", 3_000_001)).errors
    assert not run_bulk(shop, go, download_options(go, "file", 3_000_001), verify=True).errors


def test_a_server_that_hangs_up_after_each_answer_is_measured_with_its_connections(shop: Workshop) -> None:
    port, directory = str(free_port()), shop.fresh("closing")
    with running([sys.executable, "-c", CLOSING_SERVER, port], {}, directory / "log") as process:
        target = Target(name="closing", address=("--tcp", port), exec_path="/", log=directory / "log")
        wait_until_ready(target, process, 30)
        options = ["--method", "GET", "--path", "/", "--expect", "ok"]
        sample = run_count(shop, target, options, connections=3, count=30)
    assert (sample.requests, sample.errors) == (30, 0), sample.first_error


def test_a_peer_that_cannot_be_installed_is_absent_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "requirements-swe-rex.txt").write_text("./no-such-wheel-0-py3-none-any.whl --hash=sha256:00\n")
    monkeypatch.setattr(peers, "PEERS_ROOT", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(CannotMeasure, match=r"requirements-swe-rex\.txt could not be installed"):
        peers.installed("swe-rex")


def test_without_go_its_server_is_absent_with_the_reason(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(CannotMeasure, match="go is not installed"), peers.go_server(shop):
        pass
