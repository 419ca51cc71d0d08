"""The bundle runs where nothing is, from wherever it lies, and tells commands nothing of itself."""

from __future__ import annotations

import gzip
import os
import pwd
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Final

import pytest

from images.bundle import build as bundle_build
from tests.support.executor_pod import (
    IS_ROOT,
    ROOT,
    Pod,
    Tier,
    command_account,
    connected,
    descendants_of,
    running_executor,
)

pytestmark = pytest.mark.timeout(600)  # the first test builds the bundle

needs_root = pytest.mark.skipif(not IS_ROOT, reason="mounts and changes of root directory need root")

# Instead of the command line that it is given. What it mounts goes with the last process of its mount namespace.
IN_IMAGE: Final = """
image=$1 user=$2 chroot=$3
private=$(dirname "$SOJOURN_EXECUTOR_SOCKET") area=$(dirname "$SOJOURN_WORKSPACE")
mount -t proc proc "$image/proc"
mount --bind /dev/null "$image/dev/null"
for directory in "$private" "$area"; do
    mkdir -p "$image$directory"
    mount --bind "$directory" "$image$directory"
done
mount --bind -o ro "$image/opt/sojourn" "$image/opt/sojourn"
mount -o remount,ro,bind "$image/opt/sojourn"
if [ "$user" = 0:0 ]; then exec "$chroot" "$image" /opt/sojourn/sojourn-executor; fi
chown "$user" "$private"
exec "$chroot" --userspec="$user" --groups= "$image" /opt/sojourn/sojourn-executor
"""


def in_image(image: Path, user: str) -> tuple[str, ...]:
    chroot = shutil.which("chroot", path="/usr/sbin:/usr/bin:/sbin:/bin")
    if chroot is None or shutil.which("unshare") is None:
        pytest.skip("needs the programs chroot and unshare")
    return ("unshare", "--mount", "--propagation", "private", "sh", "-ec", IN_IMAGE, "sh", str(image), user, chroot)


def instead(program: Path) -> tuple[str, ...]:
    """Starts this program; the command line that follows is dropped."""
    return ("sh", "-c", 'exec "$0"', str(program))


