"""A server with a governor: its budget moves with the traffic, on all ranks at once; GET, log and metrics tell it."""

import time
from typing import Any

import pytest

from served.answers import make_server, policy, read_lines, read_metrics, read_prompts
from served.release import LATEST
from served.test_dp_attention import TWO
from served.test_parallel import TWO_CORES
from served.test_switch import check_steps, post
from sglang_xshare.live import PATH

LOW, HIGH, FLOOR, EVERY = 1, 16, 0.85, 4
GOVERNOR = {"kept_mass": FLOOR, "add": [LOW, HIGH], "every": EVERY}
BUDGETS: list[dict[str, Any]] = [{"policy": "xshare", "k0": 1, "add": add} for add in range(LOW, HIGH + 1)]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [(), ("--tp", "2"), TWO], ids=lambda ranks: " ".join(ranks) or "one rank")
def test_the_budget_moves_on_all_ranks_at_the_same_step(ranks, tiny_model, patched_release, tmp_path):
    """Every step comes from one whole plan of some budget within the bounds, the same on every rank."""
    flags = [*policy("xshare", k0=1, governor=GOVERNOR), *ranks]
    server, probe, _ = make_server(tiny_model, patched_release(LATEST), flags, tmp_path, TWO_CORES if ranks else {})
    with server:
        before = server.get(PATH)
        assert (before["add"], before["governor"], before["governed"][0]["moves"]) == (HIGH, GOVERNOR, 0)
        server.generate(read_prompts(tiny_model), max_new_tokens=80, ignore_eos=True)
        told = server.get(PATH)
        (governed, *others) = told["governed"]
        assert all(other == governed for other in others), "ranks decide alike"
        assert told["add"] == told["in_force"]["add"] == governed["budget"]
        assert LOW <= governed["budget"] < HIGH
        assert 0 < governed["moves"] <= 80 // EVERY
        assert told["since_switch"]["mean_kept_mass"] > FLOOR - 0.1
        metrics = read_metrics(server, sum(told["counters"]["outcomes"].values()))
        assert metrics["governor_budget"] == governed["budget"]
        assert metrics["governor_moves_total"] == governed["moves"]
        deadline = time.monotonic() + 10
        while "governed add:" not in server.log_text() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert "governed add:" in server.log_text()
        assert check_steps(read_lines(probe), BUDGETS, speculative=False) >= 2
        refused = post(server, {"policy": "xshare", "governor": {"kept_mass": 2, "add": [1, 4]}})
        assert (refused.status_code, refused.json()["error"]) == (
            400,
            "governor: kept_mass = 2: allowed is a number in (0, 1)",
        )
        again = post(server, told).json()
        assert (again["add"], again["governed"][0]["moves"]) == (told["add"], 0)
        assert post(server, BUDGETS[3]).json()["governed"] == []
