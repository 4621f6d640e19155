"""Two real replicas: expert affinity changes who runs a request, and no token.

sglang serve --model-path DIR --dp-size 4 --load-balance-method expert_affinity --expert-affinity FILE
"""

from dataclasses import dataclass

import pytest

from affinity.tables import make_table as make_synthetic
from benchmark.affinity.live import Run, draw_requests, make_args, run_requests
from benchmark.affinity.texts import make_table
from benchmark.common.paths import TEXTS
from benchmark.common.server import Server, ServerError, bind_ranks
from benchmark.quality.model import load_model
from benchmark.quality.text import load_sequences
from served.answers import read_affinity

REPLICAS, PER_REPLICA = 2, 8


@pytest.fixture(scope="module")
def table(tiny_model, tmp_path_factory):
    file = tmp_path_factory.mktemp("affinity") / "table.safetensors"
    make_table(load_model(tiny_model), tiny_model, 4096).save(file)
    return file


@dataclass(frozen=True)
class Served:
    """What came of 96 mixed requests, by the model's routing, and forced under a policy; then log and metrics."""

    own: Run
    forced: Run
    log: str
    metrics: str


def serve(model, table, method):
    requests = draw_requests(load_sequences(TEXTS, model, 100, 30), 96, life=24, prompt=64)
    with Server(model, make_args(method, REPLICAS, table, 1.25), env=bind_ranks(REPLICAS), name=method) as server:
        own = run_requests(server, requests, REPLICAS, PER_REPLICA)
        metrics = server.get("/metrics")
        server.post("/expert_policy", {"policy": "xshare", "k0": 1, "add": 8})
        forced = run_requests(server, requests, REPLICAS, PER_REPLICA, force=True, counter="experts_after")
        assert forced.outputs == [request.text for request in requests]
        return Served(own, forced, server.log_text(), metrics)


@pytest.mark.long
def test_affinity_answers_as_round_robin_and_keeps_the_bound(tiny_model, table):
    one, other = serve(tiny_model, table, "round_robin"), serve(tiny_model, table, "expert_affinity")
    assert one.own.outputs == other.own.outputs
    assert set(other.own.replicas) == {0, 1}
    assert other.own.replicas != one.own.replicas
    # 16 at once, and at most 1.25 of the mean: 10 beside 6, but for moments in which a client has not asked again.
    assert other.own.imbalance < 1.3
    assert sum(read_affinity(other.metrics, "requests_total")) == 96
    assert read_affinity(other.metrics, 'requests_total{.*reason="affinity"')
    assert len(read_affinity(other.metrics, "running_requests")) == REPLICAS
    assert "Expert affinity: " in other.log
    # Under a policy both decode the same text from fewer experts.
    for served in (one, other):
        assert served.forced.active < 0.8 * served.own.active
        assert len(served.forced.nats) == 96
    assert one.forced.nats != other.forced.nats


@pytest.mark.long
def test_an_id_whose_request_failed_counts_when_it_comes_again(tiny_model, table):
    """The gauge is as of the last request, itself counted."""
    args = make_args("expert_affinity", REPLICAS, table, 1.25)
    with Server(tiny_model, args, env=bind_ranks(REPLICAS), name="again") as server:
        for _ in range(2):
            with pytest.raises(ServerError, match="longer than the model's context length"):
                server.post("/generate", {"rid": "mine", "input_ids": [1] * 9000})
            server.post("/generate", {"rid": "mine", "text": "a", "sampling_params": {"max_new_tokens": 2}})
            assert sum(read_affinity(server.get("/metrics"), "running_requests")) == 1


@pytest.mark.long
def test_a_table_of_another_model_is_refused_in_one_line(tiny_model, tmp_path):
    file = tmp_path / "other.safetensors"
    make_synthetic().save(file)
    server = Server(tiny_model, make_args("expert_affinity", REPLICAS, file, 1.1), name="refused")
    server.start()
    with pytest.raises(ServerError) as stop:
        server.wait()
    assert stop.value.returncode == 1
    assert stop.value.log.splitlines()[-1].startswith(f"--expert-affinity {file}: must be a table of this model, ")
    assert "Traceback" not in stop.value.log
