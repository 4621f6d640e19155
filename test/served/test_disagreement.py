"""Two ranks of one server, one of which comes to another policy, or a layer that passes the stage by: wrong answers
end.
"""

from pathlib import Path

import pytest
import requests

from benchmark.common.server import bind_ranks
from served import disagree
from served.answers import SERVERS, parse_metrics, read_plans, say_together
from served.load import post, wait_for
from served.ranks import TWO_CORES, XSHARE
from sglang_xshare.live import PATH

WHICH = "ranks [1] have selected other experts than the first"
RANKS = (*SERVERS["xshare"], "--tp", "2")
BYPASSED = "PolicyBypassed: MoE layers [2] did not route through the expert policy in a decode step"


def make_ranks_disagree(server, prompts, env):
    """Change one rank's policy with the plugin, and generate until the server has switched to vanilla."""
    Path(env["DISAGREE"]).touch()
    for _ in range(100):
        server.generate(prompts, max_new_tokens=20, ignore_eos=True)
        told = server.get(PATH)
        if told["disagreement"] is not None:
            break
    assert told["disagreement"].startswith(WHICH)
    assert (told["policy"], told["switches"]) == ("vanilla", 1)


@pytest.mark.long
def test_the_server_goes_back_to_vanilla_and_may_be_switched_again(small_server, prompts, tmp_path, served):
    env = TWO_CORES | disagree.put(tmp_path)
    server, probe, _ = small_server(*RANKS, env=env)
    with server:
        assert say_together(server, probe, prompts) == served("xshare").tokens[0]
        make_ranks_disagree(server, prompts, env)
        assert say_together(server, probe, prompts) == served("unpatched").tokens[0]
        assert post(server, XSHARE).json()["disagreement"] is None
        assert say_together(server, probe, prompts) == served("xshare").tokens[0]
        metrics = parse_metrics(server.get("/metrics"))
        assert metrics["vanilla_fallbacks_total"] == metrics["rank_disagreements_total"] == 1
        assert server.get(PATH)["switches"] == 2
    assert server.log_text().count(WHICH) == 1


@pytest.mark.long
def test_a_replica_that_fell_back_is_switched_with_the_other(small_server, prompts, tmp_path):
    env = bind_ranks(4) | disagree.put(tmp_path)
    server, _, _ = small_server(*RANKS, "--dp-size", "2", env=env)

    def read_policies():
        states = server.get("/server_info")["internal_states"]
        return [state["expert_policy_config"]["policy"] for state in states]

    with server:
        assert server.get(PATH)["switches"] == 0
        make_ranks_disagree(server, prompts, env)
        assert sorted(read_policies()) == ["vanilla", "xshare"]
        late = post(server, {"policy": "oea", "k0": 2, "after": 0})
        assert (late.status_code, late.json()["error"].partition(", ")[0]) == (400, "after = 0: must be 1")
        assert sorted(read_policies()) == ["vanilla", "xshare"]
        switched = post(server, {"policy": "oea", "k0": 2, "after": 1}).json()
        assert (switched["policy"], switched["switches"], switched["disagreement"]) == ("oea", 2, None)
        assert read_policies() == ["oea", "oea"]
        assert read_plans(server.get("/metrics")) == [switched["plan_hash"]] * 2
        assert server.get(PATH)["switches"] == 2
    assert server.log_text().count(WHICH) == 1


@pytest.mark.parametrize("line", [BYPASSED, pytest.param(WHICH, marks=pytest.mark.long)], ids=["bypass", "flag"])
def test_the_server_ends(line, small_server, prompts, tmp_path):
    """A layer that bypasses the stage ends it, and a disagreement where its flag says so."""
    if line == WHICH:
        flags, env = (*RANKS, "--expert-policy-on-disagreement", "stop"), TWO_CORES | disagree.put(tmp_path)
    else:
        flags, env = SERVERS["xshare"], {"EXPERT_PROBE_BYPASS": "2"}
    server, _, _ = small_server(*flags, env=env)
    with server:
        Path(env.get("DISAGREE", tmp_path / "unused")).touch()
        with pytest.raises(requests.RequestException):
            server.generate(prompts, max_new_tokens=20, ignore_eos=True)
        wait_for(server.returncode)
    assert server.log_text().count(line) == 1
    assert line == BYPASSED or "Scheduler hit an exception" not in server.log_text()
