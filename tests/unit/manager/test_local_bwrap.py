"""From a pod's description to bubblewrap's arguments."""

from __future__ import annotations

from pathlib import Path

from manager.providers.local.bwrap import (
    KEPT_CAPABILITIES,
    PodSpec,
    SystemLayout,
    Tier,
    arguments,
    etc_files,
    host_name,
    read_system,
)
from manager.providers.local.cgroups import PodCgroup

LAYOUT = SystemLayout((("/bin", "usr/bin"),), ("/usr", "/etc/localtime"), ("/proc/keys",), ("/proc/sys",))


def spec_for(tier: Tier, cgroups: tuple[PodCgroup, ...] = ()) -> PodSpec:
    return PodSpec(
        name="pod-1", tier=tier, system=LAYOUT, programs=("/home/me/venv", "/opt/python"), etc_dir="/d/etc",
        run_dir="/d/run", state_dir="/d/state", workspace="/d/workspace", cgroups=cgroups, memory_bytes=1 << 30,
        command=("/home/me/venv/bin/python", "-I", "-m", "executor"),
    )  # fmt: skip


def pairs(args: list[str], option: str) -> list[tuple[str, str]]:
    return [(args[at + 1], args[at + 2]) for at, word in enumerate(args) if word == option]


def test_every_namespace_is_the_pods_own_and_no_network_is_shared() -> None:
    for tier in ("split", "single"):
        args = arguments(spec_for(tier))
        assert {"--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--unshare-cgroup-try"} <= set(args)
        assert "--share-net" not in args


def test_a_pod_outlives_its_manager_and_its_executor_is_the_first_process() -> None:
    args = arguments(spec_for("split"))
    assert "--die-with-parent" not in args
    assert {"--as-pid-1", "--new-session"} <= set(args)
    assert args[args.index("--") + 1 :] == ["/home/me/venv/bin/python", "-I", "-m", "executor"]


def test_root_keeps_six_capabilities_and_makes_no_user_namespace() -> None:
    args = arguments(spec_for("split"))
    assert [args[at + 1] for at, word in enumerate(args) if word == "--cap-add"] == [
        f"CAP_{name}" for name in KEPT_CAPABILITIES
    ]
    assert args[args.index("--cap-drop") + 1] == "ALL"
    assert "--unshare-user" not in args


def test_an_unprivileged_user_gets_a_user_namespace_and_no_capability() -> None:
    args = arguments(spec_for("single"))
    assert args[args.index("--unshare-user") :][:5] == ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    assert "--cap-add" not in args


def test_only_the_pods_own_directories_can_be_written() -> None:
    args = arguments(spec_for("split"))
    assert pairs(args, "--bind") == [
        ("/d/run", "/run/sojourn"), ("/d/state", "/var/lib/sojourn"), ("/d/workspace", "/workspace"),
    ]  # fmt: skip
    assert "--dev-bind" not in args
    assert args[args.index("--chdir") - 2 :][:2] == ["--remount-ro", "/"]


def test_a_private_directory_is_entered_by_a_path_that_the_command_user_can_pass() -> None:
    args = arguments(spec_for("split"))
    at = args.index("/home/me/venv") - 1
    assert args[at] == "--ro-bind"
    made = [args[index + 1] for index, word in enumerate(args[:at]) if word == "--dir" and args[index - 1] == "0755"]
    assert {"/home", "/home/me"} <= set(made)


def test_the_pods_temporary_files_leave_room_in_its_memory() -> None:
    args = arguments(spec_for("split"))
    sizes = [int(args[at + 1]) for at, word in enumerate(args) if word == "--size"]
    assert len(sizes) == 4
    assert sum(sizes) <= (1 << 30) * 3 // 4


def test_cgroups_are_seen_where_programs_look_for_them() -> None:
    v1 = (PodCgroup(1, "/c/cpu,cpuacct/p", ("cpu", "cpuacct")), PodCgroup(2, "/c/unified/p", ()))
    found = pairs(arguments(spec_for("split", v1)), "--ro-bind")
    assert ("/c/cpu,cpuacct/p", "/sys/fs/cgroup/cpu") in found
    assert ("/c/cpu,cpuacct/p", "/sys/fs/cgroup/cpuacct") in found
    assert ("/c/unified/p", "/sys/fs/cgroup/unified") in found
    v2 = (PodCgroup(2, "/c/p", ("memory", "cpu", "pids")),)
    assert ("/c/p", "/sys/fs/cgroup") in pairs(arguments(spec_for("split", v2)), "--ro-bind")


def test_the_executor_may_divide_what_is_below_the_pod_s_limits_and_only_where_commands_are_another_user() -> None:
    groups = (
        PodCgroup(1, "/c/cpu/p", ("cpu",)), PodCgroup(1, "/c/memory/p", ("memory",)), PodCgroup(2, "/c/unified/p", ()),
    )  # fmt: skip
    writable = pairs(arguments(spec_for("split", groups)), "--bind")
    assert ("/c/memory/p/inner", "/sys/fs/cgroup/memory/inner") in writable
    assert ("/c/unified/p/inner", "/sys/fs/cgroup/unified/inner") in writable
    assert not any(path.startswith("/c/cpu") or path in ("/c/memory/p", "/c/unified/p") for path, _ in writable)
    assert not any("/c/" in path for path, _ in pairs(arguments(spec_for("single", groups)), "--bind"))


def test_nothing_secret_of_etc_is_bound(tmp_path: Path) -> None:
    for name in ("shadow", "sudoers", "machine-id", "passwd", "localtime"):
        (tmp_path / "etc").mkdir(exist_ok=True)
        (tmp_path / "etc" / name).touch()
    for name in ("ssh", "ssl/private", "ssl/certs", "cron.d"):
        (tmp_path / "etc" / name).mkdir(parents=True)
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "lib64").mkdir()
    layout = read_system(str(tmp_path))
    assert set(layout.binds) == {"/usr", "/lib64", "/etc/localtime", "/etc/ssl/certs"}
    assert layout.links == (("/bin", "usr/bin"), ("/etc/mtab", "../proc/self/mounts"), ("/var/run", "../run"))


def test_the_command_user_is_the_first_of_the_profiles_users() -> None:
    passwd = etc_files("pod-1", ["sandbox", "other"])["passwd"].splitlines()
    assert "sandbox:x:1000:1000::/workspace:/bin/sh" in passwd
    assert "other:x:1001:1001::/workspace:/bin/sh" in passwd
    assert sum(line.split(":")[2] == "0" for line in passwd) == 1


def test_a_host_name_is_the_start_of_the_pods_name() -> None:
    assert host_name("abcdefghijklmno-pq") == "abcdefghijklmno"
    assert host_name("p") == "p"
