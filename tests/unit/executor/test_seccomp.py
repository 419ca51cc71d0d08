"""The commands' system call filter, run by a small interpreter of its instructions."""

from __future__ import annotations

import struct

import pytest

from executor import seccomp

X86_64, AARCH64, I386 = 0xC000003E, 0xC00000B7, 0x40000003
ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS, EAFNOSUPPORT = 0x00050001, 0x00050026, 0x00050061

MACHINES = {"x86_64": X86_64, "aarch64": AARCH64}
# name -> (x86_64, aarch64), from the kernel's tables, apart from the ones in the source
CALLS = {
    "read": (0, 63), "socket": (41, 198), "clone": (56, 220), "clone3": (435, 435), "ioctl": (16, 29),
    "ptrace": (101, 117), "personality": (135, 92), "setuid": (105, 146), "prctl": (157, 167), "kill": (62, 129),
    "pidfd_open": (434, 434), "epoll_pwait": (281, 22), "memfd_create": (319, 279), "execve": (59, 221),
    "chown": (92, 55), "mount": (165, 40), "unshare": (272, 97), "bpf": (321, 280), "io_uring_setup": (425, 425),
    "keyctl": (250, 219), "setns": (308, 268),
}  # fmt: skip
NEEDED = ("read", "ptrace", "setuid", "prctl", "pidfd_open", "epoll_pwait", "memfd_create", "execve", "kill", "chown")


def decide(machine: str, number: int, *args: int, arch: int | None = None) -> int:
    """What the filter answers to one system call."""
    return walk(machine, number, *args, arch=arch)[0]


def walk(machine: str, number: int, *args: int, arch: int | None = None) -> tuple[int, int]:
    """The same, and after how many instructions."""
    words = [0] * 6
    words[: len(args)] = args
    data = struct.pack("<IIQ6Q", number, MACHINES[machine] if arch is None else arch, 0, *words)
    code = [struct.unpack("<HBBI", raw) for raw in _pieces(seccomp.program(machine), 8)]
    accumulator, at, steps = 0, 0, 0
    while True:
        steps += 1
        kind, yes, no, value = code[at]
        at += 1
        if kind == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif kind == 0x45:
            at += yes if accumulator & value else no
        elif kind == 0x15:
            at += yes if accumulator == value else no
        elif kind == 0x35:
            at += yes if accumulator >= value else no
        elif kind == 0x06:
            return int(value), steps
        else:
            raise AssertionError(f"instruction {kind:#x}")


def _pieces(data: bytes, size: int) -> list[bytes]:
    assert len(data) % size == 0
    return [data[at : at + size] for at in range(0, len(data), size)]


def call(machine: str, name: str, *args: int) -> int:
    return decide(machine, CALLS[name][list(MACHINES).index(machine)], *args)


@pytest.fixture(params=list(MACHINES))
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("name", NEEDED)
def test_what_the_executor_and_its_commands_need_is_allowed(machine: str, name: str) -> None:
    assert call(machine, name) == ALLOW


@pytest.mark.parametrize("name", ["mount", "bpf", "io_uring_setup", "keyctl", "setns"])
def test_what_escapes_are_made_of_is_refused(machine: str, name: str) -> None:
    assert call(machine, name) == EPERM


def test_every_call_of_the_table_is_refused(machine: str) -> None:
    refused = seccomp.refused_calls(machine)
    assert len(refused) > 40
    assert {decide(machine, number) for number in refused.values()} == {EPERM}


@pytest.mark.parametrize("flag", [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000])
def test_clone_makes_threads_and_processes_but_no_namespaces(machine: str, flag: int) -> None:
    thread = 0x3D0F00  # what pthread_create asks for
    assert call(machine, "clone", thread) == ALLOW
    assert call(machine, "clone", 17) == ALLOW
    assert call(machine, "clone", flag | 17) == EPERM
    assert call(machine, "clone3") == ENOSYS


@pytest.mark.parametrize("flag", [0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000])
def test_unshare_parts_threads_and_makes_no_namespaces(machine: str, flag: int) -> None:
    assert call(machine, "unshare", 0x200) == ALLOW  # CLONE_FS
    assert call(machine, "unshare", flag | 0x200) == EPERM


@pytest.mark.parametrize(("family", "answer"), [
    (1, ALLOW), (2, ALLOW), (10, ALLOW), (16, ALLOW), (38, EAFNOSUPPORT), (40, EAFNOSUPPORT), (17, EAFNOSUPPORT),
    (0, EAFNOSUPPORT), (2 | 1 << 32, ALLOW),
])  # fmt: skip
def test_sockets_are_of_the_internet_unix_or_netlink(machine: str, family: int, answer: int) -> None:
    assert call(machine, "socket", family) == answer


def test_nothing_types_into_a_terminal(machine: str) -> None:
    assert call(machine, "ioctl", 0, 0x5412) == EPERM
    assert call(machine, "ioctl", 0, 0x541C) == EPERM
    assert call(machine, "ioctl", 0, 0x5401) == ALLOW


def test_a_debugger_may_switch_off_address_randomisation_and_nothing_odder(machine: str) -> None:
    assert call(machine, "personality", 0xFFFFFFFF) == ALLOW
    assert call(machine, "personality", 0x0040000) == ALLOW
    assert call(machine, "personality", 0x0400000) == EPERM


def test_a_foreign_instruction_set_is_killed(machine: str) -> None:
    assert decide(machine, 0, arch=I386) == KILL


def test_x32_calls_are_killed() -> None:
    assert decide("x86_64", 0x40000000 | 59) == KILL


def test_no_call_is_slow_to_decide(machine: str) -> None:
    steps = [walk(machine, number)[1] for number in range(600)]
    assert max(steps) < 20
    assert sum(steps) / len(steps) < 12
    assert len(seccomp.program(machine)) // 8 < 256


def test_every_other_call_is_allowed(machine: str) -> None:
    others = set(range(600)) - set(seccomp.refused_calls(machine).values())
    asked = {CALLS[name][list(MACHINES).index(machine)] for name in ("socket", "clone3", "personality")}
    assert {decide(machine, number) for number in others - asked} == {ALLOW}


def test_an_unknown_architecture_has_no_filter() -> None:
    assert not seccomp.supported("riscv64")
    with pytest.raises(KeyError):
        seccomp.program("riscv64")
