"""How far a search is: counted and timed, on a terminal and where there is none."""

import io

import pytest
from rich.console import Console

from sglang_xshare.tune.measure import Bench, Measurement
from sglang_xshare.tune.progress import Told


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(tmp_path, known: int, plans: int, terminal: bool) -> str:
    """What is told of so many plans of ten, 40 seconds each but for those that were known before."""
    clock = Clock()

    def measure(policy, batch, part):
        clock.now += 40
        return Measurement([1.0], [0.0], [[1]], None, None, None, 40.0)

    for number in range(known):
        Bench(measure, tmp_path / "trace").run({"number": number}, 4, "tuning")
    bench = Bench(measure, tmp_path / "trace")
    bench.run({"of": "another batch size"}, 2, "tuning")
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, color_system=None, width=120, highlight=False)
    with Told(bench, console, "4 rows", 10, clock) as told:
        for number in range(plans):
            bench.run({"number": number}, 4, "tuning")
            told.tell(f"plan {number}")
    return file.getvalue()


def test_without_a_terminal_it_is_a_line_now_and_then(tmp_path):
    lines = run(tmp_path, known=5, plans=7, terminal=False).splitlines()
    assert lines == [
        "4 rows: about 10 measurements",
        "4 rows: 6 of about 10 measurements, about 3 min left; plan 5",
        "4 rows: 7 of about 10 measurements, about 2 min left; plan 6",
    ]


def test_what_was_known_tells_nothing_of_the_time_left(tmp_path):
    assert run(tmp_path, known=5, plans=5, terminal=False) == "4 rows: about 10 measurements\n"
    assert "5/10 time left unknown" in run(tmp_path, known=5, plans=5, terminal=True)


@pytest.mark.parametrize(("plans", "shown"), [(1, "1/10 about 6 min left"), (12, "12/12 about 0 min left")])
def test_on_a_terminal_it_is_a_bar(tmp_path, plans, shown):
    text = run(tmp_path, known=0, plans=plans, terminal=True)
    assert shown in text
    assert f"plan {plans - 1}" in text
