"""The system call filter of commands, tried from real ones in both tiers: what is refused, and what goes on working."""

from __future__ import annotations

import ast
import asyncio
import errno
import os
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from executor import seccomp
from tests.support.executor_pod import (
    IS_ROOT,
    PYTHON,
    ExecutorProcess,
    Pod,
    Tier,
    connected,
    running_executor,
    until,
)
from tests.support.sessions import session_in

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not seccomp.supported(), reason="there is no filter for this machine"),
]

MACHINE = platform.machine()
NEW_USER, NEW_NET, THREAD_FILES = 0x10000000, 0x40000000, 0x200
# name -> (x86_64, aarch64, arguments, errno). Each would do nothing, or fail with another errno, without the filter.
FORBIDDEN: dict[str, tuple[int, int, tuple[int, ...], int]] = {
    "AF_ALG": (41, 198, (38, 5, 0), errno.EAFNOSUPPORT),
    "AF_VSOCK": (41, 198, (40, 1, 0), errno.EAFNOSUPPORT),
    "AF_PACKET": (41, 198, (17, 3, 0), errno.EAFNOSUPPORT),
    "userfaultfd": (323, 282, (1,), errno.EPERM),
    "io_uring_setup": (425, 425, (1, 0), errno.EPERM),
    "io_uring_enter": (426, 426, (-1, 0, 0, 0, 0, 0), errno.EPERM),
    "io_uring_register": (427, 427, (-1, 0, 0, 0), errno.EPERM),
    "bpf": (321, 280, (99, 0, 0), errno.EPERM),
    "perf_event_open": (298, 241, (0, 0, 0, 0, 0), errno.EPERM),
    "keyctl": (250, 219, (0, -3, 1), errno.EPERM),
    "add_key": (248, 217, (0, 0, 0, 0, 0), errno.EPERM),
    "request_key": (249, 218, (0, 0, 0, 0), errno.EPERM),
    "unshare a user namespace": (272, 97, (NEW_USER,), errno.EPERM),
    "unshare a network": (272, 97, (NEW_NET | THREAD_FILES,), errno.EPERM),
    "clone a user namespace": (56, 220, (NEW_USER | 17, 0, 0, 0, 0), errno.EPERM),
    "clone3": (435, 435, (0, 0), errno.ENOSYS),
    "setns": (308, 268, (-1, 0), errno.EPERM),
    "mount": (165, 40, (0, 0, 0, 0, 0), errno.EPERM),
    "umount2": (166, 39, (0, 0), errno.EPERM),
    "pivot_root": (155, 41, (0, 0), errno.EPERM),
    "chroot": (161, 51, (0,), errno.EPERM),
    "open_tree": (428, 428, (-1, 0, 0), errno.EPERM),
    "move_mount": (429, 429, (-1, 0, -1, 0, 0), errno.EPERM),
    "fsopen": (430, 430, (0, 0), errno.EPERM),
    "fsconfig": (431, 431, (-1, 0, 0, 0, 0), errno.EPERM),
    "fsmount": (432, 432, (-1, 0, 0), errno.EPERM),
    "fspick": (433, 433, (-1, 0, 0), errno.EPERM),
    "mount_setattr": (442, 442, (-1, 0, 0, 0, 0), errno.EPERM),
    "open_by_handle_at": (304, 265, (-1, 0, 0), errno.EPERM),
    "fanotify_init": (300, 262, (0, 0), errno.EPERM),
    "init_module": (175, 105, (0, 0, 0), errno.EPERM),
    "finit_module": (313, 273, (-1, 0, 0), errno.EPERM),
    "delete_module": (176, 106, (0, 0), errno.EPERM),
    "kexec_load": (246, 104, (0, 0, 0, 0), errno.EPERM),
    "kexec_file_load": (320, 294, (-1, -1, 0, 0, 0), errno.EPERM),
    "quotactl": (179, 60, (0, 0, 0, 0), errno.EPERM),
    "syslog": (103, 116, (10, 0, 0), errno.EPERM),
    "TIOCSTI": (16, 29, (0, 0x5412, 0), errno.EPERM),
    "an odd personality": (135, 92, (0x0400000,), errno.EPERM),
}
TRY = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
got = {}
for name, (number, args) in CALLS.items():
    ctypes.set_errno(0)
    result = libc.syscall(number, *(ctypes.c_long(one) for one in args))
    if result == 0 and name.startswith("clone"):
        os._exit(0)
    got[name] = 0 if result >= 0 else ctypes.get_errno()
