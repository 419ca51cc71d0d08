"""`sojourn cp`, and the client's calls for directories, searching, modes and watching, against a whole stack."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from threading import Thread

import pytest

from sojourn.errors import InvalidPath, InvalidRequest
from sojourn.types import FileChange
from tests.integration.cli.conftest import Sojourn
from tests.support.user_stack import Stack


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What FI11 wants kept."""
    base = tmp_path / "tree"
    (base / "sub/empty").mkdir(parents=True)
    (base / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (base / "run.sh").chmod(0o755)
    (base / "secret").write_text("s")
    (base / "secret").chmod(0o600)
    (base / "sub/link").symlink_to("../run.sh")
    (base / "dangling").symlink_to("nowhere")
    (base / "sub/é %20+").write_bytes(os.urandom(300_000))
    return base


def facts(base: Path) -> dict[str, tuple[int, str | bytes | None]]:
    found: dict[str, tuple[int, str | bytes | None]] = {}
    for path in base.rglob("*"):
        mode = path.lstat().st_mode
        content = os.readlink(path) if stat.S_ISLNK(mode) else path.read_bytes() if stat.S_ISREG(mode) else None
        found[str(path.relative_to(base))] = (stat.S_IMODE(mode), content)
    return found


def test_a_directory_goes_in_and_comes_out_as_it_was(sojourn: Sojourn, task: str, tree: Path, tmp_path: Path) -> None:
    done = sojourn("cp", str(tree), f"{task}:")  # into the workspace of a sandbox that is made for it
    assert (done.returncode, done.stderr) == (0, b"")
    assert sojourn("exec", task, "--", "tree/run.sh").stdout == b"ran\n"
    assert sojourn("cp", f"{task}:tree", str(tmp_path / "back")).returncode == 0
    assert facts(tmp_path / "back") == facts(tree)
    (tmp_path / "into").mkdir()
    part = sojourn("cp", f"{task}:tree/sub", str(tmp_path / "into"))
    assert b"not copied: link: leads out" in part.stderr  # of `sub`, though not of `tree`
    assert facts(tmp_path / "into/sub") == {name: fact for name, fact in facts(tree / "sub").items() if name != "link"}
    assert sojourn("cp", f"{tree}/.", f"{task}:flat").returncode == 0
    assert sojourn("cp", f"{tree}/.", f"{task}:flat").returncode == 0  # again, into what is there
    assert sojourn("exec", task, "--", "diff -r --no-dereference flat tree && ls flat/tree").returncode == 2
    assert sojourn("cp", f"{task}:.", str(tmp_path / "all")).returncode == 0
    assert sorted(os.listdir(tmp_path / "all")) == ["flat", "tree"]


def test_files_keep_their_modes_and_go_into_directories(
    sojourn: Sojourn, task: str, tree: Path, tmp_path: Path
) -> None:
    assert sojourn("cp", str(tree / "run.sh"), f"{task}:").returncode == 0
    assert sojourn("cp", str(tree / "run.sh"), f"{task}:bin/other").returncode == 0
    assert sojourn("cp", str(tree / "secret"), f"{task}:bin/").returncode == 0
    assert sojourn("exec", task, "--", "./run.sh && bin/other && stat -c %a bin/secret").stdout == b"ran\nran\n600\n"
    assert sojourn("cp", f"{task}:run.sh", str(tmp_path)).returncode == 0
    assert sojourn("cp", f"{task}:bin/secret", str(tmp_path / "named")).returncode == 0
    assert stat.S_IMODE((tmp_path / "run.sh").stat().st_mode) == 0o755
    assert ((tmp_path / "named").read_text(), stat.S_IMODE((tmp_path / "named").stat().st_mode)) == ("s", 0o600)
    assert sorted(os.listdir(tmp_path)) == ["named", "run.sh", "tree"]


def test_what_is_left_out_is_named_and_can_be_left_unsaid(
    sojourn: Sojourn, task: str, tree: Path, tmp_path: Path
) -> None:
    (tree / "out").symlink_to("/etc/passwd")
    os.mkfifo(tree / "fifo")
    done = sojourn("cp", str(tree), f"{task}:t")
    assert done.returncode == 0
    assert sorted(done.stderr.decode().splitlines()) == [
        "sojourn: not copied: fifo: has no content", "sojourn: not copied: out: leads out of the directory",
    ]  # fmt: skip
    assert sojourn("cp", "-q", str(tree), f"{task}:t2").stderr == b""
    sojourn("exec", task, "--", "ln -s /etc/passwd t/evil")
    done = sojourn("cp", f"{task}:t", str(tmp_path / "back"))
    assert done.stderr == b"sojourn: not copied: evil: leads out of the directory\n"
    assert not os.path.lexists(tmp_path / "back/evil")


@pytest.mark.parametrize(
    ("words", "said"),
    [(("a", "b"), b"must be TASK:PATH"), (("x:a", "y:b"), b"must be TASK:PATH"),
     (("./missing", "{task}:x"), b"sojourn: missing: No such file or directory\n"),
     (("{task}:missing", "."), b"file_not_found"),
     (("{task}:here", "/no/such/place"), b"there is no directory /no/such on this machine; make it first"),
     (("/dev/null", "{task}:x"), b"neither a file nor a directory"),
     (("/etc/hostname", "{task}:../x"), b"invalid_path")],
)  # fmt: skip
def test_what_cannot_be_copied_is_told(sojourn: Sojourn, task: str, words: tuple[str, str], said: bytes) -> None:
    sojourn("exec", task, "--", "touch here")
    done = sojourn("cp", *(word.format(task=task) for word in words))
    assert done.returncode == 125
    assert said in done.stderr


def test_searching_modes_and_watching_through_the_whole_stack(stack: Stack, task: str) -> None:
    with stack.client() as client:
        one = client.task(task)
        one.files.write("a/x.py", "import os\nprint(os.getcwd())\n")
        one.files.write("a/y.txt", "print\n")
        found = one.files.search(name="*.py", content="print")
        assert [(match.line, match.column, match.text) for match in found.matches] == [(2, 1, "print(os.getcwd())")]
        first = one.files.search(content=r"^(print|import)", regex=True, limit=1)
        rest = one.files.search(content=r"^(print|import)", regex=True, after=first.next)
        assert (len(first.matches), first.truncated, len(rest.matches)) == (1, True, 2)
        with pytest.raises(InvalidRequest):
            one.files.search(content="(", regex=True)
        assert one.files.chmod("a/x.py", 0o700).entry.mode == 0o700
        assert one.files.chmod("a", 0o755, recursive=True).changed == 3
        with pytest.raises(InvalidPath):
            one.files.chmod("../x", 0o700)
        events = one.files.watch("a")
        assert next(events).type == "watching"
        seen: list[FileChange] = []

        def look() -> None:
            for event in events:
                seen.append(event)
                if event.type == "ended":
                    return

        looking = Thread(target=look)
        looking.start()
        one.files.write("a/new", "x")
        one.files.move("a", "b")
        looking.join(60)
        assert not looking.is_alive()
        assert any(event.path is not None and event.path.endswith("/a/new") for event in seen)
        assert seen[-1].reason == "moved"


def test_progress_is_told_in_bytes_and_a_directory_is_put_in_place_whole(
    stack: Stack, task: str, tmp_path: Path
) -> None:
    (tmp_path / "big").mkdir()
    for at in range(5):
        (tmp_path / f"big/{at}").write_bytes(os.urandom(1 << 20))
    with stack.client() as client:
        told: list[int] = []
        done = client.task(task).upload_dir(tmp_path / "big", "big", progress=told.append)
        assert (done.entries, done.bytes, done.left) == (5, 5 << 20, [])
        assert told == sorted(told)
        assert told[-1] == 5 << 20
        told.clear()
        back = client.task(task).download_dir("big", tmp_path / "back", progress=told.append)
        assert (back.bytes, told[-1]) == (5 << 20, 5 << 20)
        assert facts(tmp_path / "back") == facts(tmp_path / "big")
