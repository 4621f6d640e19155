"""Release numbers: of releases, of what leads to them, and of wheels that are ours."""

import pytest

from sglang_xshare.upstream.release import is_since


@pytest.mark.parametrize(
    ("running", "last", "next_one"),
    [
        ("0.5.9", "0.5.9", "0.5.17"),
        ("0.5.23", "0.5.23", "0.5.24"),
        ("0.5.23+xshare.0.1.0", "0.5.23", "0.5.24"),
        ("0.5.23.post1", "0.5.23", "0.5.24"),
        ("0.5.24rc1", "0.5.24", "0.5.25"),
        ("0.5.23.dev3+gabc", "0.5.23", "0.5.24"),
        ("0.6", "0.6.0", "0.6.1"),
        ("0.0.0.dev0", "0.0.0", "0.5.17"),
    ],
)
def test_a_build_has_the_code_of_the_release_that_it_leads_to(running, last, next_one):
    assert is_since(running, last)
    assert not is_since(running, next_one)


def test_what_is_no_version_is_not_compared():
    with pytest.raises(ValueError, match="unknown"):
        is_since("unknown", "0.5.23")
