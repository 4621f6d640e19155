"""Samples of the user's texts: every part gets some of each file, from its beginning to its end."""

import pytest

from sglang_xshare.tune.texts import Sample, read_samples


def read(folder, count, parts=2):
    return read_samples(folder, lambda text: list(text.encode()), 2, 3, count, parts)


def test_samples_go_to_the_parts_in_turn_and_files_take_turns(tmp_path):
    for name, first in (("a", "a"), ("b", "n")):
        text = "".join(chr(ord(first) + number) * 6 for number in range(4))
        (tmp_path / f"{name}.txt").write_text(text)
    tuning, held_out = read(tmp_path, 4)
    assert tuning[0] == Sample([97, 97], [97] * 4)
    assert [chr(one.prompt[0]) for one in tuning] == ["a", "n", "c", "p"]
    assert [chr(one.prompt[0]) for one in held_out] == ["b", "o", "d", "q"]
    assert [[chr(one.prompt[0]) for one in part] for part in read(tmp_path, 2, parts=4)] == [
        ["a", "n"],
        ["b", "o"],
        ["c", "p"],
        ["d", "q"],
    ]


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
