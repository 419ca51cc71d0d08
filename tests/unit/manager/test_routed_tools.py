"""What the tools that make a pod's network say, and what is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from manager.errors import IsolationUnavailable
from manager.providers.local import routed


def says(directory: Path, words: str) -> None:
    tool = directory / "ip"
    tool.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 2\n")
    tool.chmod(0o755)


@pytest.mark.parametrize(
    "words",
    [
        "Cannot find device sj-a",
        "RTNETLINK answers: No such device",  # it went between its name's look-up and its removal
        'Cannot remove namespace file "/run/netns/sj-a": No such file or directory',
    ],
)
def test_what_another_has_just_removed_is_gone_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    says(tmp_path, words)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert routed._run(["ip", "link", "del", "sj-a"], missing_ok=True) == b""
    with pytest.raises(IsolationUnavailable, match="ip link del sj-a"):
        routed._run(["ip", "link", "del", "sj-a"])


def test_any_other_word_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says(tmp_path, "RTNETLINK answers: Operation not permitted")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(IsolationUnavailable, match="not permitted"):
        routed._run(["ip", "link", "del", "sj-a"], missing_ok=True)
