"""The table of exact requests beside others, and which of a batch are marked."""

import pytest

from benchmark.serving import exact
from sglang_xshare.live.client import Client

SHAPE = {"batch": 2, "output_tokens": 4, "rounds": 2, "loss_batches": 1}


def point(speeds, active=0.0, exact_rows=0, kept=0.0, nats=(2.0, 3.0, 4.0), marked=(False,) * 3):
    totals = {"layer_steps": 10, "experts_before": 500.0, "experts_after": active, "kept_mass": kept, "rows": 20}
    return {
        "shape": SHAPE,
        "speeds": list(speeds),
        "totals": totals | {"exact_rows": exact_rows},
        "nats": list(nats),
        "exact": list(marked),
    }


def test_what_is_kept_is_paired_within_rounds():
    first = point((10.0, 20.0))
    first["totals"] |= dict.fromkeys(("layer_steps", "experts_before", "rows"), 0)
    points = {
        "vanilla": first,
        "xshare:k0=1,add=8, 0 exact": point((20.0, 40.0), 200.0, 0, 17.0, (2.1, 3.2, 4.3)),
        "xshare:k0=1,add=8, 1 exact": point((15.0, 30.0), 300.0, 5, 18.5, (2.1, 3.0, 4.1), (False, True, False)),
    }
    table = exact.tabulate_exact(points)
    cells = [dict(zip(table.headings, row, strict=True)) for row in table.rows]
    assert [row["exact"] for row in cells] == ["-", "0", "1"]
    assert [row["active"] for row in cells] == ["50.0", "20.0", "30.0"]
    assert cells[1]["gain kept"] == "1.00 [1.00, 1.00]"
    assert cells[2]["ratio"] == "1.50 [1.50, 1.50]"
    assert cells[2]["gain kept"] == "0.50 [0.50, 0.50]"
    assert cells[2]["time kept"] == "0.67 [0.67, 0.67]"
    assert cells[2]["others' kept mass"] == "0.900"
    assert cells[2]["others' loss, nats"].startswith("+0.1000")
    assert cells[2]["exact rows' loss"] == "0.0000"


def test_marked_requests_say_so_and_keep_their_parameters(monkeypatch):
    asked = []
    monkeypatch.setattr(Client, "ask", lambda own, path, body=None, *args, **more: asked.append(body))
    server = exact.Marking("http://h")
    server.marked = [1]
    server.ask("/generate", {"sampling_params": [{"custom_params": {"tokens": [3]}} for _ in range(2)]})
    assert asked[0]["sampling_params"][0] == {"custom_params": {"tokens": [3]}}
    assert asked[0]["sampling_params"][1] == {"custom_params": {"tokens": [3], "expert_policy": "exact"}}


@pytest.mark.parametrize("counts", [["1"], ["0", "16"], ["0", "-1"]])
def test_a_wrong_count_is_one_line(counts):
    with pytest.raises(SystemExit, match=f"--exact {' '.join(counts)}: "):
        exact.main(["--exact", *counts])
