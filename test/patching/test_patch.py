"""A patch file is parsed whole, or refused in one line that names it."""

import pytest

from patching.fake import DOS, HEADER, LAUNCH, NEW, ROUTE
from sglang_xshare.patching.hunk import Hunk
from sglang_xshare.patching.patch import FIELDS, FileDiff, parse_patch
from sglang_xshare.patching.tree import PatchError


def test_header_and_hunks():
    patch = parse_patch(HEADER + ROUTE, "shared/route.patch")
    assert [patch.header[field] for field in FIELDS] == ["what", "why a patch", "not proposed", "never at all"]
    first = Hunk((b"import torch\n",), (b"import torch\n", b"import ours\n"))
    start, end = b"def route(x):\n", b"    return x\n"
    second = Hunk((start, end), (start, b"    x = ours.route(x)\n", end))
    assert patch.files == (FileDiff("sglang/srt/route.py", (first, second)),)


def test_a_new_file_is_one_hunk_without_source():
    (new,) = parse_patch(HEADER + NEW, "p").files
    assert new == FileDiff("sglang/srt/ours.py", (Hunk((), (b"def route(x):\n", b"    return x\n")),))


def test_bytes_survive():
    """A missing newline, non-ASCII text, CRLF."""
    launch, dos = parse_patch(HEADER + LAUNCH + DOS, "p").files
    assert launch.hunks == (Hunk((b"main = 1",), (b"main = 2\n", "café = 3".encode())),)
    assert dos.hunks == (Hunk((b"SIZE = 1\r\n",), (b"SIZE = 2\r\n",)),)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "a diff must follow the header"),
        (HEADER, "a diff must follow the header"),
        ("just prose\n" + ROUTE, "'just prose' must be a header field"),
        (HEADER + ROUTE.replace("-4,2 +5,3", "-4,2 +5,4"), "malformed diff: Hunk is shorter than expected"),
        (HEADER + ROUTE.replace("-4,2 +5,3", "-4,1 +5,2"), "lines outside every hunk"),
        (HEADER + ROUTE + "trailing words\n", "lines outside every hunk"),
        (HEADER + ROUTE.replace("+++ b/sglang", "+++ b/other"), "a/sglang/srt/route.py -> b/other/srt/route.py"),
        (HEADER + ROUTE.replace("a/sglang/srt", "/dev/null"), "must be a/sglang/FILE"),
        (HEADER + ROUTE.replace("a/sglang/srt/route.py", "/dev/null"), "a new file must have one hunk, of added lines"),
        (HEADER + ROUTE.replace("b/sglang/srt/route.py", "/dev/null"), "must be a/sglang/FILE"),
        (HEADER + ROUTE.replace("/sglang/srt/", "/torch/"), "must be a/sglang/FILE"),
        (HEADER + ROUTE.replace("/sglang/", "/sglang/../../"), "must be a/sglang/FILE"),
        (HEADER + NEW.replace("/sglang/", "/sglang/../../"), "must be a/sglang/FILE"),
        (HEADER + ROUTE.replace("srt/route", "__init__"), "not sglang/__init__.py"),
        (HEADER + LAUNCH.replace("index 000..111 100755", "old mode 100644"), "lines outside every hunk"),
        # A clone with core.autocrlf; a diff of a file with CRLF has LF in its header.
        ((HEADER + NEW).replace("\n", "\r\n"), "lines must end in LF (got CRLF); git has converted them: clone with "),
    ],
)
def test_malformed_patches_are_refused_in_one_line(text, reason):
    with pytest.raises(PatchError) as refusal:
        parse_patch(text, "shared/p.patch")
    assert str(refusal.value).startswith("shared/p.patch: ")
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)
