"""A pod's OCI bundle: the same view as under bubblewrap, and no more rights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manager.errors import IsolationUnavailable
from manager.model import Profile
from manager.providers.local import gvisor
from manager.providers.local.bwrap import KEPT_CAPABILITIES, PodSpec, SystemLayout
from manager.providers.local.capability import Capabilities
from manager.providers.local.gvisor import GvisorWay
from manager.providers.local.making import plan_for

LAYOUT = SystemLayout(
    (("/bin", "usr/bin"),), ("/usr",), (), (), root="/images/x", directories=("/etc",), empty=("/sys",)
)
WAY = GvisorWay(platform="systrap", path="/b/runsc")


def spec(**fields: Any) -> PodSpec:
    return PodSpec(
        name="pod-1", tier="split", system=LAYOUT, programs=("/venv",), etc_dir="/d/etc", run_dir="/d/run",
        state_dir="/d/state", workspace="/d/workspace", memory_bytes=1 << 30, command=("python", "-m", "executor"),
        env={"PATH": "/bin"}, **fields,
    )  # fmt: skip


def test_the_pod_sees_what_others_see_and_has_the_executors_rights_alone() -> None:
    made = gvisor.config(spec())
    mounts = {mount["destination"]: (mount["source"], mount["options"]) for mount in made["mounts"]}
    assert mounts["/usr"] == ("/images/x/usr", ["rbind", "ro", "nosuid", "nodev"])
    assert mounts["/venv"][1][1] == "ro"
    assert mounts["/etc/passwd"] == ("/d/etc/passwd", ["rbind", "ro", "nosuid", "nodev"])
    assert mounts["/workspace"] == ("/d/workspace", ["rbind", "rw", "nosuid", "nodev"])
    assert f"size={1 << 29}" in mounts["/tmp"][1]
    process = made["process"]
    assert process["capabilities"]["bounding"] == [f"CAP_{name}" for name in KEPT_CAPABILITIES]
    assert process["noNewPrivileges"] is True
    assert process["env"] == ["PATH=/bin"]
    assert made["root"]["readonly"] is True


def test_a_bounded_disk_holds_the_temporary_directories_too() -> None:
    mounts = {mount["destination"]: mount["source"] for mount in gvisor.config(spec(disk="/d/disk"))["mounts"]}
    assert (mounts["/tmp"], mounts["/var/tmp"]) == ("/d/disk/tmp", "/d/disk/var-tmp")


def test_it_joins_a_network_only_where_there_is_one(tmp_path: Path) -> None:
    joined = {"type": "network", "path": "/run/netns/x"}
    for one, kind, where in (
        (spec(), "none", {"type": "network"}), (spec(netns="/run/netns/x"), "sandbox", joined),
    ):  # fmt: skip
        argv = gvisor.argv(WAY, tmp_path, one)
        assert argv[argv.index("--network") + 1] == kind
        assert where in gvisor.config(one)["linux"]["namespaces"]
        assert "kvm" not in argv


def test_the_root_directory_holds_links_and_places_to_mount_on_alone(tmp_path: Path) -> None:
    gvisor.write_bundle(tmp_path, spec())
    root = tmp_path / "rootfs"
    assert sorted(os.listdir(root)) == ["bin", "etc", "sys"]
    assert os.readlink(root / "bin") == "usr/bin"
    assert json.loads((tmp_path / "config.json").read_text())["hostname"] == "pod-1"


def test_two_pods_of_one_name_in_two_data_directories_are_two_containers(tmp_path: Path) -> None:
    assert gvisor.container_id(tmp_path / "a" / "p1") != gvisor.container_id(tmp_path / "b" / "p1")


@pytest.mark.parametrize("way", [None, GvisorWay(platform=None, why_not="runsc is not installed")])
def test_a_profile_that_wants_it_never_gets_less(way: GvisorWay | None) -> None:
    found = Capabilities(root=True, tier="split", gvisor=way)
    with pytest.raises(IsolationUnavailable, match="gvisor"):
        plan_for(Profile(name="p", isolation="gvisor"), found, insecure=True, allow_missing_limits=True)


def test_its_own_threads_leave_room_for_the_pods() -> None:
    found = msgspec.structs.replace(Capabilities(root=True, tier=None), gvisor=WAY)
    plan = plan_for(Profile(name="p", isolation="gvisor"), found, insecure=False, allow_missing_limits=True)
    assert (plan.isolation, plan.tier) == ("gvisor", "split"), "it needs no bubblewrap"
    with pytest.raises(IsolationUnavailable, match="own threads"):
        plan_for(Profile(name="p", isolation="gvisor", pids=64), found, insecure=False, allow_missing_limits=True)
