"""Hunks go to the one place they match, byte for byte, or are refused."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_xshare.patching.hunk import Hunk, apply_hunks, find_places, split_lines
from sglang_xshare.patching.tree import PatchError

LINES = st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n", b"\n", b"a\r\n", b"\x0c\n", b"\xff\n"]), max_size=12)


@given(st.binary())
def test_split_lines_gives_back_every_byte(content):
    lines = split_lines(content)
    assert b"".join(lines) == content
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines[:-1])


@given(lines=LINES, start=st.integers(0, 12), size=st.integers(0, 4), new=LINES, last=st.sampled_from([b"", b"a"]))
@example(lines=[b"a\n", b"a\r\n"], start=0, size=1, new=[], last=b"")
@example(lines=[b"a\n"], start=0, size=1, new=[], last=b"a")
@example(lines=[b"a\n"], start=1, size=1, new=[], last=b"a")
def test_a_hunk_is_applied_exactly_where_it_is_unique(lines, start, size, new, last):
    """Line ends count: neither a\\r\\n, nor a last line without its end, is a\\n."""
    content = b"".join(lines) + last
    lines = split_lines(content)
    start = min(start, len(lines))
    end = min(start + size, len(lines))
    hunk = Hunk(tuple(lines[start:end]), tuple(new))
    starts = range(len(lines) + 1) if hunk.source or not content else ()
    brute = [i for i in starts if tuple(lines[i : i + end - start]) == hunk.source]
    assert find_places(lines, hunk) == brute
    if len(brute) == 1:
        assert apply_hunks(content, [hunk], "p") == b"".join([*lines[:start], *new, *lines[end:]])
    else:
        with pytest.raises(PatchError, match=f"hunk 1 matches {len(brute)} places"):
            apply_hunks(content, [hunk], "p")


def test_the_refusal_names_patch_hunk_and_lines():
    with pytest.raises(PatchError) as refusal:
        apply_hunks(b"a\nb\na\n", [Hunk((b"b\n",), ()), Hunk((b"a\n",), ())], "shared/p.patch: sglang/f.py")
    line = "shared/p.patch: sglang/f.py: hunk 2 matches 2 places (lines 1, 3); it must match exactly one"
    assert str(refusal.value) == line


def test_overlapping_hunks_are_refused():
    hunks = [Hunk((b"a\n", b"b\n"), (b"b\n",)), Hunk((b"b\n", b"c\n"), (b"b\n",))]
    with pytest.raises(PatchError, match="two hunks overlap at line 2"):
        apply_hunks(b"a\nb\nc\n", hunks, "p")


def test_a_line_may_not_lose_its_end_inside_the_file():
    with pytest.raises(PatchError, match="without a newline"):
        apply_hunks(b"a\nb\n", [Hunk((b"a\n",), (b"c",))], "p")
