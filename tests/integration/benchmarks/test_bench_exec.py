"""The benchmark as a program: what it measures comes out as JSON, and nothing of it stays behind."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.memory import tree
from benchmarks.harness.servers import ROOT

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="needs a C compiler"
)

PROGRAM = [sys.executable, str(ROOT / "benchmarks" / "bench_exec.py"), "--quick", "--no-manager", "--peers", "none"]


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_a_run_gives_its_figures_with_their_verdicts_as_json(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    ended = subprocess.run(
        [*PROGRAM, "--rounds", "1", "--only", "session,raw,start", "--json", str(file)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    measured = json.loads(file.read_text())
    assert measured["results"]["session"]["executor"]["errors"] == 0
    assert measured["results"]["raw"]["executor"]["first_byte_us"] > 0
    assert measured["results"]["start"]["executor"]["ms"] > measured["results"]["start"]["bare_python_ms"]
    verdicts = {check["name"]: check["verdict"] for check in measured["checks"]}
    assert verdicts["echo in a session, over HTTP"] in ("MISSED", "must", "goal")
    assert verdicts["echo in a session: times faster than SWE-ReX"] == "not measured"
    assert set(measured["skipped"]) == {"manager", "go", "swe-rex", "agent-sandbox"}
    assert "must and goal" in ended.stdout


def test_an_interrupted_run_ends_all_that_it_started() -> None:
    with subprocess.Popen(
        [*PROGRAM, "--only", "exec,noop", "--rounds", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            while "no-op: round 2" not in (line := process.stderr.readline()):
                assert line, "it ended by itself"
            started = tree(process.pid)
            assert len(started) > 4  # itself, two C servers with their helpers, an executor with its own
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            assert "what it had started is gone" in process.stderr.read()
            assert process.stdout is not None
            told = process.stdout.read()
            assert "exec true, 1 at once: time" in told  # what was measured by then is told
            assert "no-op under" not in told
        finally:
            process.kill()
    assert not [pid for pid in started if _is_there(pid)]


def _is_there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