print(got)
"""


def number_of(name: str) -> int:
    x86_64, aarch64, _, _ = FORBIDDEN[name]
    return x86_64 if MACHINE == "x86_64" else aarch64


def trying(names: Iterable[str]) -> str:
    return f"CALLS = { {name: (number_of(name), FORBIDDEN[name][2]) for name in names}!r}\n{TRY}"


async def python(pod: Pod, script: str, **fields: object) -> str:
    answer = await pod.exec([PYTHON, "-c", script], **fields)
    assert answer["exit_code"] == 0, answer
    return str(answer["stdout"])


def named(numbers: dict[str, int]) -> dict[str, str]:
    return {name: errno.errorcode.get(number, str(number)) for name, number in numbers.items()}


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_every_forbidden_call_fails_with_an_error_that_programs_know(any_tier: Pod) -> None:
    got = ast.literal_eval(await python(any_tier, trying(FORBIDDEN)))
    assert named(got) == named({name: wanted for name, (_, _, _, wanted) in FORBIDDEN.items()})


def test_without_the_filter_the_same_calls_answer_otherwise() -> None:
    """So that the test above can fail: it is the filter that refuses, not that a command has no rights."""
    probed = ("AF_VSOCK", "userfaultfd", "io_uring_setup", "bpf", "keyctl", "clone3")
    done = subprocess.run([sys.executable, "-c", trying(probed)], capture_output=True, check=True, text=True)
    bare = ast.literal_eval(done.stdout)
    assert [name for name, number in bare.items() if number != FORBIDDEN[name][3]], bare


async def test_a_shell_and_its_children_are_held_like_everything_else(any_tier: Pod) -> None:
    script = "sh -c 'unshare -Ur true'; echo $?; (setsid sh -c 'grep ^Seccomp: /proc/self/status')"
    if shutil.which("unshare") is None:
        pytest.skip("unshare(1) is not here")
    answer = await any_tier.exec(script)
    assert answer["stdout"].split() == ["1", "Seccomp:", "2"], answer
    assert "Operation not permitted" in answer["stderr"]


@pytest.mark.skipif(MACHINE != "x86_64", reason="one machine with three instruction sets")
@pytest.mark.parametrize("code", [
    "import ctypes; ctypes.CDLL(None).syscall(0x40000000 | 39)",  # x32
    "import ctypes, mmap\n"  # i386: mov eax, 20; int 0x80; ret
    "m = mmap.mmap(-1, 4096, prot=7); m.write(bytes.fromhex('b814000000cd80c3'))\n"
    "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()",
], ids=["x32", "i386"])  # fmt: skip
async def test_a_foreign_instruction_sets_call_ends_its_caller(any_tier: Pod, code: str) -> None:
    answer = await any_tier.exec([PYTHON, "-c", code])
    assert answer["signal"] in ("SIGSYS", "SIGSEGV"), answer  # SEGV: a kernel without 32-bit calls
    assert answer["stdout"] == ""
    assert (await any_tier.exec(["true"]))["exit_code"] == 0


# ── who has it: everything that is started ──────────────────────────────────────────────────────────────────────

STATUS = "grep -hE '^(Seccomp|NoNewPrivs|CapEff):' /proc/self/status | tr -d '\\t\\n '"
HELD = "CapEff:0000000000000000NoNewPrivs:1Seccomp:2"


async def test_commands_processes_sessions_and_terminals_all_have_it(any_tier: Pod) -> None:
    assert (await any_tier.exec(STATUS))["stdout"] == HELD
    id = await any_tier.start(STATUS)
    await any_tier.ended(id)
    assert (await any_tier.output(id)).body.decode() == HELD
    async with session_in(any_tier) as session:
        assert (await session.said(STATUS))[0] == HELD
    reply = await any_tier.call("POST", "/v1/terminals", {"command": f'sh -c "{STATUS} > held"'})
    assert reply.status == 201, reply.body
    held = any_tier.workspace / "held"
    await until(lambda: held.exists() and held.read_text() == HELD, "the terminal's process has said it")
    held.unlink()


def holds_filter(pod: Pod, words: str) -> Callable[[], bool]:
    """Whether a descendant of the executor with these words on its command line has become the user, and has it."""

    def look() -> bool:
        for pid in pod.process.descendants():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if words in line and f"Uid:\t{pod.user.pw_uid}\t" in status and "Seccomp:\t2" in status:
                return True
        return False

    return look


async def test_the_children_that_search_and_pack_have_it_too(any_tier: Pod) -> None:
    await any_tier.exec("printf '%s!' $(head -c 60 /dev/zero | tr '\\0' a) > evil")
    query = {"content": "(a+)+b", "regex": "true", "timeout_sec": "5"}
    searching = asyncio.create_task(any_tier.call("GET", "/v1/files/search", params=query))
    await until(holds_filter(any_tier, "search_child"), "the search runs under a filter")
    assert (await searching).status == 200
    assert (await any_tier.call("DELETE", "/v1/files?path=evil")).status in (200, 204)
    if shutil.which("zstd", path="/usr/local/bin:/usr/bin:/bin") is None:
        return
    await any_tier.exec("mkdir noise && head -c 64M /dev/urandom > noise/f")
    headers = {"Authorization": f"Bearer {any_tier.token}"}
    async with any_tier.session.get(f"{any_tier.url}/v1/archive?path=noise&format=zstd", headers=headers) as answer:
        assert answer.status == 200
        await until(holds_filter(any_tier, "zstd -cq"), "what packs runs under a filter")  # while nobody reads
    assert (await any_tier.call("DELETE", "/v1/files?path=noise&recursive=true")).status in (200, 204)


@pytest.mark.root
@pytest.mark.skipif(not IS_ROOT, reason="only root makes such files")
async def test_a_set_uid_program_gives_a_command_nothing(any_tier: Pod) -> None:
    program = any_tier.workspace / "become-root"
    shutil.copy("/usr/bin/env", program)
    os.chown(program, 0, 0)
    program.chmod(0o4755)
    try:
        uid = any_tier.user.pw_uid
        script = trying(["keyctl", "bpf", "unshare a user namespace"]) + "print(os.geteuid())"
        answer = await any_tier.exec(["./become-root", PYTHON, "-c", script])
        got, euid = answer["stdout"].splitlines()
        assert set(ast.literal_eval(got).values()) == {errno.EPERM}
        assert int(euid) == uid
    finally:
        program.unlink()


# ── what goes on working ────────────────────────────────────────────────────────────────────────────────────────


async def test_threads_and_processes_start_although_clone3_is_missing(any_tier: Pod) -> None:
    script = """
