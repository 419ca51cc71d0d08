"""Text views of a byte stream never break a character, and their offsets stay those of the bytes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from executor.follow import TextPieces
from executor.output import Piece
from executor.process import _text


@given(text=st.text(), cuts=st.lists(st.integers(0, 200), max_size=20))
def test_text_cut_anywhere_comes_out_whole(text: str, cuts: list[int]) -> None:
    raw = text.encode()
    marks = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    pieces, out, at = TextPieces(0), "", 0
    for start, end in itertools.pairwise(marks):
        offset, stop, part = pieces.feed(Piece(start, raw[start:end]))
        assert offset == at
        assert raw[offset:stop].decode() == part
        out, at = out + part, stop
    assert out + pieces.feed(Piece(len(raw), b""), final=True)[2] == text


def test_a_character_that_never_gets_complete_is_replaced_at_the_end() -> None:
    pieces = TextPieces(0)
    assert pieces.feed(Piece(0, b"a\xe2\x80")) == (0, 1, "a")
    assert pieces.feed(Piece(3, b""), final=True) == (1, 3, "\ufffd")


def test_a_gap_ends_what_was_incomplete_before_it() -> None:
    pieces = TextPieces(0)
    pieces.feed(Piece(0, b"\xe2"))
    assert pieces.restart(100) == (0, 1, "\ufffd")
    assert pieces.feed(Piece(100, b"ok")) == (100, 102, "ok")


def test_the_cut_between_head_and_tail_shows_no_broken_character() -> None:
    raw = "€".encode() * 1000
    for head in range(20, 24):
        for tail in range(20, 24):
            text = _text(raw[:head], raw[-tail:], len(raw) - head - tail)
            assert "\ufffd" not in text
            kept = text.count("€") * 3
            assert f"{len(raw) - kept} bytes dropped" in text


def test_bytes_that_are_no_text_are_replaced_not_dropped() -> None:
    assert _text(b"\xff\xfe", b"", 0) == "\ufffd\ufffd"
