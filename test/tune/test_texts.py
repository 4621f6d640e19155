"""Samples of the user's texts: every part gets some of each file, from its beginning to its end."""

import pytest

from sglang_xshare.tune.texts import Sample, read_samples


def read(folder, count, parts=2):
    return read_samples(folder, lambda text: list(text.encode()), 2, 3, count, parts)


def test_samples_go_to_the_parts_in_turn_and_files_take_turns(tmp_path):
    for name, first in (("a", "a"), ("b", "n")):
        text = "".join(chr(ord(first) + number) * 6 for number in range(4))
        (tmp_path / f"{name}.txt").write_text(text)
    assert read(tmp_path, 4)[0][0] == Sample([97, 97], [97] * 4)
    for count, parts, firsts in ((4, 2, ["ancp", "bodq"]), (2, 4, ["an", "bo", "cp", "dq"])):
        found = read(tmp_path, count, parts)
        assert ["".join(chr(sample.prompt[0]) for sample in part) for part in found] == firsts


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe", r"must be a text in UTF-8 \(byte 0 is not UTF-8\)"),
        (b"", "0 tokens, 0 samples of --prompt and --tokens; must have 4 samples"),
    ],
)
def test_what_is_no_text_is_named(content, said, tmp_path):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=f"^--texts {tmp_path}/a.txt: {said}"):
        read(tmp_path, 2)
