"""What a server is given before the first round that counts."""

from unittest.mock import MagicMock, Mock

import pytest

from benchmark.common import rounds
from benchmark.common.rounds import Series, Workload, run_rounds
from benchmark.common.variant import parse_variant


@pytest.mark.parametrize("gpu", [True, False])
def test_on_a_gpu_a_wave_of_the_workload_is_not_recorded(tiny_model, monkeypatch, gpu):
    client, rounds_run = MagicMock(), []
    client.__enter__.return_value = client
    monkeypatch.setattr(rounds, "has_gpu", lambda: gpu)
    monkeypatch.setattr(rounds, "Client", lambda: client)
    monkeypatch.setattr(rounds, "_run", lambda client, series, server, load, workload: rounds_run.append(load))
    workload = Workload(tiny_model, tiny_model / "heldout", rounds=2, requests=12, concurrency=4, seed=5)
    servers = [Mock(command=["serve"]), Mock(command=["serve"])]
    series = [Series(parse_variant("off")), Series(parse_variant("xshare"))]
    assert list(run_rounds(workload, series, servers)) == [0, 1]
    assert [call.args[0] for call in client.run.call_args_list] == (servers if gpu else [])
    for call in client.run.call_args_list:
        load = call.args[2]
        assert (load.requests, load.concurrency, load.output_tokens) == (4, 4, 32)
        assert load.seed not in {load.seed for load in rounds_run}
    assert [load.requests for load in rounds_run] == [12] * 4


def test_policies_of_one_server_take_turns_on_it_from_an_empty_cache(monkeypatch):
    started = []

    def start(_, args, **options):
        started.append(Mock(args=args, command=[]))
        return started[-1]

    monkeypatch.setattr(rounds, "Server", start)
    names = ("off", "vanilla", "xshare", "oea:k0=3", "off", "oea:k0=3")
    variants = [parse_variant(name, ("--drafts",) * (number > 3)) for number, name in enumerate(names)]
    for gpu, places in ((False, [0, 1, 2, 2, 3, 4]), (True, [0, 1, 2, 3, 4, 5])):
        started.clear()
        monkeypatch.setattr(rounds, "has_gpu", lambda gpu=gpu: gpu)
        with rounds.serve("model", variants) as servers:
            assert [started.index(server) for server in servers] == places
            for server, variant in zip(servers, variants, strict=True):
                rounds.switch(server, variant, servers)
        shared = [call.args for call in started[2].post.call_args_list]
        bodies = [] if gpu else [{"policy": "xshare"}, {"policy": "oea", "k0": 3}]
        assert shared == [call for body in bodies for call in (("/expert_policy", body), ("/flush_cache", {}))]
        assert all(server.stop.called for server in started)
        assert not started[0].post.called
