"""Runs the C load client and reads its one line of JSON."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from benchmarks.harness.servers import CannotMeasure, Target, Workshop

SPARE_SEC: Final = 60.0  # beyond what a load is told to take, before it is given up
FRAMES_TYPE: Final = "application/vnd.sojourn.frames"
RAW_TYPE: Final = "application/octet-stream"


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What one load saw; latencies in microseconds from sending a request to having its whole answer."""

    requests: int
    errors: int
    seconds: float
    per_sec: float
    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float
    first_error: str = ""


class StreamSample(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one streamed command."""

    stdout_bytes: int
    stderr_bytes: int
    seconds: float
    first_byte_us: float
    gaps: int
    misplaced: int  # output frames whose offset is not where the one before ended
    heartbeats: int
    ended: bool
    exit: dict[str, Any] | None = None

    def whole(self, size_bytes: int) -> bool:
        return (
            self.stdout_bytes == size_bytes
            and not self.gaps
            and not self.misplaced
            and self.ended
            and self.exit is not None
            and self.exit.get("exit_code") == 0
        )


class BulkSample(msgspec.Struct, frozen=True, kw_only=True):
    """What came of long answers or long bodies, one after the other."""

    requests: int
    errors: int
    bytes: int  # of all bodies, sent where they were uploads and received where not
    seconds: float  # of all requests, each from its sending to the end of its answer
    p50_us: float
    first_byte_p50_us: float
    first_error: str = ""

    @property
    def mb_per_sec(self) -> float:
        return self.bytes / self.seconds / 1e6 if self.seconds else 0.0


def exec_options(target: Target, body: str | None = None, expect: str | None = None) -> list[str]:
    """A command, `true` where none is given."""
    body, expect = target.true_body if body is None else body, target.true_expect if expect is None else expect
    return ["--method", "POST", "--path", target.exec_path, "--body", body, "--expect", expect]


def upload_options(target: Target, name: str, size_bytes: int) -> list[str]:
    return ["--method", "PUT", "--path", f"{target.files_path}?path={name}", "--upload", str(size_bytes)]


def download_options(target: Target, name: str, size_bytes: int) -> list[str]:
    return ["--method", "GET", "--path", f"{target.files_path}?path={name}", "--expect-bytes", str(size_bytes)]


def raw_options(target: Target, body: str, size_bytes: int) -> list[str]:
    """A command's output as its bytes are."""
    options = ["--method", "POST", "--path", target.exec_path, "--body", body, "--expect-bytes", str(size_bytes)]
    return [*options, "--header", f"Accept: {RAW_TYPE}"]


NOOP_OPTIONS: Final = ["--method", "GET", "--path", "/healthz", "--expect", "ok"]


def argv_of(shop: Workshop, target: Target, options: list[str]) -> list[str]:
    headers = [part for header in (*target.headers, "Content-Type: application/json") for part in ("--header", header)]
    return [str(shop.load), *target.address, *headers, *options]


def _output(shop: Workshop, target: Target, options: list[str], limit_sec: float) -> str:
    """What the load client printed. Raises CannotMeasure, naming the server, with the end of its log."""
    argv = argv_of(shop, target, options)
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=limit_sec, check=False)
    except subprocess.TimeoutExpired as why:
        raise CannotMeasure(f"{target.name}: the load client did not end within {limit_sec:.0f} s") from why
    if done.returncode:
        log = target.log.read_text(errors="replace").strip()[-300:] if target.log and target.log.exists() else ""
        said = f"{done.stderr.strip() or done.returncode}; its log ends: {log or 'nothing'}"
        raise CannotMeasure(f"{target.name}: the load client failed: {said}")
    return done.stdout


def run_load(
    shop: Workshop, target: Target, options: list[str], *, connections: int, seconds: float, warmup_sec: float
) -> Sample:
    """Closed loop: each connection sends the next request when it has the answer. Raises CannotMeasure."""
    timing = ["--connections", str(connections), "--seconds", str(seconds), "--warmup", str(warmup_sec)]
    return _sample(_output(shop, target, options + timing, seconds + warmup_sec + SPARE_SEC))


def run_count(shop: Workshop, target: Target, options: list[str], *, connections: int, count: int) -> Sample:
    sizes = ["--connections", str(connections), "--count", str(count)]
    return _sample(_output(shop, target, options + sizes, 4 * SPARE_SEC))


def run_stream(shop: Workshop, target: Target, body: str) -> StreamSample:
    options = ["--frames", "--method", "POST", "--path", target.exec_path, "--body", body]
    options += ["--header", f"Accept: {FRAMES_TYPE}"]
    return msgspec.convert(json.loads(_output(shop, target, options, 4 * SPARE_SEC)), StreamSample)


def run_bulk(shop: Workshop, target: Target, options: list[str], *, count: int = 1, verify: bool = False) -> BulkSample:
    """`verify`: the answers must be what uploads send; costs time of the client's. Raises CannotMeasure."""
    more = ["--bulk", "--count", str(count), *(["--verify"] if verify else [])]
    return msgspec.convert(json.loads(_output(shop, target, options + more, 4 * SPARE_SEC)), BulkSample)


@contextmanager
def background_load(shop: Workshop, target: Target, options: list[str], connections: int) -> Iterator[None]:
    """Load of which only the effect on others counts, until the block ends."""
    argv = argv_of(shop, target, [*options, "--connections", str(connections), "--seconds", "3600"])
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
        if process.poll() is not None:
            raise CannotMeasure(f"the load on {target.name} ended early with {process.returncode}")
    finally:
        process.kill()
        process.wait(10)


@contextmanager
def paced_noop(shop: Workshop, target: Target, pace_ms: float, got: list[Sample]) -> Iterator[None]:
    """Health checks every `pace_ms` while the block runs; their sample is appended to `got` after it."""
    argv = argv_of(shop, target, [*NOOP_OPTIONS, "--pace-ms", str(pace_ms), "--seconds", "3600", "--until-stdin-ends"])
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield
        out, err = process.communicate(timeout=SPARE_SEC)
        if process.returncode:
            raise CannotMeasure(f"health checks failed: {err.strip()}")
        got.append(_sample(out))
    except subprocess.TimeoutExpired as why:
        raise CannotMeasure("the health checks did not end") from why
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


def _sample(line: str) -> Sample:
    return msgspec.convert(json.loads(line), Sample)
