"""`python -m benchmark.tuning`, also `python -m benchmark.tuning --offline`: a record made by hand, and a small run."""

import pytest

from benchmark.common.paths import TRAINED
from benchmark.common.record import read_record
from benchmark.common.variant import parse_plan
from benchmark.quality.measure import Bench
from benchmark.quality.model import Layout, load_model
from benchmark.quality.text import load_sequences
from benchmark.tuning.__main__ import main
from benchmark.tuning.offline import OfflineGauge
from benchmark.tuning.report import estimate_interval, find_published, find_saved
from sglang_xshare.tune.measure import Measurement
from sglang_xshare.tune.texts import Sample

SIZES = ["--samples", "8", "--prompt", "8", "--tokens", "8", "--batch", "4", "--tolerances", "20"]
SETTINGS = ["xshare:k0=1,add=8", "xshare:k0=1,add=24"]


PUBLISHED = {
    **{"xshare:k0=1,add=4": (10, 0.1), "xshare:k0=1,add=8": (20, 0.02), "xshare:k0=2,add=0": (9, 0.2)},
    "oea:k0=2": (30, 0.01),
}
"""Settings with their experts and their loss in nats."""


def make_point(experts: float, delta: float) -> dict:
    published = [
        {"policy": name, "experts": count, "loss": {"delta": loss, "error": 0.001}}
        for name, (count, loss) in PUBLISHED.items()
    ]
    return {"batch": 4, "published": published, "experts": experts, "loss": {"delta": delta, "error": 0.001}}


def test_saved_experts_are_those_of_the_best_published_setting_at_the_same_loss():
    point = make_point(12.0, 0.06)
    assert find_published(point) == (pytest.approx(15.0), "xshare:k0=1,add")
    assert find_saved(point) == pytest.approx(0.2)
    for loss in (0.3, 0.001):
        assert find_published(make_point(12.0, loss)) is None, "beyond the published settings nothing is claimed"


def test_the_interval_is_that_of_the_batches():
    point = make_point(12.0, 0.06)
    vanilla, steady, noisy = (measure(2.0, 0), measure(2.06, 0), measure(2.06, 0.05))
    published = [measure(2 + one["loss"]["delta"], 0) for one in point["published"]]
    assert estimate_interval(point, steady, published, vanilla) == pytest.approx((0.2, 0.2), abs=1e-9)
    # Half of the 50 batches 0.05 nats above the others: 0.007 nats of error; at 0.008 nats an expert 0.88 of 15.
    wanted = 1.96 * 0.05 / 50**0.5 / 0.008 * 12 / 15**2
    lower, upper = estimate_interval(point, noisy, published, vanilla)
    assert (upper - lower) / 2 == pytest.approx(wanted, rel=0.2)


def measure(mean: float, spread: float) -> Measurement:
    nats = ([mean - spread] * 4 + [mean + spread] * 4) * 25
    return Measurement(nats, [0.0] * 200, [[0]] * 200, None, None, None)


def test_offline_a_policy_holds_in_its_layers():
    model = load_model(TRAINED)
    sequences = load_sequences(TRAINED / "heldout", TRAINED, 17, 2)
    samples = [Sample(row[:8], row[8:]) for row in sequences.tokens.tolist()]
    gauge = OfflineGauge(TRAINED, {"tuning": [*samples, samples[0]]})
    everywhere = gauge({"policy": "xshare", "k0": 1, "add": 4}, 8, "tuning")
    wanted = Bench(model, sequences, 8).run(parse_plan("xshare:k0=1,add=4"), Layout(8))
    assert everywhere.nats == pytest.approx(wanted.nats.mean(1).tolist(), abs=1e-6)
    saved = [before - after for before, after in zip(wanted.routing.vanilla_active, wanted.routing.active, strict=True)]
    assert everywhere.saved == pytest.approx(float(sum(one.mean() for one in saved)), abs=1e-4)
    first = gauge({"policy": "xshare", "k0": 1, "add": 4, "layers": {"1-3": {"policy": "vanilla"}}}, 8, "tuning")
    assert first.saved == pytest.approx(float(saved[0].mean()), abs=1e-4)
    vanilla = gauge({"policy": "vanilla"}, 8, "tuning")
    assert (vanilla.saved, vanilla.divergences) == (None, pytest.approx([0] * 8, abs=1e-9))
    assert 0 < sum(first.divergences) < sum(everywhere.divergences)


@pytest.mark.long
@pytest.mark.parametrize("how", [[], ["--offline"]])
def test_a_small_run(tmp_path, how):
    main(["xshare:k0=1,add=4", "oea:k0=2", "--settings", *SETTINGS, *SIZES, *how, "--out", str(tmp_path)])
    ((name, point),) = read_record(tmp_path / "tuning.json", "tuning")["points"].items()
    assert name == "20%, 4 rows"
    assert [one["policy"] for one in point["published"]] == ["xshare:k0=1,add=4", "oea:k0=2"]
    assert 0 < point["experts"] < point["before"]
