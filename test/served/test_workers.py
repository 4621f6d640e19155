"""Several tokenizer processes behind one port: a request, a switch and a request's end may each pass by another one."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from benchmark.affinity.live import make_args
from benchmark.affinity.texts import make_table
from benchmark.common.server import Server, bind_ranks
from benchmark.common.variant import parse_variant
from benchmark.quality.model import load_model
from served.answers import greedy, read_affinity, read_plans
from served.load import post
from served.release import both_releases

CLIENTS = 8
# SGLang ends a worker that does not answer within 10 s as it starts, which is longer on a few cores.
PATIENT = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "300"}


@pytest.mark.long
@pytest.mark.timeout(1200)
@both_releases
def test_workers_switch_tell_and_dispatch(release, tiny_model, prompts, patched_release, tmp_path):
    table = tmp_path / "table.safetensors"
    make_table(load_model(tiny_model), tiny_model, 4096).save(table)
    flags = [*make_args("expert_affinity", 2, table, 1.25), "--tokenizer-worker-num", "2"]
    # 0.5.17 takes the cores of one replica alone, and gives each all of them where nobody says.
    env = PATIENT if release == "0.5.17" else bind_ranks(2) | PATIENT
    tree = patched_release(release)
    with Server(tiny_model, flags, release=tree, env=env, name="workers", deadline=600) as server:

        def ask(number, **custom):
            body = {"text": prompts[number % len(prompts)], "sampling_params": greedy(8, custom_params=custom)}
            return requests.post(server.url + "/generate", json=body, timeout=120).json()

        def count_workers():
            """Those that have had a message of a scheduler's or a detokenizer's."""
            return len(set(re.findall(r"Registering tokenizer ipc_name='([^']+)'", server.log_text())))

        with ThreadPoolExecutor(CLIENTS) as threads:
            # A connection goes to whichever is free: to one alone where the other is slow to start.
            while count_workers() < 2:
                list(threads.map(ask, range(CLIENTS)))
            plans = ["xshare:k0=1,add=4", "oea:k0=2", "xshare:k0=1,add=8"]
            for number, spelling in enumerate(plans, 1):
                plan = parse_variant(spelling).body()
                assert post(server, plan).status_code == 200
                told = list(threads.map(lambda _: server.get("/expert_policy"), range(CLIENTS)))
                assert all(plan.items() <= one.items() for one in told)
                assert {one["switches"] for one in told} == {number}
                answers = [answer["meta_info"] for answer in threads.map(ask, range(2 * CLIENTS))]
                assert {answer["expert_policy"]["policy"] for answer in answers} == {spelling}
                assert any(answer["expert_policy"]["steps"] for answer in answers)
                assert {answer["dp_rank"] for answer in answers} == {0, 1}
            switch_at_once(server, threads, plans, len(plans))
            exact = list(threads.map(lambda number: ask(number, expert_policy="exact"), range(CLIENTS)))
        assert all(answer["meta_info"]["expert_policy"].get("exact") for answer in exact)
        assert "must be 'exact' or 'shared'" in ask(0, expert_policy="bad")["error"]["message"]
        ask(0)
        metrics = server.get("/metrics")
        # As of the last request, itself counted: both workers have told what ended.
        assert sum(read_affinity(metrics, "running_requests")) == 1
        assert len(read_plans(metrics)) == 2  # one a replica


def switch_at_once(server, threads, plans, switches):
    """Many POSTs meet in both workers: each is made by both replicas or by none, and `switches` counts those made."""

    def switch(number):
        return post(server, parse_variant(plans[number % len(plans)]).body())

    for _ in range(10):
        answers = list(threads.map(switch, range(CLIENTS)))
        made = [answer.json() for answer in answers if answer.status_code == 200]
        refused = [answer.json()["error"] for answer in answers if answer.status_code != 200]
        assert set(refused) <= {"another client switches the policy at the same time; ask again"}
        assert sorted(one["switches"] for one in made) == [*range(switches + 1, switches + len(made) + 1)]
        switches += len(made)
        told = server.get("/expert_policy")
        assert told["switches"] == switches
        last = max(made, key=lambda one: one["switches"])
        assert told["in_force"] == last["in_force"]
        states = server.get("/server_info")["internal_states"]
        assert [state["expert_policy_config"] for state in states] == [told["in_force"]] * 2
