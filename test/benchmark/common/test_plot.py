"""Error bars: an unknown error, such as that of a loss measured in one batch, has none."""

from math import inf, isnan

import pytest

from benchmark.common.plot import Line, Panel, Picture, _find_bars, draw


def test_an_unknown_error_has_no_bar():
    below, above = _find_bars([1.0, 2.0, 3.0], [0.25, inf, (2.0, 5.0)])
    assert (below[0], below[2], above[0], above[2]) == (0.25, 1.0, 0.25, 2.0)
    assert (isnan(below[1]), isnan(above[1])) == (True, True)


@pytest.mark.parametrize("rows", [(), ("a",)])
def test_a_picture_without_a_known_error_is_drawn(tmp_path, rows):
    draw(Picture((Panel("x", "y", [Line("a", [1.0], [2.0], [inf])], rows=rows),)), tmp_path / "one.svg")
    assert (tmp_path / "one.svg").exists()
