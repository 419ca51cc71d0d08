"""Where there is no cluster to test on, the tests say so, and what helps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def pytest_without_a_cluster(cache: Path, *, required: bool) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("KUBECONFIG", "SOJOURN_REQUIRE_CLUSTER")}
    env = kept | {"XDG_CACHE_HOME": str(cache)} | ({"SOJOURN_REQUIRE_CLUSTER": "1"} if required else {})
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/cluster/test_control_plane.py"]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)


def test_without_a_cluster_the_tests_are_skipped_with_a_line_that_says_how_to_get_one(tmp_path: Path) -> None:
    done = pytest_without_a_cluster(tmp_path, required=False)
    assert done.returncode == 0, done.stdout
    told = [line for line in done.stdout.splitlines() if "NO KUBERNETES CLUSTER TO TEST ON" in line]
    assert len(told) == 1
    assert "KUBECONFIG" in told[0]
    assert "make test-cluster" in told[0]


def test_a_build_server_fails_without_a_cluster(tmp_path: Path) -> None:
    done = pytest_without_a_cluster(tmp_path, required=True)
    assert done.returncode == 1, done.stdout
    assert "NO KUBERNETES CLUSTER TO TEST ON" in done.stdout


def test_without_go_the_build_says_what_helps(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("KUBECONFIG", "SOJOURN_REQUIRE_CLUSTER")}
    env = kept | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.cluster.tools"]
    for required, code in ((False, 0), (True, 1)):
        more = {"SOJOURN_REQUIRE_CLUSTER": "1"} if required else {}
        done = subprocess.run(
            command, cwd=ROOT, env=env | more, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == code, done.stderr
        assert "Go is not installed" in done.stderr
        assert "KUBECONFIG" in done.stderr


FAILS_ONCE = """#!/bin/sh
# go list -deps ... ; go build ... -o DIRECTORY PACKAGE...
[ "$1" = list ] && { echo some/package; exit 0; }
echo some/package >&2
failed="$XDG_CACHE_HOME/failed"
[ -e "$failed" ] || { touch "$failed"; echo "some/package: the line was cut" >&2; exit 1; }
while [ "$1" != -o ]; do shift; done
for name in server kube-apiserver kube-controller-manager kube-scheduler helm; do
    printf '#!/bin/sh\\n' >"$2/$name"; chmod +x "$2/$name"
done
"""


def test_a_build_that_fails_says_why_and_is_tried_once_more(tmp_path: Path) -> None:
    (tmp_path / "go").write_text(FAILS_ONCE)
    (tmp_path / "go").chmod(0o755)
    cache = tmp_path / "sojourn" / "cluster-tools"
    for left in ("building-of-a-killed-run", "long-ago"):
        (cache / left).mkdir(parents=True)
        os.utime(cache / left, (0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("KUBECONFIG", "SOJOURN_REAL_NODE")}
    env = kept | {"XDG_CACHE_HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "tests.support.cluster.tools"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "some/package: the line was cut" in done.stderr
    (made,) = [path for path in cache.iterdir() if path.is_dir()]
    assert sorted(path.name for path in made.iterdir()) == [
        "etcd", "helm", "kube-apiserver", "kube-controller-manager", "kube-scheduler",
    ]  # fmt: skip
    again = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert again.returncode == 0
    assert "building" not in again.stderr
