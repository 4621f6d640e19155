"""Two real replicas: expert affinity changes who runs a request, and no token.

sglang serve --model-path DIR --dp-size 4 --load-balance-method expert_affinity --expert-affinity FILE
"""

import pytest

from affinity.tables import make_table as make_synthetic
from benchmark.affinity.live import draw_requests, make_args, make_env, run_requests
from benchmark.affinity.texts import make_table
from benchmark.common.paths import TEXTS
from benchmark.common.server import Server, ServerError
from benchmark.quality.model import load_model
from benchmark.quality.text import load_sequences

REPLICAS, PER_REPLICA = 2, 8
pytestmark = pytest.mark.long


def serve(model, table, method):
    """What came of 96 mixed requests, by the model's routing, and forced under a policy; then metrics and log."""
    requests = draw_requests(load_sequences(TEXTS, model, 100, 30), 96, life=24, prompt=64)
    with Server(model, make_args(method, REPLICAS, table, 1.25), env=make_env(REPLICAS), name=method) as server:
        own = run_requests(server, requests, REPLICAS, PER_REPLICA)
        metrics = server.get("/metrics")
        server.post("/expert_policy", {"policy": "xshare", "k0": 1, "add": 8})
        forced = run_requests(server, requests, REPLICAS, PER_REPLICA, force=True, counter="experts_after")
        assert forced.outputs == [request.text for request in requests]
        if method == "expert_affinity":
            check_failed_ids(server)
        return own, forced, metrics, server.log_text()


def read_series(metrics, name):
    """The values of a metric, by its labels."""
    found = (
        line.rsplit(maxsplit=1) for line in metrics.splitlines() if line.startswith(f"sglang:expert_affinity_{name}")
    )
    return {labels: float(value) for labels, value in found}


def check_failed_ids(server):
    """An id whose request failed counts when it comes again. The gauge is as of the last request, itself counted."""
    for _ in range(2):
        with pytest.raises(ServerError, match="longer than the model's context length"):
            server.post("/generate", {"rid": "mine", "input_ids": [1] * 9000})
        server.post("/generate", {"rid": "mine", "text": "a", "sampling_params": {"max_new_tokens": 2}})
        assert sum(read_series(server.get("/metrics"), "running_requests").values()) == 1


def test_affinity_answers_as_round_robin_and_keeps_the_bound(tiny_model, tmp_path):
    table = tmp_path / "table.safetensors"
    make_table(load_model(tiny_model), tiny_model, 4096).save(table)
    own, forced, _, _ = serve(tiny_model, table, "round_robin")
    affine, affine_forced, metrics, log = serve(tiny_model, table, "expert_affinity")
    assert own.outputs == affine.outputs
    assert set(affine.replicas) == {0, 1}
    assert affine.replicas != own.replicas
    # 16 at once, and at most 1.25 of the mean: 10 beside 6, but for moments in which a client has not asked again.
    assert affine.imbalance < 1.3
    counted = read_series(metrics, "requests_total")
    assert sum(counted.values()) == 96
    assert any('reason="affinity"' in labels for labels in counted)
    assert len(read_series(metrics, "running_requests")) == REPLICAS
    assert "Expert affinity: " in log
    # Under a policy both decode the same text from fewer experts.
    for one, other in ((own, forced), (affine, affine_forced)):
        assert other.active < 0.8 * one.active
        assert len(other.nats) == 96
    assert forced.nats != affine_forced.nats


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
