"""What the command line makes of its words, and how it shows things."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

from sojourn.cli import server
from sojourn.cli.main import OWN_FAILURE, cli, main
from sojourn.cli.output import clean, size
from sojourn.cli.run import chosen_form


@pytest.mark.parametrize(
    ("words", "form"),
    [
        (("ls",), ["ls"]),
        (("./run.sh",), ["./run.sh"]),
        (("ls", "-l", "a b"), ["ls", "-l", "a b"]),
        (("ls -l",), "ls -l"),
        (("a|b",), "a|b"),
        (("X=1",), "X=1"),
        (("echo", "a|b"), ["echo", "a|b"]),
        (("$HOME/x",), "$HOME/x"),
        (("",), ""),
    ],
)
def test_one_word_with_shell_syntax_is_a_script_and_all_else_is_argv(words: tuple[str, ...], form: Any) -> None:
    assert chosen_form(words) == form


def test_names_out_of_a_sandbox_cannot_drive_the_terminal() -> None:
    assert clean("a\x1b[2Jb\nc") == "a\\x1b[2Jb\\nc"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB"), (None, "no limit")]
)
def test_sizes_are_shown_in_the_largest_unit(count: int | None, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    "arguments", [["--nonsense"], ["exec"], ["nothing"], ["exec", "t"], ["keys", "create", "--role"]]
)
def test_wrong_use_is_our_own_failure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == OWN_FAILURE
    assert re.search("Usage:|Error:", capsys.readouterr().err)


def test_an_option_before_the_dashes_explains_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exec", "t", "ls", "-l"]) == OWN_FAILURE
    assert "go behind `--`" in capsys.readouterr().err


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in cli.commands.items():
        assert command.help, name
    assert main(["--help"]) == 0
    assert "125" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["up", "serve", "doctor"])
def test_without_the_server_its_commands_say_how_to_get_it(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(server, "distribution", missing)
    assert main([command]) == OWN_FAILURE
    said = capsys.readouterr().err
    assert "server_not_installed" in said
    assert "make up" in said


def test_with_the_server_its_program_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[str]] = []

    class Gone(BaseException):
        pass

    def execv(program: str, words: list[str]) -> None:
        taken.append(words)
        raise Gone

    monkeypatch.setattr(server, "distribution", lambda name: None)
    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(Gone):
        main(["up", "--port", "1", "--help"])
    assert taken[0][1:] == ["-I", "-m", "manager", "up", "--port", "1", "--help"]
