"""How far a search is: measurements counted, on a terminal and in a log."""

import io

import pytest
from rich.console import Console

from sglang_xshare.tune.command import _progress
from sglang_xshare.tune.measure import Bench, Measurement


def run(folder, known, plans, terminal):
    """What is told of so many plans, two measurements each, of ten, the first of which were known before."""

    def measure(policy, batch, part):
        return Measurement([1.0], [0.0], [[1]], None, None, None)

    for number in range(known):
        Bench(measure, folder / "trace").run({"number": number}, 4, "tuning")
    bench = Bench(measure, folder / "trace")
    bench.run({"of": "another batch size"}, 2, "tuning")
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, color_system=None, width=120, highlight=False)
    with _progress(console, bench, "4 rows", 10) as tell:
        for number in range(plans):
            bench.run({"number": 2 * number}, 4, "tuning")
            bench.run({"number": 2 * number + 1}, 4, "tuning")
            tell(f"plan {number}")
    return file.getvalue()


def test_in_a_log_measurements_are_counted_and_what_was_known_tells_no_time(tmp_path):
    lines = run(tmp_path, known=4, plans=4, terminal=False).splitlines()
    assert lines[:3] == ["4 rows: about 10 measurements", "2 of about 10: plan 0", "4 of about 10: plan 1"]
    assert lines[4].startswith("8 of about 10, about 1 min left: plan 3")


@pytest.mark.parametrize(("plans", "shown"), [(1, "2/10"), (6, "12/12")])
def test_on_a_terminal_it_is_a_bar(tmp_path, plans, shown):
    text = run(tmp_path, known=0, plans=plans, terminal=True)
    assert shown in text
    assert f"plan {plans - 1}" in text
