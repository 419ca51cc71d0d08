"""The distributions as they are installed, and the locks they are installed from."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

import executor
import manager

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


def test_the_installed_executor_is_ours() -> None:
    # PyPI has another package of that name; both in one environment would break each other in silence
    assert Path(executor.__file__ or "").parent == ROOT / "executor"
    assert Path(manager.__file__ or "").parent == ROOT / "manager"
    scripts = {entry.name: entry.value for entry in distribution("sojourn-server").entry_points}
    assert scripts["sojourn-executor"] == "executor.__main__:main"


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_a_lock_pins_every_package_with_hashes_and_names_no_address(lock: Path) -> None:
    text = lock.read_text()
    assert "://" not in text
    assert not re.search(r"^-", text, re.MULTILINE), "no options: no index, no links, no editable"
    entries = re.split(r"^(?=\S)", text, flags=re.MULTILINE)[1:]
    assert len(entries) > 20
    for entry in entries:
        assert re.match(r"[a-z0-9][a-z0-9._-]*==\S+", entry), entry[:60]
        assert "--hash=sha256:" in entry, entry[:60]


def _pinned(name: str) -> dict[str, str]:
    found = re.findall(r"^([a-z0-9._-]+)==(\S+)", (ROOT / "requirements" / name).read_text(), re.MULTILINE)
    return dict(found)


def test_what_is_tested_is_what_runs() -> None:
    run, dev = _pinned("run.txt"), _pinned("dev.txt")
    assert {name: version for name, version in dev.items() if name in run} == run


def test_every_dependency_is_locked() -> None:
    server = tomllib.loads((ROOT / "pyproject.toml").read_text())
    client = tomllib.loads((ROOT / "sdk" / "pyproject.toml").read_text())
    extras = server["project"]["optional-dependencies"]
    wanted = [
        *server["project"]["dependencies"],
        *(name for extra in extras.values() for name in extra),
        *client["project"]["dependencies"],
        *server["dependency-groups"]["build"],
    ]
    names = {re.split(r"[<>=\[; ]", requirement)[0].lower() for requirement in wanted}
    assert names <= set(_pinned("run.txt"))
    development = {name for name in server["dependency-groups"]["dev"] if isinstance(name, str)}
    assert development <= set(_pinned("dev.txt"))
