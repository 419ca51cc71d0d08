"""What a session's shell is told, and the files it shares with the executor."""

from __future__ import annotations

import os
import select
import shlex
import stat
import subprocess

import pytest

from executor.isolation import CommandUser
from executor.shell import call_line, quoted
from executor.shellfiles import OUTPUTS, ShellFiles
from executor.wire import bad_session_env

ME = CommandUser("me", os.geteuid(), os.getegid(), (), "/", "/bin/sh")


@pytest.mark.parametrize("text", ["", "'", "a'b'c", "$(id)`id`", "\n\n", "\\", '"', "é\x01\x7f", "-n", "!!"])
def test_any_text_is_one_word_of_a_shell(text: str) -> None:
    assert shlex.split(quoted(text)) == [text]
    shown = subprocess.run(["sh", "-c", f"printf %s {quoted(text)}"], capture_output=True, check=True)
    assert shown.stdout.decode() == text


def test_the_line_marks_sources_and_redirects_in_one_command() -> None:
    line = call_line("/d", {"A": "x y", "B": "'"}, mark=7, has_stdin=True, merged=False, last_code=3).decode()
    assert line == (
        "\\command ulimit -S -m 7; (\\exit 3); A='x y' B=''\\''' "
        "\\command . /d/script </d/stdin >|/d/stdout 2>|/d/stderr; "
    )
    plain = call_line("/d", {}, mark=None, has_stdin=False, merged=True).decode()
    assert plain == "\\command . /d/script </dev/null >|/d/stdout 2>&1; "


@pytest.mark.parametrize("name", ["A", "_x", "PATH", "a1"])
def test_a_shells_names_are_allowed(name: str) -> None:
    assert bad_session_env({name: "x"}) is None


@pytest.mark.parametrize(("name", "value"), [("1", ""), ("a-b", ""), ("UID", ""), ("", ""), ("a\n", ""), ("A", "\0")])
def test_other_names_and_nul_are_not(name: str, value: str) -> None:
    assert bad_session_env({name: value}) is not None


def test_an_output_is_empty_again_once_all_writers_have_closed_it() -> None:
    files = ShellFiles(ME)
    try:
        reader = files.open_output(0)
        writer = os.open(f"{files.path}/{OUTPUTS[0]}", os.O_WRONLY)
        os.write(writer, b"first")
        os.close(writer)
        os.close(reader)
        reader = files.open_output(0)
        assert os.read(reader, 10) == b""
        os.close(reader)
    finally:
        files.close()
    assert not os.path.exists(files.path)


def test_a_held_output_never_reaches_the_next_reader() -> None:
    files = ShellFiles(ME)
    try:
        reader = files.open_output(0)
        held = os.open(f"{files.path}/{OUTPUTS[0]}", os.O_WRONLY)
        files.renew_output(0)
        following = files.open_output(0)
        os.write(held, b"late")
        assert os.read(following, 10) == b""
        for fd in (reader, held, following):
            os.close(fd)
    finally:
        files.close()


def test_a_script_is_exactly_the_latest_and_input_a_new_file_each_time() -> None:
    files = ShellFiles(ME)
    try:
        for text in (b"a long text", b"short", b""):
            files.put_script(text)
            with open(f"{files.path}/script", "rb") as script:
                assert script.read() == text
        files.put_stdin(b"one")
        with open(f"{files.path}/stdin", "rb") as first:
            files.put_stdin(b"two")
            assert first.read() == b"one"
        files.drop_stdin()
        files.drop_stdin()
        assert not os.path.exists(f"{files.path}/stdin")
    finally:
        files.close()


def test_what_stands_in_place_of_a_fifo_is_never_opened_for_one() -> None:
    files = ShellFiles(ME)
    try:
        os.unlink(f"{files.path}/stdout")
        os.symlink("/etc/passwd", f"{files.path}/stdout")
        os.unlink(f"{files.path}/stderr")
        os.close(os.open(f"{files.path}/stderr", os.O_CREAT))
        for stream in (0, 1):
            with pytest.raises(OSError, match=r"FIFO|symbolic"):
                files.open_output(stream)
        assert stat.S_IMODE(os.stat(files.path).st_mode) == 0o700
    finally:
        files.close()


@pytest.mark.parametrize("remembers", [False, True])
def test_a_reader_hears_nothing_of_an_earlier_commands_writer(monkeypatch: pytest.MonkeyPatch, remembers: bool) -> None:
    """Under gVisor a used FIFO tells its next reader at once of an end: each command gets another one there."""
    files = ShellFiles(ME)
    try:
        assert ShellFiles._fifos_remember is False, "as Linux does"
        monkeypatch.setattr(ShellFiles, "_fifos_remember", remembers)
        seen = set()
        for _command in range(3):
            reader = files.open_output(0)
            try:
                poll = select.poll()
                poll.register(reader, select.POLLIN)
                assert poll.poll(0) == []
                os.close(os.open(f"{files.path}/{OUTPUTS[0]}", os.O_WRONLY | os.O_NONBLOCK))
                assert poll.poll(0), "and of its own writer it hears"
                seen.add(os.fstat(reader).st_ino)
            finally:
                os.close(reader)
        if not remembers:
            assert len(seen) == 1
    finally:
        files.close()
