"""Two real replicas: expert affinity changes who runs a request, and no token.

sglang serve --model-path DIR --dp-size 4 --load-balance-method expert_affinity --expert-affinity FILE
"""

from pathlib import Path

import pytest

from affinity.tables import make_table as make_synthetic
from benchmark.affinity.live import Run, draw_requests, make_args, make_env, run_requests
from benchmark.affinity.texts import make_table
from benchmark.common.paths import TEXTS
from benchmark.common.server import Server, ServerError
from benchmark.quality.model import load_model
from benchmark.quality.text import load_sequences

REPLICAS, PER_REPLICA = 2, 8


@pytest.fixture(scope="module")
def table(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("affinity") / "table.safetensors"
    make_table(load_model(tiny_model), tiny_model, 4096).save(file)
    return file


def serve(model: Path, table: Path, method: str) -> tuple[Run, str, str]:
    """What came of 96 requests of mixed domains, the server's log and its metrics."""
    prompts = load_sequences(TEXTS, model, 64, 30).tokens.tolist()
    requests = draw_requests(prompts, 96, 24)
    with Server(model, make_args(method, REPLICAS, table, 1.25), env=make_env(REPLICAS), name=method) as server:
        run = run_requests(server, requests, REPLICAS, PER_REPLICA)
        return run, server.log_text(), server.get("/metrics")


@pytest.mark.long
def test_affinity_answers_as_round_robin_and_keeps_the_bound(tiny_model: Path, table: Path) -> None:
    one, _, _ = serve(tiny_model, table, "round_robin")
    other, log, metrics = serve(tiny_model, table, "expert_affinity")
    assert one.outputs == other.outputs
    assert set(other.replicas) == {0, 1}
    assert other.replicas != one.replicas
    # 16 at once, and at most 1.25 of the mean: 10 beside 6, but for moments in which a client has not asked again.
    assert other.imbalance < 1.3
    counted = [line for line in metrics.splitlines() if line.startswith("sglang:expert_affinity_requests_total")]
    assert sum(float(line.split()[-1]) for line in counted) == 96
    assert any('reason="affinity"' in line for line in counted)
    running = [line for line in metrics.splitlines() if line.startswith("sglang:expert_affinity_running_requests")]
    assert len(running) == REPLICAS
    assert "Expert affinity: " in log


@pytest.mark.long
def test_a_table_of_another_model_is_refused_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    make_synthetic().save(file)
    server = Server(tiny_model, make_args("expert_affinity", REPLICAS, file, 1.1), name="refused")
    server.start()
    with pytest.raises(ServerError) as stop:
        server.wait()
    assert stop.value.returncode == 1
    assert stop.value.log.splitlines()[-1].startswith(f"--expert-affinity {file}: its vocabulary is 66, that of ")
    assert "Traceback" not in stop.value.log
