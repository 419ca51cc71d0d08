"""What file calls have changed is remembered by path, in bounds, and says when it is more than that."""

from __future__ import annotations

import pytest

from executor.safepath import Place
from executor.written import Changed, Forgotten, Written

WORKSPACE = Place((b"workspace",), (), b"/workspace")
NONE = "0" * 32


def at(*parts: bytes, root: bytes = b"workspace") -> Place:
    return Place((root,), parts, b"/" + b"/".join((root, *parts)))


def test_states_of_one_life_are_in_order_as_texts_and_a_later_lifes_come_after_them() -> None:
    one = Written(WORKSPACE)
    names = []
    for number in range(300):
        one.changed(at(b"%d" % number))
        names.append(one.state)
    assert names == sorted(set(names))
    assert all(len(name) == 32 for name in names)
    assert Written(WORKSPACE).state > names[-1]


def test_only_what_was_changed_since_a_state_is_told_in_the_order_of_a_walk() -> None:
    one = Written(WORKSPACE)
    one.changed(at(b"old"))
    start = one.state
    one.changed(at(b"a-b"))
    one.changed(at(b"a", b"z"))
    one.replaced(at(b"a"))
    found, base, state = one.since(start)
    assert found == [Changed(b"a", True), Changed(b"a\0z", False), Changed(b"a-b", False)]
    assert (base, state) == (start, one.state)
    one.changed(at(b"old"))
    assert [changed.key for changed in one.since(state)[0]] == [b"old"]


def test_a_state_of_another_life_counts_from_the_beginning() -> None:
    one = Written(WORKSPACE)
    one.changed(at(b"x"))
    for state in (NONE, "f" * 32):
        assert one.since(state)[:2] == ([Changed(b"x", False)], None)


def test_what_is_outside_the_workspace_is_nobodys_concern() -> None:
    one = Written(WORKSPACE)
    start = one.state
    one.changed(at(b"x", root=b"tmp"))
    one.moved(at(b"x", root=b"tmp"), at(b"y"))
    assert one.since(start)[0] == [Changed(b"y", True)]


def test_memory_is_bounded_and_more_than_it_holds_is_said() -> None:
    """S5"""
    for one in (Written(WORKSPACE, max_paths=10), Written(WORKSPACE, max_bytes=30)):
        start = one.state
        for number in range(11):
            one.changed(at(b"name-%d" % number))
        with pytest.raises(Forgotten):
            one.since(start)
        with pytest.raises(Forgotten):
            one.since(NONE)
        assert len(one.since(one.state)[0]) == 0
        after = one.state
        one.changed(at(b"later"))
        assert one.since(after)[0] == [Changed(b"later", False)]


def test_a_change_of_everything_is_more_than_paths_can_tell() -> None:
    one = Written(WORKSPACE)
    start = one.state
    one.replaced(at())
    with pytest.raises(Forgotten):
        one.since(start)
    after = one.state
    one.changed(at())  # the directory's own mode: every layer has it
    assert one.since(after)[0] == [Changed(b"", False)]
    one.forget()
    with pytest.raises(Forgotten):
        one.since(after)
