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