import asyncio, multiprocessing, os, subprocess, threading, socket, ctypes
done = []
threads = [threading.Thread(target=done.append, args=(n,)) for n in range(20)]
[t.start() for t in threads]; [t.join() for t in threads]
pid = os.fork() or os._exit(3)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
sub = subprocess.run(["sh", "-c", "exit 4"]).returncode
spawned = os.waitstatus_to_exitcode(os.waitpid(os.posix_spawn("/bin/sh", ["sh", "-c", "exit 5"], {}), 0)[1])
a, b = socket.socketpair(); s = socket.socket(); s6 = socket.socket(socket.AF_INET6)
socket.socket(16, socket.SOCK_RAW, 0).close()
async def main():
    child = await asyncio.create_subprocess_exec("true")
    return await child.wait()
libc = ctypes.CDLL(None, use_errno=True)
print(len(done), code, sub, spawned, asyncio.run(main()), libc.unshare(0x200))
"""
    assert await python(any_tier, script) == "20 3 4 5 0 0\n"


PROGRAMS = {
    "strace": "strace -f -o trace true && grep -q execve trace && echo ok",
    "gdb": "gdb -q -batch -ex run -ex 'print 6*7' -ex quit --args true 2>/dev/null | grep -q '= 42' && echo ok",
    "node": "node -e 'new (require(\"worker_threads\").Worker)(\"console.log(\\\"ok\\\")\", {eval: true})'",
    "java": "echo 'class A { public static void main(String[] a) throws Exception { Thread t = new Thread(() -> "
            "System.out.println(\"ok\")); t.start(); t.join(); } }' > A.java && java A.java",
    "make": "printf 'all: a b\\n\\t@echo ok\\na b:\\n\\t@true\\n' | make -j4 -f -",
    "git": "git init -q r && cd r && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m x && git gc -q "
           "&& echo ok",
    "tar": "mkdir -p t && touch t/a && tar czf t.tgz t && rm -r t && tar xzf t.tgz && ls t/a >/dev/null && echo ok",
    "gcc": "echo 'int main(void){return 0;}' > m.c && gcc m.c -o m && ./m && echo ok",
    "bash": "coproc cat; echo ok >&\"${COPROC[1]}\"; read -r l <&\"${COPROC[0]}\"; echo $l",
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
async def test_what_people_run_goes_on_working(any_tier: Pod, program: str) -> None:
    if shutil.which(program, path="/usr/local/bin:/usr/bin:/bin") is None:
        pytest.skip(f"{program} is not here")
    name = f"try-{program}"
    command = f"mkdir {name} && cd {name} && export HOME=$PWD TMPDIR=$PWD && {PROGRAMS[program]}"
    answer = await any_tier.exec(["bash", "-c", command], timeout_sec=90)
    assert answer["stdout"].split()[-1:] == ["ok"], answer
    await any_tier.exec(["rm", "-rf", name])


# ── a kernel that takes no filter ───────────────────────────────────────────────────────────────────────────────


def no_filters() -> tuple[str, ...]:
    """Runs the rest of its arguments where seccomp(2) and prctl(PR_SET_SECCOMP) fail, as in a kernel without it."""
    seccomp_call, prctl = (317, 157) if MACHINE == "x86_64" else (277, 167)
    steps = [(0x20, 0, 0, 0), (0x15, 3, 0, seccomp_call), (0x15, 0, 3, prctl), (0x20, 0, 0, 16), (0x15, 0, 1, 22),
             (0x06, 0, 0, 0x00050000 | errno.EINVAL), (0x06, 0, 0, 0x7FFF0000)]  # fmt: skip
    code = b"".join(struct.pack("<HBBI", *step) for step in steps)
    script = f"""
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
steps = ctypes.create_string_buffer({code!r}, {len(code)})
libc.prctl(38, 1, 0, 0, 0)
if libc.prctl(22, 2, struct.pack("HP", {len(steps)}, ctypes.addressof(steps)), 0, 0):
    sys.exit("no filter to try this with")
os.execv(sys.argv[1], sys.argv[1:])
"""
    return (sys.executable, "-c", script)


async def test_where_the_kernel_takes_no_filter_the_log_says_so_and_commands_run(
    fresh_executor: Callable[..., AbstractContextManager[ExecutorProcess]],
) -> None:
    tier: Tier = "split" if IS_ROOT else "single"
    with fresh_executor(tier, prefix=no_filters()) as process:
        async with connected(process) as pod:
            assert (await pod.exec("echo runs"))["stdout"] == "runs\n"
        missing = [line for line in process.log_text().splitlines() if "protection_missing" in line]
    assert len(missing) == 1
    assert '"what": "seccomp"' in missing[0]
    with running_executor(tier) as process:
        assert "protection_missing" not in process.log_text()
