"""The server as the instrument: forced text has the loss of an offline decode, and a tuned plan keeps its tolerance."""

import json

import pytest

from benchmark.tuning.offline import OfflineGauge
from served.release import LATEST
from sglang_xshare.cli import main
from sglang_xshare.live.client import PolicyError
from sglang_xshare.tune.gauge import Gauge
from sglang_xshare.tune.measure import Bench, compare
from sglang_xshare.tune.server import Server
from sglang_xshare.tune.texts import read_samples

KEYS = ("--api-key", "user", "--admin-api-key", "admin")
FLAGS = ("--expert-policy", "observe", "--enable-custom-logit-processor", "--dtype", "float32", *KEYS)
PLAN = {"policy": "xshare", "k0": 1, "add": 8}
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(servers, patched_release):
    return servers(*FLAGS, release=patched_release(LATEST))


def test_forced_text_has_the_loss_of_an_offline_decode(server, tiny_model, tmp_path):
    """Forced requests follow the policy, although this server's requests are exact by default."""
    asked = Server(server.url, "user", "admin")
    asked.set_policy({"policy": "oea", "k0": 4, "exact": {"default": True}})
    samples = {"tuning": read_samples(tiny_model / "heldout", asked.tokenize, 24, 12, 8)[0]}
    bench = Bench(gauge := Gauge(asked, samples), tmp_path / "trace.jsonl")
    vanilla, offline = bench.run({"policy": "vanilla"}, 8, "tuning"), OfflineGauge(tiny_model, samples)
    wanted = offline({"policy": "vanilla"}, 8, "tuning")
    assert vanilla.nats == pytest.approx(wanted.nats, abs=1e-4)
    assert vanilla.greedy == wanted.greedy
    assert vanilla.saved is None
    found = bench.run(PLAN, 8, "tuning")
    assert found.saved > 0
    assert compare(found, vanilla).delta > 0
    wanted = offline(PLAN, 8, "tuning")
    assert found.nats == pytest.approx(wanted.nats, abs=1e-3)
    assert found.divergences == pytest.approx(wanted.divergences, abs=1e-3)
    assert found.saved == pytest.approx(wanted.saved)
    assert found.before == pytest.approx(wanted.before)
    other = asked.set_policy({"policy": "oea", "k0": 3})
    with pytest.raises(PolicyError, match="somebody else has switched its policy"):
        bench.run({"policy": "xshare", "k0": 1, "add": 4}, 8, "tuning")
    gauge.guard.restore()
    assert asked.get_policy()["in_force"] == other["in_force"]


def test_a_tuned_plan_is_taken_and_the_server_gets_its_policy_back(server, tiny_model, tmp_path, capsys):
    asked = Server(server.url, "user", "admin")
    asked.set_policy({"policy": "observe", "plans": ["oea:k0=3"]})
    flags = ["--samples", "8", "--batches", "4", "--prompt", "16", "--tokens", "8", "--groups", "2"]
    settings = ["xshare:k0=1,add=4", "xshare:k0=1,add=12"]
    out = ["--out", str(tmp_path / "out"), "--texts", str(tiny_model / "heldout")]
    assert main(["tune", server.url, *settings, "--tolerance", "20%", *flags, *out, *KEYS]) == 0
    assert "greedy agreement" in capsys.readouterr().out.splitlines()[-3]
    assert asked.get_policy()["policy"] == "observe"
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    [batch] = report["batches"]
    chosen = batch["trials"][batch["chosen"]]
    assert chosen["loss"]["delta"] <= batch["tolerance_nats"]
    assert chosen["held_out"]["delta"] <= batch["tolerance_nats"]
    assert chosen["experts"] < batch["experts_before"]
    assert asked.set_policy(report["policy"])["policy"] == report["policy"]["policy"]


def test_a_server_without_logit_processors_is_one_line(servers, patched_release, tiny_model, tmp_path, capsys):
    other = servers("--expert-policy", "observe", "--dtype", "float32", release=patched_release(LATEST))
    out = ["--out", str(tmp_path), "--texts", str(tiny_model / "heldout"), "--tolerance", "1%"]
    assert main(["tune", other.url, *out, "--samples", "4", "--batches", "4"]) == 1
    assert "--enable-custom-logit-processor" in capsys.readouterr().err
