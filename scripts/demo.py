"""An agent's session against a fresh stack: it writes a program, breaks, reads the traceback, mends it, installs a
package, runs tests, looks at what it uses - and another task sees none of it. Ends the stack; exit code 0 if all held.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sojourn import Client, ExecResult, Exit, Output, Task
from sojourn.errors import SojournError

START_SEC = 120.0
END_SEC = 30.0

PROGRAM = """\
import sys


def average(numbers):
    return sum(numbers) / len(numbrs)


print("average:", average([float(word) for word in sys.argv[1:]]))
"""

TESTS = """\
import unittest

from wordcraft import shout
from average import average


class Averages(unittest.TestCase):
    def test_of_some_numbers(self):
        self.assertEqual(average([1, 2, 3, 4]), 2.5)

    def test_of_one(self):
        self.assertEqual(average([7]), 7)


class Package(unittest.TestCase):
    def test_the_uploaded_package_works(self):
        self.assertEqual(shout("done"), "DONE!")


unittest.main(verbosity=2)
"""


class DemoFailed(Exception):
    """Something did not go as the story has it."""


# ── telling it ──────────────────────────────────────────────────────────────────────────────────────────────────

COLOUR = sys.stdout.isatty() and "NO_COLOR" not in os.environ


def chapter(text: str) -> None:
    print(f"\n\033[1m── {text}\033[0m" if COLOUR else f"\n── {text}", flush=True)


def show(text: str) -> None:
    if text:
        print(textwrap.indent(text.rstrip("\n"), "   │ ", lambda line: True), flush=True)


def run(task: Task, command: str | list[str], *, expect: int = 0, **options: str) -> ExecResult:
    """Runs, shows and returns it. Raises DemoFailed where the exit code is another."""
    words = command if isinstance(command, str) else " ".join(command)
    env = {"PYTHONPATH": options["pythonpath"]} if "pythonpath" in options else None
    print(f"   $ {words}", flush=True)
    result = task.exec(command, env=env, timeout_sec=60)
    show(result.stdout + result.stderr)
    where = f", {result.where.provisioned} sandbox" if result.where.provisioned != "bound" else ""
    print(f"   exit code {result.exit_code} after {result.duration_ms:.0f} ms{where}", flush=True)
    if result.exit_code != expect:
        raise DemoFailed(f"{words!r} exited with {result.exit_code}, expected {expect}")
    return result


def must(holds: bool, what: str) -> None:
    if not holds:
        raise DemoFailed(what)


# ── the stack ───────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def fresh_stack() -> Iterator[Path]:
    """A stack with a data directory of its own, which is gone afterwards. Ctrl-C's signal ends it, as for `make up`."""
    data_dir = Path(tempfile.mkdtemp(prefix="sojourn-demo-"))
    log = data_dir / "up.log"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SOJOURN_", "SANDBOX_"))}
    env["SOJOURN_METRICS_PORT"] = "off"
    with log.open("wb") as output:
        # In a session of its own: Ctrl-C here must reach the stack once, through us, after the client has let go.
        stack = subprocess.Popen(
            [sys.executable, "-m", "manager", "up", "--port", "0", "--data-dir", str(data_dir)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    try:
        _wait_until_ready(stack, data_dir)
        yield data_dir
    except BaseException:
        if stack.poll() is not None:
            print(f"\nthe stack ended by itself with {stack.returncode}; it said:", file=sys.stderr)
            print(log.read_text(errors="replace"), file=sys.stderr)
        raise
    finally:
        if stack.poll() is None:
            stack.send_signal(signal.SIGINT)
        try:
            stack.wait(END_SEC)
        except subprocess.TimeoutExpired:
            stack.kill()
            stack.wait()
        shutil.rmtree(data_dir, ignore_errors=True)


def _wait_until_ready(stack: subprocess.Popen[bytes], data_dir: Path) -> None:
    deadline = time.monotonic() + START_SEC
    while not ((data_dir / "address").exists() and (data_dir / "api-key").exists()):
        if stack.poll() is not None:
            raise DemoFailed("the stack did not start")
        if time.monotonic() > deadline:
            raise DemoFailed(f"the stack did not start within {START_SEC:.0f} s")
        time.sleep(0.05)


# ── the package that the agent uploads ──────────────────────────────────────────────────────────────────────────


def wheel() -> tuple[str, bytes]:
    """The file name and bytes of a pure Python wheel with one function, made here without any tool."""
    info = "wordcraft-1.0.dist-info"
    files = {
        "wordcraft.py": 'def shout(text):\n    return text.upper() + "!"\n',
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: wordcraft\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: sojourn-demo\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(text.encode())}\n"
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return "wordcraft-1.0-py3-none-any.whl", packed.getvalue()


# ── the session ─────────────────────────────────────────────────────────────────────────────────────────────────


def session(client: Client) -> None:
    agent = client.task("demo-agent")

    chapter("The agent writes a program and runs it")
    agent.files.write("average.py", PROGRAM)
    broken = run(agent, ["python3", "average.py", "3", "4", "8"], expect=1)

    chapter("It reads the traceback and mends the line")
    last = broken.stderr.strip().splitlines()[-1]
    print(f"   the last line says: {last}")
    must("NameError" in last and "numbrs" in last, "the traceback did not arrive")
    source = agent.files.read_text("average.py")
    main = 'if __name__ == "__main__":\n    print('
    agent.files.write("average.py", source.replace("numbrs", "numbers").replace("print(", main))
    mended = run(agent, ["python3", "average.py", "3", "4", "8"])
    must(mended.stdout == "average: 5.0\n", "the mended program does not work")

    chapter("It uploads a wheel and installs it, without any network")
    name, content = wheel()
    agent.files.write(name, content)
    print(f"   uploaded {name}, {len(content)} bytes")
    if agent.exec(["python3", "-m", "pip", "--version"]).ok:
        run(agent, f"python3 -m pip install --quiet --no-index --no-deps --no-compile --target site {name}")
    else:
        print("   there is no pip in this sandbox; a pure wheel only has to be unpacked")
        run(agent, ["python3", "-m", "zipfile", "-e", name, "site"])

    chapter("It runs the tests and watches them")
    agent.files.write("test_average.py", TESTS)
    print("   $ python3 test_average.py", flush=True)
    ending: Exit | None = None
    waiting = b""
    with agent.stream(["python3", "-u", "test_average.py"], env={"PYTHONPATH": "site"}, timeout_sec=60) as events:
        for event in events:
            if isinstance(event, Output):
                whole, _, waiting = (waiting + event.data).rpartition(b"\n")
                show(whole.decode())
            elif isinstance(event, Exit):
                ending = event
    must(ending is not None and ending.exit_code == 0, "the tests failed")
    print("   exit code 0")

    chapter("It looks at what its sandbox uses")
    usage = agent.usage()
    limit = f"{usage.memory.limit_bytes >> 20} MiB" if usage.memory.limit_bytes else "no limit"
    print(f"   memory     {usage.memory.working_set_bytes / (1 << 20):.1f} MiB of {limit} ({usage.memory.source})")
    cores = f"{usage.cpu.limit_cores:g}" if usage.cpu.limit_cores is not None else f"all {usage.cpu.cores}"
    print(f"   cpu        {usage.cpu.usage_ms / 1000:.2f} s used so far, {cores} cores allowed")
    print(f"   processes  {usage.pids.current} of {usage.pids.limit or 'no limit'}")
    must(usage.memory.working_set_bytes > 0 and usage.pids.current > 0, "the figures are empty")

    chapter("A second task sees none of it")
    agent.files.write("/tmp/secret", "of the first task")
    background = agent.start(["sleep", "600"], env={"MARK": "first"})
    other = client.task("another-agent")
    listing = run(other, "ls -A . /tmp; grep -lsz 'slee[p]' /proc/[0-9]*/cmdline; true")
    must("average.py" not in listing.stdout and "secret" not in listing.stdout, "a file is visible in another task")
    must(not other.files.list("."), "the second workspace is not empty")
    must("/cmdline" not in listing.stdout, "a process is visible in another task")
    theirs, ours = other.info(), agent.info()
    must(theirs.pod_id != ours.pod_id, "two tasks share a pod")
    print("   no files, no processes, another pod")
    background.kill()
    print(f"   the first task's background process ended: {background.wait(30).signal}")

    chapter("Both tasks are retired")
    agent.delete()
    other.delete()
    print(f"   the project's sandboxes now: {[box.task_id for box in client.sandboxes() if box.stage != 'reclaimed']}")


def main() -> int:
    began = time.monotonic()
    chapter("A fresh stack starts")
    try:
        with fresh_stack() as data_dir:
            address = (data_dir / "address").read_text().strip()
            key = (data_dir / "api-key").read_text().strip()
            print(f"   {address} answers after {time.monotonic() - began:.1f} s")
            with Client(address, key) as client:
                session(client)
            chapter("The stack ends and leaves nothing behind")
    except (DemoFailed, SojournError) as why:
        print(f"\ndemo failed: {why}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the stack is ended", file=sys.stderr)
        return 130
    print(f"   all of it took {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
