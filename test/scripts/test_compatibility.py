"""The table of what each release needs says what the wheels say."""

from scripts.compatibility import PAGE, make_table
from sglang_xshare.patching.queue import find_root, list_releases


def test_the_rows_of_the_releases_that_every_test_has() -> None:
    *_, first, second, third = make_table(["0.5.17", "0.5.21", "0.5.23"]).splitlines()
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| 0.5.")]
    assert [row.split()[1] for row in rows] == list_releases(find_root())[::-1]
    assert {first, second, third} < set(rows)
