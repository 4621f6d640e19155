"""`python -m benchmark.quality.front`: its changes, experts at equal loss, and all of it on a small random model."""

import pytest

from benchmark.quality.equal_loss import experts_for, find_interval, format_share
from benchmark.quality.front import __main__ as command


def test_experts_at_a_loss_lie_on_the_line_between_two_settings():
    curve = [(10.0, 0.3), (20.0, 0.1), (30.0, 0.05)]
    found = [experts_for(loss, curve) for loss in (0.2, 0.05, 0.31, 0.04)]
    assert found == [pytest.approx(15), pytest.approx(30), None, None]


def test_the_interval_of_a_share_is_over_the_batches():
    def read(means):
        return means[0] / means[1] - 1

    steady, half = [[0.5] * 8, [1.0] * 8], (-0.5, -0.5)
    # Four batches are too few.
    assert [find_interval([[0.5] * count, [1.0] * count], read) for count in (4, 5, 8)] == [None, half, half]
    coupled = [[0.4, 0.6] * 4, [0.8, 1.2] * 4]  # of each batch the same share
    assert find_interval(coupled, read) == pytest.approx(half)
    # Of 8 draws with even odds, 1 or fewer are low with 3.5 %, none with 0.4 %.
    assert find_interval([[0.4, 0.6] * 4, [1.0] * 8], read) == pytest.approx((-0.575, -0.425))
    for missing, interval in ((41, None), (40, (1.0, 1.0))):
        found = iter([None] * missing + [1.0] * 400)
        assert find_interval(steady, lambda means, found=found: next(found)) == interval
    assert (format_share(-0.5, None), format_share(-0.5, (-0.6, -0.4))) == ("-50%", "-50% [-60%, -40%]")


def test_command_measures_into_a_record(measure):
    settings = ["xshare:k0=1,add=2", "xshare:k0=1,add=4", "oea:k0=2"]
    text = "--per-domain", "4", "--prompt", "16", "--steps", "8"
    points = measure(command.main, "front", *settings, "--batch", "4", "8", "--tokens-per-request", "1", "2", *text)
    found = [(one["batch"], one["tokens_per_request"], one["setting"]) for one in points.values()]
    assert found == [(b, t, s) for b in (8, 4) for t in (1, 2) for s in settings]
    for one in points.values():
        assert len(one["changes"]["published"]["losses"]) == 8 // one["batch"]
        published, *changed = one["changes"].values()
        assert published["policy"] == one["setting"]
        assert published["over_published"] == {**published["over_published"], "delta": 0, "error": 0}
        for change in changed:
            gap = change["loss"]["delta"] - published["loss"]["delta"]
            assert change["over_published"]["delta"] == pytest.approx(gap, abs=1e-6)