def mapped_files(pid: int) -> set[Path]:
    """The files that a process has its code from."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line[line.index("/") :]) for line in lines if "/" in line and "r-xp" in line}


def copy_to(bundle: Path, place: Path) -> Path:
    place.mkdir(parents=True)
    for directory in (place, *place.parents):
        if directory.stat().st_uid == os.geteuid() and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o011)
    subprocess.run(["cp", "-a", f"{bundle}/.", place], timeout=120, check=True)
    return place


async def test_from_two_places_each_runs_on_its_own_files_alone(bundle: Path, tmp_path: Path) -> None:
    for place in (tmp_path / "a place with spaces", tmp_path / "b" / "deeper" / "sojourn"):
        copy = copy_to(bundle, place)
        with running_executor(prefix=instead(copy / "sojourn-executor")) as process:
            async with connected(process) as pod:
                assert (await pod.exec("echo $((6 * 7)); exit 3"))["exit_code"] == 3
            if IS_ROOT:  # the executor is closed to others
                helpers = [pid for pid, state in descendants_of(process.pid).items() if state != "Z"]
                assert helpers, "there is a spawn helper"
                for pid in (process.pid, *helpers):
                    assert {file for file in mapped_files(pid) if copy not in file.parents} == set()


async def test_it_starts_through_a_link_to_it(bundle: Path, tmp_path: Path) -> None:
    link = tmp_path / "linked"
    link.symlink_to(bundle / "sojourn-executor")
    with running_executor(prefix=instead(link)) as process:
        async with connected(process) as pod:
            assert (await pod.exec("echo hello"))["stdout"] == "hello\n"


async def test_what_the_image_sets_for_its_own_libraries_does_not_reach_it(bundle: Path, tmp_path: Path) -> None:
    for name in ("libc.so.6", "libz.so.1", "json.py"):
        (tmp_path / name).write_text("no such thing")
    names = ("LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME")
    settings = [*(f"{name}={tmp_path}" for name in names), f"LD_PRELOAD={tmp_path}/libz.so.1"]
    prefix = ("env", *settings, str(bundle / "sojourn-executor"))
    with running_executor(prefix=prefix, env={"SOJOURN_PASS_ENV": "PYTHONPATH"}) as process:
        async with connected(process) as pod:
            result = await pod.exec("echo ${LD_LIBRARY_PATH-none} ${LD_PRELOAD-none} ${PYTHONHOME-none} $PYTHONPATH")
        assert "ld.so" not in process.log_text()
    assert result["stdout"] == f"none none none {tmp_path}\n"  # the last since the image's maker says so


async def test_sessions_searches_and_archives_work_in_it(bundle: Path) -> None:
    with running_executor(prefix=instead(bundle / "sojourn-executor")) as process:
        async with connected(process) as pod:
            await pod.exec("mkdir -p d; echo a needle here > d/hay")
            found = await pod.call("GET", "/v1/files/search?content=needle")
            assert [entry["path"] for entry in found.json["matches"]] == [str(pod.workspace / "d" / "hay")]
            packed = await pod.call("GET", "/v1/archive?path=d&format=gzip")
            assert packed.status == 200
            assert gzip.decompress(packed.body)[:3] in (b"hay", b"./\0", b"d/\0", b"./h")
            await _keeps_state_in_a_session(pod)


async def _keeps_state_in_a_session(pod: Pod) -> None:
    made = await pod.call("POST", "/v1/sessions", {})
    assert made.status == 201, made.body
    path = f"/v1/sessions/{made.json['id']}/exec"
    await pod.call("POST", path, {"command": "kept=yes"})
    assert (await pod.call("POST", path, {"command": "echo $kept"})).json["stdout"] == "yes\n"


def test_it_holds_every_module_of_the_executor_and_all_can_be_imported(bundle: Path) -> None:
    names = []
    for path in sorted((ROOT / "executor").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    assert "executor.routes.commands" in names
    # what runs in processes of its own finds its neighbours there
    code = "import importlib, os, sys, executor; sys.path.append(os.path.dirname(executor.__file__)); "
    code += f"[importlib.import_module(name) for name in {names!r}]"
    argv = [str(bundle / "bin" / "python3"), "-I", "-S", "-W", "error", "-c", code]
    done = subprocess.run(argv, env={}, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("codec", ["idna", "punycode", "cp1252", "iso8859_15", "utf_16", "utf_7", "rot13"])
def test_it_knows_the_codecs_that_are_asked_for_by_name(bundle: Path, codec: str) -> None:
    code = f"import codecs; assert codecs.decode(codecs.encode('abc', {codec!r}), {codec!r}) == 'abc'"
    argv = [str(bundle / "bin" / "python3"), "-I", "-S", "-c", code]
    done = subprocess.run(argv, env={}, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_its_archive_is_small_ordered_and_names_nobody(bundle: Path) -> None:
    archive = bundle_build.pack_common(bundle)
    assert archive.stat().st_size < 15_000_000
    with tarfile.open(archive) as opened:
        entries = opened.getmembers()
    names = {entry.name for entry in entries}
    assert {"sojourn-executor/sojourn-executor", "sojourn-executor/bin/python3"} <= names
    assert {(entry.uid, entry.gid, entry.uname, entry.gname, entry.mtime) for entry in entries} == {
        (0, 0, "", "", bundle_build.epoch())
    }
    assert not [name for name in names if name.endswith(".py") or "/test/" in name or "__pycache__" in name]
    assert not [entry.name for entry in entries if entry.mode & 0o7022], "nobody but its owner may change it"


def test_a_path_that_the_loader_would_take_apart_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = copy_to(bundle, tmp_path / "a:b")
    done = subprocess.run([copy / "sojourn-executor"], env={}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 127
    assert "must not hold :" in done.stderr


def test_half_a_copy_says_that_it_is_one(bundle: Path, tmp_path: Path) -> None:
    alone = tmp_path / "sojourn-executor"
    alone.write_bytes((bundle / "sojourn-executor").read_bytes())
    alone.chmod(0o755)
    done = subprocess.run([alone], env={}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 127
    assert "was the whole directory copied?" in done.stderr


def test_without_a_compiler_the_build_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert bundle_build.main(["--out", str(tmp_path / "out")]) == 1
    assert "no C compiler" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("tier", ["split", "single"])
async def test_in_an_image_with_nothing_in_it_a_command_runs_and_sees_no_trace(empty_image: Path, tier: Tier) -> None:
    account = command_account("split")
    user = "0:0"
    if tier == "single":
        user = f"{account.pw_uid}:{account.pw_gid}"
    else:
        _add_account(empty_image, account)
    with running_executor("split", prefix=in_image(empty_image, user)) as process:
        async with connected(process) as pod:
            result = await pod.exec(["/tell", "one", "two words"])
            missing = await pod.exec(["/bin/sh"])
            found = await pod.call("GET", "/v1/files/search?name=*")
            status = Path(f"/proc/{process.pid}/status").read_text()
    assert result["exit_code"] == 7
    assert result["stderr"] == "and an error line\n"
    lines = result["stdout"].splitlines()
    assert lines[:2] == ["argument one", "argument two words"]
    variables = dict(line.removeprefix("variable ").split("=", 1) for line in lines[2:])
    assert set(variables) == {"PATH", "LANG", "HOME", "USER", "LOGNAME", "SHELL"}
    assert "sojourn" not in " ".join(variables[name] for name in ("PATH", "LANG", "SHELL"))
    assert missing["exit_code"] == 127
    assert found.status == 200
    assert f"Uid:\t{user.split(':')[0]}\t" in status


def _add_account(image: Path, account: pwd.struct_passwd) -> None:
    (image / "etc").mkdir()
    line = f"{account.pw_name}:x:{account.pw_uid}:{account.pw_gid}::/:/bin/sh\n"
    (image / "etc" / "passwd").write_text(line)
