"""The escapes of a terminal session."""

from __future__ import annotations

import pytest

from sojourn.cli.escape import Escapes


@pytest.mark.parametrize(("typed", "sent", "left"), [
    (b"ls\r", b"ls\r", False), (b"~.", b"", True), (b"ls\r~.", b"ls\r", True), (b"ls\n~.rest", b"ls\n", True),
    (b"a~.", b"a~.", False), (b"~~.", b"~.", False), (b"~/bin\r", b"~/bin\r", False), (b"\r~~\r", b"\r~\r", False),
    (b"cd ~\r~x", b"cd ~\r~x", False), (b"~\r~.", b"~\r", True),
])  # fmt: skip
def test_a_tilde_counts_at_the_start_of_a_line_however_the_keys_come(typed: bytes, sent: bytes, left: bool) -> None:
    whole = Escapes()
    assert (whole.feed(typed), whole.left) == (sent, left)
    single = Escapes()
    got = b""
    for key in typed:
        got += single.feed(bytes([key]))
        if single.left:
            break
    assert (got, single.left) == (sent, left)


def test_a_tilde_at_the_end_of_the_input_is_not_swallowed() -> None:
    escapes = Escapes()
    assert escapes.feed(b"~") == b""
    assert escapes.end() == b"~"
    assert escapes.end() == b""
