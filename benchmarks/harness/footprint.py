"""What an executor costs that does nothing: memory, wake-ups, the time to its first answer, the size of its bundle."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.harness.bench import Bench, ratio_of
from benchmarks.harness.load import exec_options, run_count
from benchmarks.harness.memory import alone_bytes, pss_bytes, tree, wakeups
from benchmarks.harness.peers import cache_directory
from benchmarks.harness.servers import ROOT, CannotMeasure, executor_server, request, wait_until_ready

LAUNCHER: Final = "sojourn-executor"  # the bundle's directory, and the program in it
WARM_COMMANDS: Final = 20
WATCH_SEC: Final = 5.0
QUIET_LIMIT_SEC: Final = 20.0  # connections that have ended leave one last timer behind, of ten seconds
BUILD_SEC: Final = 600.0
KEEP_BUNDLES: Final = 4


def measure_memory(bench: Bench) -> dict[str, object]:
    """Executors that ran a few commands and idle since: memory at once, wake-ups when the last timer is over.

    An executor loads what files, terminals and the like need when they are first asked for: one each is looked at."""
    bench.say("memory: a fresh executor")
    with ExitStack() as both:
        source = both.enter_context(_idle(bench, bench.executor_argv))
        loaded = both.enter_context(_idle(bench, bench.executor_argv, loaded=True))
        bundle = both.enter_context(_idle(bench, [str(bench.bundle / LAUNCHER)])) if bench.bundle is not None else None
        found: dict[str, object] = {
            "processes": len(source),
            "idle_alone_bytes": alone_bytes(source),
            "idle_pss_bytes": pss_bytes(source),
            "bundle_alone_bytes": alone_bytes(bundle) if bundle is not None else None,
            "after_load_pss_bytes": pss_bytes(tree(bench.executor.pid)) if bench.executor is not None else None,
            "peers_pss_bytes": bench.fresh_pss,
        }
        found |= {"loaded_pss_bytes": pss_bytes(loaded), "loaded_alone_bytes": alone_bytes(loaded)}
        bench.say("idle: wake-ups of an executor that has nothing to do")
        give_up = time.monotonic() + QUIET_LIMIT_SEC
        while _woken(source + loaded, 1.0) and time.monotonic() < give_up:
            pass
        found |= {"watched_sec": WATCH_SEC, "wakeups": _woken(source + loaded, WATCH_SEC)}
    return {"memory": found}


@contextmanager
def _idle(bench: Bench, argv: list[str], *, loaded: bool = False) -> Iterator[list[int]]:
    """The processes of a fresh executor after a few commands; `loaded`: with all that other calls need."""
    with executor_server(bench.shop, argv) as fresh:
        run_count(bench.shop, fresh, exec_options(fresh), connections=1, count=WARM_COMMANDS)
        if loaded and (got := request(fresh, "GET", "/v1/processes"))[0] != 200:
            raise CannotMeasure(f"the executor answered {got[0]} to a list of its processes")
        time.sleep(1.0)
        yield tree(fresh.pid)


def _woken(pids: list[int], seconds: float) -> int:
    """How often any thread of theirs got the processor, whether it then went to sleep by itself or not."""
    before = wakeups(pids)
    time.sleep(seconds)
    return wakeups(pids) - before


def measure_start(bench: Bench) -> dict[str, object]:
    """From starting the process to the first answer of `/healthz`, against an interpreter that does nothing."""
    argvs = {"executor": bench.executor_argv}
    if bench.bundle is not None:
        argvs["bundle"] = [str(bench.bundle / LAUNCHER)]
    bare_ms: list[float] = []
    start_ms: dict[str, list[float]] = {name: [] for name in argvs}
    for turn in range(bench.effort.start_rounds):
        bench.say(f"start: round {turn + 1} of {bench.effort.start_rounds}")
        began = time.monotonic()
        subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True, timeout=60)
        bare_ms.append((time.monotonic() - began) * 1e3)
        for name, argv in argvs.items():
            began = time.monotonic()
            with executor_server(bench.shop, argv, ready=False) as target:
                wait_until_ready(target, None, 60)
                start_ms[name].append((time.monotonic() - began) * 1e3)
    return {
        "start": {
            "bare_python_ms": median(bare_ms),
            **{
                name: {"ms": median(taken), "best_ms": min(taken), "ratio": ratio_of(taken, bare_ms)}
                for name, taken in start_ms.items()
            },
        }
    }


def measure_bundle(bench: Bench) -> dict[str, object]:
    """The bundle's size, packed and not. Makes it where this tree's is not in the cache: half a minute."""
    bench.bundle = _bundle(bench)
    sizes = {kind: sum(one.stat().st_size for one in bench.bundle.parent.glob(f"*.{kind}")) for kind in ("xz", "gz")}
    return {
        "bundle": {
            "xz_bytes": sizes["xz"],
            "gz_bytes": sizes["gz"],
            "unpacked_bytes": sum(one.lstat().st_size for one in bench.bundle.rglob("*") if one.is_file()),
        }
    }


def _bundle(bench: Bench) -> Path:
    """The bundle of exactly this tree and interpreter, from the cache or made. Raises CannotMeasure."""
    digest = hashlib.sha256(sys.version.encode() + sys.base_prefix.encode())
    parts = (ROOT / "executor", ROOT / "images" / "bundle", ROOT / "requirements" / "run.txt")
    for part in parts:
        for file in sorted(part.rglob("*") if part.is_dir() else [part]):
            if file.suffix in (".py", ".c", ".txt"):
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    cache = cache_directory()
    where = cache / f"bundle-{digest.hexdigest()[:16]}"
    with (cache / "bundle.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (where / "complete").exists():
            bench.say("bundle: making it, which takes half a minute (once for each state of this tree)")
            for older in sorted(cache.glob("bundle-*/"), key=lambda path: path.stat().st_mtime)[: -KEEP_BUNDLES + 1]:
                shutil.rmtree(older, ignore_errors=True)  # the newer ones may be another run's
            try:
                made = subprocess.run(
                    [sys.executable, "-m", "images.bundle.build", "--out", str(where)],
                    cwd=ROOT, capture_output=True, text=True, timeout=BUILD_SEC, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired as why:
                raise CannotMeasure(f"the bundle was not made within {BUILD_SEC:.0f} s") from why
            if made.returncode:
                raise CannotMeasure(f"the bundle could not be made: {made.stderr.strip()[-600:]}")
            (where / "complete").touch()
    return where / LAUNCHER
